// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: where an exchange finds gradients, and how they come there and go back. On a CPU they are there
/// already; a device's form comes with <pufferfish/gpu.hpp>.

#include <algorithm>
#include <cstddef>
#include <span>

#include <pufferfish/core/context.hpp>
#include <pufferfish/dist/bucket.hpp>
#include <pufferfish/dist/exchange_options.hpp>
#include <pufferfish/nn/parameter_store.hpp>
#include <pufferfish/nn/unwritten_gradients.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// call(object), unless there is none.
struct host_call {
  void (*call)(void*) = nullptr;
  void* object = nullptr;
  void operator()() const {
    if (call != nullptr) call(object);
  }
};

/// `gradients()` are the arena's elements where the exchange works on them, good between await() and send()
/// of their bucket.
template <class T, class Device>
class gradient_staging {
 public:
  /// Whether there is a copy of the gradients to bring.
  static constexpr bool copies = false;

  /// Nothing is brought unless it is `used`.
  gradient_staging(parameter_store<T>& store, std::size_t, exchange_memory, bool) : store_(&store) {}

  std::span<T> gradients() { return store_->gradients(); }
  /// Context for compressors, which work on the host.
  context<device::cpu>& host(context<Device>& ctx) { return ctx; }

  /// Sets gradients to zero that layers have stopped writing, in the order of the context's queue of work.
  void zero_unwritten(context<Device>&) {
    zero_before_exchange(*store_, false, [this](index_t offset, index_t size) {
      std::fill_n(store_->gradients().data() + offset, size, T{});
    });
  }

  /// Starts to bring bucket number `b`, all of which is in the context's queue of work; `then` is called when
  /// it has come, on a thread that has to go on with other things.
  void fetch(context<Device>&, std::size_t, const gradient_bucket&, host_call then) { then(); }
  /// Whether it has come; waits until it has, and then() has been called. Any thread may call them.
  bool has_come(std::size_t) const { return true; }
  void await(std::size_t) const {}
  /// Takes it back, before what is put into the context's queue from now on; multiplied by `divisor` if the
  /// exchange could not do it.
  void send(context<Device>&, const gradient_bucket&, T) {}

  /// Called by the thread that works on the gradients, before a step's.
  void enter_thread() {}

  /// Whether the context's work is being captured into a graph.
  bool is_captured(const context<Device>&) const { return false; }
  /// Waits for all work that may call the exchange's thread.
  void drain() noexcept {}

  /// Tells what is put into the queue from now on whether the step counts.
  void publish(context<Device>&, bool) {}
  /// Lets replayed steps say it; see the device's form.
  void set_usable(bool) {}

 private:
  parameter_store<T>* store_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
