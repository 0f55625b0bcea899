// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `measure_statistics`: statistics of a trained network, for factorizing it without further training.

#include <cstdint>

#include <pufferfish/core/message.hpp>
#include <pufferfish/nn/measure/collect_statistics.hpp>
#include <pufferfish/train/step_position.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Collects the statistics of the layers that `policy` would factorize (see statistics_collector) from the
/// first `steps` steps of a task, each a forward and a backward pass in training mode. Changes the gradients
/// of `net` and the running statistics of its batch norms, but not its parameters. Throws value_error if
/// steps < 1, the errors of the task, and value_error or rank_error for an invalid policy (see select()).
/// Step k uses the batch of epoch k / n, step k mod n, with n = task.steps_per_epoch(). Local: the statistics
/// are those of the task's rank, and sum_over_ranks adds them over the ranks. Restores the context's mode.
/// \code
///   image_task<float> task(net, train, test, options, 0, 1);
///   const network_statistics seen = measure_statistics(ctx, task, net, policy, 20);
///   factorize(net, policy, &seen);
/// \endcode
template <class Task>
network_statistics measure_statistics(context<device::cpu>& ctx, Task& task, typename Task::model_type& net,
                                      const factorize_policy& policy, index_t steps = 20) {
  if (steps < 1) detail::throw_error<value_error>({"measure_statistics: ", steps, " steps"});
  statistics_collector<typename Task::model_type::value_type> collector(net, policy);
  const mode_scope<device::cpu> training(ctx, run_mode::training);
  const index_t of_epoch = task.steps_per_epoch();
  for (index_t k = 0; k < steps; ++k) {
    const step_position at{k / of_epoch, k % of_epoch, static_cast<std::uint64_t>(k)};
    double samples = 0.0;
    {
      const observed_scope watching(ctx, collector);
      samples = static_cast<double>(task.step(ctx, net, at).count);
    }
    collector.end_step(samples, samples > 0.0);
  }
  return collector.statistics();
}

PUFFERFISH_NAMESPACE_END
