// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `rare_training`: options of training runs whose ranks take local steps.

#include <algorithm>
#include <string>

#include <pufferfish/distributed/local_steps.hpp>
#include <pufferfish/distributed/rare_exchange_options.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of training with local steps: every H steps the ranks exchange parameter changes (rare_exchange).
struct rare_training : rare_exchange_options {
  /// local_steps is H at the run's base rate; at another rate H = local_steps (rate / base rate)^power, at
  /// least 1 and at most the larger of most_steps and local_steps (local_steps_schedule).
  double power = 0.0;
  index_t most_steps = 500;

  /// H as a function of the learning rate; the peak of the schedule is the run's base rate.
  local_steps_schedule schedule() const { return {local_steps, power, 1, std::max(local_steps, most_steps)}; }
  /// Throws value_error, naming the option and its value, for an option out of its range.
  void validate() const {
    rare_exchange_options::validate();
    schedule().validate();
  }
};

/// Text of the options, one line without its end, to compare ranks and checkpoints.
inline std::string describe(const rare_training& options) {
  return describe(static_cast<const rare_exchange_options&>(options)) + ", " + describe(options.schedule());
}

PUFFERFISH_NAMESPACE_END
