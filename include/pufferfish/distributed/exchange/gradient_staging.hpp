// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the memory in which an exchange works on gradients, and the copies to it and back. On a CPU it
/// is the gradient arena itself; a device's form is in <pufferfish/gpu.hpp>.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/distributed/exchange/bucket.hpp>
#include <pufferfish/distributed/exchange_options.hpp>
#include <pufferfish/nn/parameter_store.hpp>
#include <pufferfish/nn/unwritten_gradients.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A call of call(object); does nothing if `call` is null.
struct host_call {
  void (*call)(void*) = nullptr;  ///< function, or nullptr
  void* object = nullptr;         ///< its argument
  void operator()() const {
    if (call != nullptr) call(object);
  }
};

/// Copies gradients to and from the memory in which an exchange works; on the CPU nothing is copied.
/// `gradients()` is the arena in that memory. A bucket is valid there between its await() and write_back().
template <class T, class Device>
class gradient_staging {
 public:
  /// Whether gradients are copied to other memory.
  static constexpr bool copies = false;

  /// The last arguments: whether anything will be fetched, and what is packed: see the device's form.
  gradient_staging(parameter_store<T>& store, std::size_t, exchange_memory, bool,
                   const std::vector<std::vector<std::int32_t>>&)
      : store_(&store) {}

  /// All gradients, in the memory in which the exchange works.
  std::span<T> gradients() { return store_->gradients(); }
  /// The gradients of bucket number `b` there; the first argument is unused on the CPU.
  std::span<T> gradients_of(std::size_t, const gradient_bucket& bucket) {
    return span_of(gradients(), bucket);
  }
  /// Context for compressors, which work on the host.
  context<device::cpu>& host(context<Device>& ctx) { return ctx; }

  /// Sets gradients that layers have stopped writing to zero, in the order of the context's queue of work.
  void zero_unwritten(context<Device>&) {
    zero_before_exchange(*store_, false, [this](index_t offset, index_t size) {
      std::fill_n(store_->gradients().data() + offset, size, T{});
    });
  }

  /// Starts to copy a bucket to the exchange's memory, after all work in the context's queue. Calls `then`
  /// when it has been copied, on a thread that must not be blocked.
  void fetch(context<Device>&, std::size_t, const gradient_bucket&, host_call then) { then(); }
  /// Whether a bucket has been copied to the exchange's memory. Any thread may call it.
  bool is_fetched(std::size_t) const { return true; }
  /// Waits until a bucket has been copied and the call of its `then` has returned. Any thread may call it.
  void await(std::size_t) const {}
  /// Copies a bucket back, before work that enters the context's queue later; multiplies it by the last
  /// argument if the exchange could not.
  void write_back(context<Device>&, std::size_t, const gradient_bucket&, T) {}

  /// To be called by the thread that works on the gradients, before those of a step.
  void enter_thread() {}

  /// Whether the context's work is being captured into a graph.
  bool is_captured(const context<Device>&) const { return false; }
  /// Waits for all work that may call the exchange's thread.
  void drain() noexcept {}

  /// Tells work that enters the context's queue later whether the step counts.
  void publish(context<Device>&, bool) {}
  /// Sets whether a replayed step counts; see the device's form.
  void set_usable(bool) {}

 private:
  parameter_store<T>* store_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
