// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Where a training run is, and what a task says of a step before it takes it.

#include <cstdint>

#include <pufferfish/ops/chunks.hpp>
#include <pufferfish/ops/rows.hpp>
#include <pufferfish/train/evaluate.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Where a run is: step of an epoch (0-based), and steps since the start.
struct step_position {
  index_t epoch = 0;
  index_t step = 0;
  std::uint64_t total = 0;
};

/// This rank's share of a step, for runs on a device.
struct step_share {
  /// Where the second result of a step says how many samples were hit: how many there are. 0: it says itself
  /// how many an evaluation counts, as tokens.
  index_t samples = 0;
  /// Equal for steps that give the device the same work on the same memory (and have as many samples): those
  /// can be captured into a graph. 0: no two steps do.
  std::uint64_t key = 0;
};

namespace detail {

/// A step of a rank without samples: its gradients are zero.
template <class Device, class Model>
void compute_nothing(context<Device>& ctx, Model& net, double* results) {
  const auto gradients = net.store().gradients();
  using T = typename decltype(gradients)::value_type;
  ops::fill<T>(ctx, gradients, T{});
  ops::clear_rows<double>(ctx, tensor_view<double, 2>(results, {1, 2}));
}

/// A task's step on a CPU, out of its two parts.
template <class Task>
evaluation step_at_once(Task& task, context<device::cpu>& ctx, typename Task::model_type& net,
                        const step_position& at) {
  double results[2] = {0.0, 0.0};
  const step_share share = task.load(ctx, at);
  task.compute(ctx, net, results);
  const auto second = static_cast<std::int64_t>(results[1]);
  if (share.samples > 0) return {results[0], second, share.samples};
  return {results[0], 0, second};
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
