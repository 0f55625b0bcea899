// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: helpers for the embedding slot of a model, which holds an Embedding or a LowRankEmbedding.

#include <cmath>
#include <string>

#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/nn/accounting.hpp>
#include <pufferfish/nn/containers/slot.hpp>
#include <pufferfish/nn/init.hpp>
#include <pufferfish/nn/layers/embedding.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The embedding in a model's slot. Throws state_error if the slot holds another kind of layer.
template <class Model, class T, class Device>
const token_layer<T, Device>& embedding_in(const Model& model, const any_layer<T, Device>& slot) {
  const token_layer<T, Device>* const found = slot.tokens();
  if (found != nullptr) return *found;
  throw_error<state_error>({model.describe(), ": its embedding takes no tokens but is ", slot.describe()});
}

/// Sets how many times the gradient of each of the embedding's parameters is written in one
/// backward pass. Models call this before every visit of their state, because the slot may hold
/// another layer since the last visit; it has no effect if the numbers are right already.
template <class T, class Device>
void tie_embedding(any_layer<T, Device>& slot, int writers) {
  for_each_parameter(slot, [writers](const std::string&, parameter<parameter_t<T>>& p) {
    if (p.writers() != writers) p.set_writers(writers);
  });
}

/// Initializes an embedding at random. fill(table, stream) fills the dense table, or `down`, the table of
/// `rank` numbers per token, of a low-rank embedding, with elements of some variance s. `up` is drawn from
/// U(+-sqrt(3 / rank)), of variance 1 / rank. An element of the product is a sum of `rank` products and so
/// has variance rank s / rank = s: a low-rank embedding starts with rows as large as those of a dense one.
template <class T, class Device, class Fill>
void initialize_embedding(any_layer<T, Device>& slot, const random_stream& random, Fill&& fill) {
  for_each_parameter(slot, [&](const std::string& name, parameter<parameter_t<T>>& p) {
    if (name != "up.weight") return fill(p, random.child(name));
    const double bound = std::sqrt(3.0 / static_cast<double>(p.layout().shape[1]));
    init::uniform(p, -bound, bound, random.child(name));
  });
}

/// Cost of looking up `tokens` tokens: the parameters of the embedding, and the multiply-accumulates of the
/// product with the factor `up` (0 for a dense table).
template <class T, class Device>
layer_cost cost_of_embedding(const std::string& name, const token_layer<T, Device>& table, index_t tokens) {
  const index_t macs = tokens * table.macs();
  return {name, table.describe(), table.parameters(), 0, macs, macs, table.rank()};
}

/// Throws shape_error unless the gradient of a model's logits is dense and has the shape of the logits.
template <class T, class Model>
void check_dlogits(const Model& model, const tensor_view<const T, 2>& dlogits, const extents<2>& logits) {
  if (dlogits.shape() != logits) {
    throw_error<shape_error>({model.describe(), ": gradient ", dlogits.shape(), " of logits ", logits});
  }
  check_dense(model, "dlogits", dlogits);
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
