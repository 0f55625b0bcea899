// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the comparison of ranks between steps: whether a rank has asked for a stop, and whether losses
/// are still finite.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <span>

#include <pufferfish/core/message.hpp>
#include <pufferfish/train/host_mirror.hpp>
#include <pufferfish/train/progress_record.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// End of the text of every divergence_error.
inline constexpr const char* divergence_advice =
    "; start again, or go on from a checkpoint, with a lower learning rate or with gradient clipping";

/// State of one rank, or the largest values of all ranks.
struct run_condition {
  std::int64_t stop = 0;             ///< reason given to training_run::request_stop; 0: none
  std::int64_t nonfinite_steps = 0;  ///< steps in a row, up to now, without a finite loss
};

/// Throws divergence_error after `steps` steps in a row without a finite loss. The text has the place in
/// training, the last loss, the learning rate `rate` of the last step, and `besides`.
[[noreturn]] inline void throw_divergence(std::int64_t steps, const training_record& at, double rate,
                                          const char* besides) {
  throw_error<divergence_error>({"training diverged: no finite loss for ", steps,
                                 " steps in a row, up to step ", at.step, " of epoch ", at.epoch + 1,
                                 " (step ", at.total_steps, " of the run); the last loss is ", at.last_loss,
                                 " at learning rate ", rate, besides, divergence_advice});
}

/// Compares the ranks' conditions about four times a second by one small all-reduce, so that the cost of the
/// comparison does not matter even if steps take a millisecond. All ranks compare after the same steps: the
/// number of steps up to the next comparison is part of the message.
///
///     run_agreement agreement;
///     for (;;) {  // one training step
///       if (agreement.is_due() && agreement.check(comm, record, most, rate).stop > 0) break;
///     }
class run_agreement {
 public:
  /// Asks all ranks to stop, for a reason above 0. The largest of several reasons is used.
  void request_stop(int reason) { mine_.stop = std::max<std::int64_t>(mine_.stop, reason); }
  /// Reason of the stop that the ranks have agreed on; 0: none.
  int stop_reason() const { return stop_reason_; }

  /// Counts a step. Returns whether the ranks compare after it, the same on all ranks.
  bool is_due() {
    ++steps_;
    return steps_ >= next_;
  }

  /// The largest values over all ranks of the stop reason and of the number of latest steps without a finite
  /// loss. Collective.
  template <class Comm>
  run_condition compare(Comm& comm, const training_record& record) {
    mine_.nonfinite_steps = static_cast<std::int64_t>(record.total_steps - record.finite_steps);
    const run_condition& mine = mine_;
    if (comm.size() == 1) return mine;
    const clock::time_point now = clock::now();
    const double seconds = std::max(1e-6, std::chrono::duration<double>(now - since_).count());
    const double wanted = static_cast<double>(steps_) * (seconds_between / seconds);
    // The number of steps to the next comparison is the slowest rank's, the minimum of all. It is the
    // negative of the maximum of the negatives.
    std::int64_t numbers[3] = {mine.stop, mine.nonfinite_steps,
                               -static_cast<std::int64_t>(std::clamp(wanted, 1.0, most_steps))};
    comm.all_reduce_max(std::span<std::int64_t>(numbers));
    next_ = -numbers[2];
    steps_ = 0;
    since_ = now;
    return {numbers[0], numbers[1]};
  }

  /// Calls compare and stores the agreed stop reason. Throws divergence_error after `most` steps in a row
  /// without a finite loss (0: never). `rate`: learning rate of the last step.
  template <class Comm>
  run_condition check(Comm& comm, const training_record& record, std::int64_t most, double rate) {
    const run_condition all = compare(comm, record);
    stop_reason_ = static_cast<int>(all.stop);
    if (most > 0 && all.nonfinite_steps >= most) throw_divergence(all.nonfinite_steps, record, rate, "");
    return all;
  }

 private:
  using clock = std::chrono::steady_clock;
  static constexpr double seconds_between = 0.25;  // wanted time between two comparisons
  static constexpr double most_steps = 1000.0;     // limit of the steps between two comparisons

  run_condition mine_;  // condition of this rank
  int stop_reason_ = 0;
  clock::time_point since_ = clock::now();
  std::int64_t steps_ = 0;  // steps since the last comparison
  std::int64_t next_ = 1;   // number of steps from one comparison to the next
};

/// Throws divergence_error if one of the parameters, which are stored in `memory`, is not finite; else
/// returns. `found`: the error of the decomposition at the switch, which names the layer and the element.
template <class T>
void check_finite(memory_source& memory, std::span<T> parameters, const training_record& at,
                  const value_error& found) {
  host_mirror<T> here(memory, parameters);
  const std::span<const T> values = here.values();
  if (std::all_of(values.begin(), values.end(), [](T value) { return std::isfinite(value); })) return;
  throw_error<divergence_error>({"training diverged before the switch at the start of epoch ", at.epoch + 1,
                                 ": ", found.what(), divergence_advice});
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
