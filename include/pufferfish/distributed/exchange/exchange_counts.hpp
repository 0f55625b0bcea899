// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: number and results of an exchange's steps.

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <pufferfish/core/error.hpp>
#include <pufferfish/distributed/exchange_options.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Number of bytes of all gradients of a store in the number format of the messages. The store's values may
/// be in the memory of a host framework (parameter_store::pack_gradients).
template <class T>
index_t gradient_bytes(const parameter_store<T>& store, exchange_wire wire) {
  return store.size() * static_cast<index_t>(wire_bytes<T>(wire));
}

/// Results of an exchange's steps. Written by the thread that ends steps: the caller's, the exchange's own
/// or, in replays, a thread of the device's runtime library. Any thread may call steps() and stopped()
/// meanwhile.
class exchange_counts {
 public:
  /// Number of exchanges, skipped steps excluded.
  std::uint64_t steps() const { return steps_.load(std::memory_order_relaxed); }
  /// Sets the number of exchanges, in a resumed run.
  void set_steps(std::uint64_t steps) { steps_.store(steps, std::memory_order_relaxed); }
  /// Counts a step that is not skipped.
  void count_step() { set_steps(steps() + 1); }

  /// Times and bytes so far. To be read while no step is under way.
  exchange_report& report() { return report_; }
  const exchange_report& report() const { return report_; }
  /// Adds a step, skipped or not, to the report.
  void add_step() { ++report_.steps; }
  /// Counts a step that sums all gradients of a store, and adds the bytes of its messages.
  template <class T>
  void add_step(const parameter_store<T>& store, exchange_wire wire) {
    add_step();
    report_.payload_bytes += static_cast<std::uint64_t>(gradient_bytes(store, wire));
    if (is_narrow(wire)) report_.copied_bytes += static_cast<std::size_t>(store.size()) * sizeof(T);
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
  std::atomic<std::uint64_t> steps_{0};  // exchanges that count
  std::atomic<bool> stopped_{false};     // whether nonfinite_policy::stop has ended the step
  std::optional<nonfinite_gradient> nonfinite_;
  exchange_report report_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
