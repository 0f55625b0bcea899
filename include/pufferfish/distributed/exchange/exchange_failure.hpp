// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: how the steps of an exchange end: their number and results, and the failure that ends them all.

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/distributed/exchange_options.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Keeps the text of an exchange's first failure. A step that failed on one rank may have left out
/// collectives that other ranks have called; the next step's collectives would be paired with those of the
/// failed one. All later steps are refused for that reason. Any thread may call the members.
class exchange_failure {
 public:
  /// Keeps the text of `failure`, which is not null, unless an earlier one is kept.
  void keep(const std::exception_ptr& failure) {
    std::string text = "unknown exception";
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& e) {
      text = e.what();
    } catch (...) {
    }
    const std::lock_guard lock(mutex_);
    if (text_.empty()) text_ = std::move(text);
  }

  /// Throws state_error, with the text of the failure, if there was one.
  void require_none() const {
    const std::lock_guard lock(mutex_);
    if (text_.empty()) return;
    throw_error<state_error>({"gradient_exchange: an earlier step failed (", text_,
                              "): the ranks may have different steps; make a new exchange on all ranks"});
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

/// Results of an exchange's steps. Written by the thread that ends steps: the caller's, the exchange's own
/// or, in replays, one of the device's driver. Any thread may call steps() and stopped() meanwhile.
class exchange_counts {
 public:
  /// Number of exchanges, skipped steps excluded.
  std::uint64_t steps() const { return steps_.load(std::memory_order_relaxed); }
  void set_steps(std::uint64_t steps) { steps_.store(steps, std::memory_order_relaxed); }
  void count_step() { set_steps(steps() + 1); }

  exchange_report& report() { return report_; }
  const exchange_report& report() const { return report_; }
  /// Adds the bytes of one step.
  void add_message(index_t payload_bytes, std::size_t copied_bytes) {
    report_.payload_bytes += static_cast<std::uint64_t>(payload_bytes);
    report_.copied_bytes += copied_bytes;
  }

  /// The last element that refuse() was called with.
  const std::optional<nonfinite_gradient>& nonfinite() const { return nonfinite_; }
  /// Whether nonfinite_policy::stop has ended the step: on all ranks, after the same collectives.
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

  /// Starts a step.
  void restart() { stopped_.store(false, std::memory_order_relaxed); }
  /// Ends a step with a non-finite gradient: counts a skipped step and returns false, or throws value_error
  /// for nonfinite_policy::stop. `usable`: whether the exchange is usable after that exception.
  bool refuse(nonfinite_gradient found, nonfinite_policy policy, bool usable = true) {
    nonfinite_ = std::move(found);
    if (policy == nonfinite_policy::stop) {
      stopped_.store(usable, std::memory_order_relaxed);
      throw_nonfinite();
    }
    ++report_.skipped;
    return false;
  }
  /// Throws value_error that names the element of nonfinite().
  [[noreturn]] void throw_nonfinite() const {
    PUFFERFISH_THROW(value_error("gradient_exchange: " + to_string(*nonfinite_)));
  }

 private:
  std::atomic<std::uint64_t> steps_{0};
  std::atomic<bool> stopped_{false};
  std::optional<nonfinite_gradient> nonfinite_;
  exchange_report report_;
};

/// Throws state_error for a call in a step of which only another part is captured into a graph.
[[noreturn]] PUFFERFISH_COLD inline void refuse_half_capture() {
  throw_error<state_error>(
      {"gradient_exchange: begin, the backward pass and finish are captured into a graph together, "
       "or none of them; behind a replayed backward pass, begin and finish are direct"});
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
