// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// A model that only holds layers, of any kinds, for tests of what happens to parameters.

#include <string>
#include <utility>
#include <vector>

#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/layers/attention.hpp>
#include <pufferfish/nn/layers/conv.hpp>
#include <pufferfish/nn/layers/embedding.hpp>
#include <pufferfish/nn/layers/linear.hpp>
#include <pufferfish/nn/layers/lstm.hpp>

namespace test {

using namespace pufferfish;

/// The Root of such a model: layers under their names.
template <class T>
struct shelf : detail::layer_of_parts<shelf<T>, T, device::cpu> {
  using value_type = T;
  std::vector<std::pair<std::string, any_layer<T>>> layers;

  template <class F>
  void parts(F&& f) {
    for (auto& [name, layer] : layers) f(name, layer);
  }
};

inline conv_shape grouped_shape(index_t in, index_t out, const size2& kernel, index_t groups) {
  return {in, out, kernel, {1, 1}, {0, 0}, {1, 1}, groups};
}

/// Dense layers of every kind, with biases where they have some.
template <class T>
model<shelf<T>> every_kind(std::uint64_t seed) {
  shelf<T> all;
  all.layers.emplace_back("embedding", Embedding<T>(31, 12, 3));
  all.layers.emplace_back("conv", Conv<T>(grouped_shape(5, 16, {3, 2}, 1), true));
  all.layers.emplace_back("grouped", Conv<T>(grouped_shape(6, 24, {3, 3}, 3), false));
  all.layers.emplace_back("lstm", LSTM<T>(13, 15));
  all.layers.emplace_back("attention", MultiHeadAttention<T>({{16, 2, 7, 9}, 0.0, 0.0, 1e-6}));
  all.layers.emplace_back("wide", Linear<T>(40, 9, true));
  all.layers.emplace_back("tall", Linear<T>(11, 33, false));
  model<shelf<T>> net{std::move(all)};
  net.initialize(seed);
  return net;
}

/// Factorizes all of these layers, whatever that costs.
inline factorize_policy all_layers(const rank_policy& rank) {
  factorize_policy policy;
  policy.rank = rank;
  policy.first_layer = 1;
  policy.last_layer_dense = false;
  policy.embeddings_dense = false;
  policy.keep_dense_if_larger = false;
  return policy;
}

/// One rank for every matrix of these layers.
template <class Net>
std::vector<layer_rank> ranks_of_all(const Net& net, index_t rank) {
  std::vector<layer_rank> ranks;
  for (const layer_rank& one : planned_ranks(net, all_layers(rank_ratio{0.25}))) {
    ranks.push_back({one.name, rank_list(one.ranks.size(), rank)});
  }
  return ranks;
}

}  // namespace test
