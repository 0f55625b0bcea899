// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Replaces the embedding in a model's slot: by low-rank factors, and by the dense table of such factors.

#include <string>
#include <utility>

#include <pufferfish/lowrank/layers/embedding.hpp>
#include <pufferfish/nn/layers/embedding.hpp>
#include <pufferfish/nn/model.hpp>

namespace test {

/// Calls change(slot) for the embedding of a model, after the visit that finds the slot, as factorize does.
template <class Root, class Device, class Change>
void change_embedding(pufferfish::model<Root, Device>& net, Change&& change) {
  using T = typename Root::value_type;
  net.modify([&](Root& root) {
    struct finder final : pufferfish::layer_visitor<T, Device> {
      void on_layer(const std::string&, pufferfish::any_layer<T, Device>&) override {}
      void on_embedding(const std::string&, pufferfish::any_layer<T, Device>& slot) override {
        found = &slot;
      }
      pufferfish::any_layer<T, Device>* found = nullptr;
    } visitor;
    root.visit_layers(visitor);
    change(*visitor.found);
  });
}

/// Replaces a dense embedding by one of the given rank, with random factors.
template <class Root, class Device>
void factor_embedding(pufferfish::model<Root, Device>& net, pufferfish::index_t rank) {
  using T = typename Root::value_type;
  change_embedding(net, [rank](pufferfish::any_layer<T, Device>& slot) {
    const auto& dense = *slot.template target<pufferfish::Embedding<T>>();
    pufferfish::LowRankEmbedding<T> made(dense.vocabulary(), dense.width(), rank, dense.padding());
    made.initialize({9, 1});
    slot = std::move(made);
  });
}

/// The same model with the dense table of the same numbers.
template <class Root>
pufferfish::model<Root> with_dense_embedding(pufferfish::model<Root> net) {
  using T = typename Root::value_type;
  change_embedding(net, [](pufferfish::any_layer<T>& slot) {
    const auto& factors = *slot.template target<pufferfish::LowRankEmbedding<T>>();
    pufferfish::Embedding<T> made(factors.vocabulary(), factors.width(), factors.padding());
    pufferfish::copy(pufferfish::tensor_view<const T, 2>(factors.to_dense()), made.weight());
    slot = std::move(made);
  });
  return net;
}

}  // namespace test
