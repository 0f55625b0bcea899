// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `stable_ranks`: the stable ranks |W|_F^2 / |W|_2^2 of the weight matrices of a network's layers.

#include <cstddef>
#include <utility>
#include <vector>

#include <pufferfish/core/parallel.hpp>
#include <pufferfish/lowrank/candidates.hpp>
#include <pufferfish/lowrank/statistics/stable_rank.hpp>
#include <pufferfish/nn/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The stable ranks of all layers that `policy` would factorize at a low enough rank (select_candidates), in
/// execution order. A stable rank |W|_F^2 / |W|_2^2 is at most the rank of W, and changes little if small
/// singular values change. policy.threads layers are measured at the same time; the result does not depend on
/// the number of threads. The weights of a network on a device are copied to the host first.
///
///     for (const layer_stable_rank& layer : stable_ranks(net, factorize_policy{})) {
///       std::printf("%s %.1f, ", layer.name.c_str(), layer.values.front());
///     }
///
/// Throws value_error, naming the layer, for an element that is not finite, and value_error for an invalid
/// policy (see select()).
template <class Root, class Device>
std::vector<layer_stable_rank> stable_ranks(const model<Root, Device>& net, const factorize_policy& policy,
                                            const stable_rank_options& options = {}) {
  std::vector<layer_stable_rank> result;
  net.read_on_host([&](const Root&) {
    const auto found = detail::find_slots(net);
    const std::vector<layer_choice> choices = select_candidates(found.layers, policy, "stable_ranks");
    std::vector<std::vector<double>> values(choices.size());
    const std::vector<std::size_t> order = detail::decomposition_order(found.layers);
    thread_pool(policy.threads).run(static_cast<index_t>(order.size()), [&](index_t task, int) {
      const std::size_t i = order[static_cast<std::size_t>(task)];
      if (!choices[i].factorize()) return;
      values[i] = stable_ranks(found.slots[i]->weights(found.layers[i].name), options);
    });
    for (std::size_t i = 0; i < choices.size(); ++i) {
      if (!choices[i].factorize()) continue;
      result.push_back({found.layers[i].name, found.layers[i].groups, std::move(values[i])});
    }
  });
  return result;
}

PUFFERFISH_NAMESPACE_END
