// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Position of a training run, and the requirements on its tasks.
///
/// Members of a task, shown by an example class that does not exist:
///
///     class ExampleTask {
///      public:
///       using model_type = network<T>;         // or model<Root>; its device is the task's
///       index_t steps_per_epoch() const;
///       // Gradients of this rank's share of one global batch, scaled so that their mean over all ranks is
///       // the global gradient. Calls ctx.begin_step(at.total, ...). On the CPU.
///       evaluation step(context<device::cpu>& ctx, model_type& net, const step_position& at);
///       // On a device a step has two parts. load() copies the batch to the device and calls
///       // ctx.begin_step. compute() is the work that may be captured into a graph. It writes the sum of
///       // losses to results[0] and the number of hits to results[1]; if step_share::samples is 0,
///       // results[1] is the number of samples or tokens instead.
///       step_share load(context<device::gpu>& ctx, const step_position& at);
///       void compute(context<device::gpu>& ctx, model_type& net, double* results);
///       // Evaluation on the test set, summed over all ranks. Collective.
///       template <class Comm>
///       evaluation test(context<Device>& ctx, const model_type& net, Comm& comm);
///       std::string describe() const;   // options in lines; equal in a checkpoint and a run that resumes it
///       std::string data_lines() const; // sizes and a digest of the data, equal likewise; called once
///       // Optional: one forward pass over this rank's share of a step's batch, in the context's mode; false
///       // if the share is empty. For batch-norm statistics: train/estimate_norms.hpp.
///       bool estimate(context<Device>& ctx, model_type& net, const step_position& at);
///       // Optional: inputs of a dense network's layers in a step, for budgets in milliseconds.
///       std::vector<layer_input> layer_inputs(const model_type& net) const;
///       // Optional: this rank's state that is carried from step to step and kept in checkpoints. It is
///       // stored in the memory of the device.
///       std::span<T> carried();
///     };

#include <cstdint>

#include <pufferfish/ops/copy/rows.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>
#include <pufferfish/train/evaluate.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Position of a run: epoch and step of the epoch (0-based), and number of steps since the start.
struct step_position {
  index_t epoch = 0;
  index_t step = 0;
  std::uint64_t total = 0;
};

/// This rank's share of a step, for runs on a device.
/// compute() on a device may be replayed from a graph, without a call, for a step of equal key and samples.
struct step_share {
  /// Above 0: number of this rank's samples; the step's second result is then their number of hits. 0: the
  /// second result is itself the number that an evaluation counts, such as tokens.
  index_t samples = 0;
  /// Equal for steps of equal `samples` that do the same work on the same device memory: one captured graph
  /// serves all of them. 0: the step is not captured.
  std::uint64_t key = 0;
};

namespace detail {

/// The compute() of a rank without samples: sets its gradients and results to zero.
template <class Device, class Model>
void compute_nothing(context<Device>& ctx, Model& net, double* results) {
  const auto gradients = net.store().gradients();
  using T = typename decltype(gradients)::value_type;
  ops::fill<T>(ctx, gradients, T{});
  ops::clear_rows<double>(ctx, tensor_view<double, 2>(results, {1, 2}));
}

/// The step() of a task on a CPU, composed of load() and compute().
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
