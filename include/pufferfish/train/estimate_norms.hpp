// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `estimate_norms` over the batches of a task: see nn/norm_estimation.hpp.

#include <concepts>

#include <pufferfish/nn/norm_estimation.hpp>
#include <pufferfish/train/step_position.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A task with the optional member estimate() that step_position.hpp describes.
template <class Task>
concept norm_estimating_task = requires(Task& task, context<typename Task::model_type::device_type>& ctx,
                                        typename Task::model_type& net, const step_position& at) {
  { task.estimate(ctx, net, at) } -> std::same_as<bool>;
};

/// Sets the running statistics of all batch norms to the means over this rank's shares of `passes` batches:
/// those of step `first` and of the steps after it, continuing into the next epoch. Augmentation and dropout
/// are those of these steps. Returns the number of passes in which this rank had samples. For a model without
/// batch norms it does nothing and returns 0. Parameters, gradients and later steps do not change. Not
/// collective: ranks average their buffers afterwards.
///
/// Throws state_error for a model with batch norms if the task has no estimate(), or if the tape is not
/// empty; value_error unless passes > 0. Exceptions of the task are passed on.
/// \code
///   estimate_norms(run.machine(), run.task(), run.net(), {run.epoch(), run.step_of_epoch(), 0}, 3);
/// \endcode
template <class Task>
index_t estimate_norms(context<typename Task::model_type::device_type>& ctx, Task& task,
                       typename Task::model_type& net, const step_position& first, index_t passes) {
  const auto forward = [&]([[maybe_unused]] index_t k) {
    if constexpr (norm_estimating_task<Task>) {
      const index_t step = first.step + k, steps = task.steps_per_epoch();
      return task.estimate(
          ctx, net, {first.epoch + step / steps, step % steps, first.total + static_cast<std::uint64_t>(k)});
    } else {
      PUFFERFISH_THROW(state_error(
          "estimate_norms: the network has batch norms, and its task has no estimate() to run them"));
      return false;
    }
  };
  return estimate_norms(ctx, net, passes, forward);
}

PUFFERFISH_NAMESPACE_END
