// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Where a training run is, and what a task says of a step before it takes it.
///
/// What a task must have (a documented class that does not exist):
///
///     class ExampleTask {
///      public:
///       using model_type = network<T>;         // or model<Root>, and of which device
///       index_t steps_per_epoch() const;
///       // Gradients of this rank's share of one global batch, scaled so that their mean over all ranks is
///       // the global gradient. Calls ctx.begin_step(at.total, ...). On the CPU.
///       evaluation step(context<device::cpu>& ctx, model_type& net, const step_position& at);
///       // The same on a device, in two parts: brings the batch to its place and calls ctx.begin_step; then
///       // what may be captured into a graph, the sum of losses to results[0], and to results[1] the number
///       of
///       // hits or what step_share says instead.
///       step_share load(context<device::gpu>& ctx, const step_position& at);
///       void compute(context<device::gpu>& ctx, model_type& net, double* results);
///       // On the test set, summed over all ranks; collective.
///       template <class Comm>
///       evaluation test(context<Device>& ctx, const model_type& net, Comm& comm);
///       std::string describe() const;   // lines: what a checkpoint and the run that resumes it must share
///       std::string data_lines() const; // the same of the data: their sizes and a digest; asked for once
///       // Optional: one forward pass over this rank's share of a step's batch, in the context's mode; false
///       // if the share is empty. For batch-norm statistics: train/estimate_norms.hpp.
///       bool estimate(context<Device>& ctx, model_type& net, const step_position& at);
///       // Optional: what the layers of a dense network meet in a step, for budgets in milliseconds.
///       std::vector<layer_input> layer_inputs(const model_type& net) const;
///       // Optional: this rank's state that is carried from step to step and kept in checkpoints. It is
///       // stored in the memory of the device.
///       std::span<T> carried();
///     };

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
