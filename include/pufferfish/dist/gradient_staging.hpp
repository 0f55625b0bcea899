// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: where an exchange finds gradients on the host, and how they come there and go back. On a CPU
/// they are there already; a device's form comes with <pufferfish/gpu.hpp>.

#include <cstddef>
#include <span>

#include <pufferfish/core/context.hpp>
#include <pufferfish/dist/bucket.hpp>
#include <pufferfish/nn/parameter_store.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// `gradients()` are the arena's elements for the host, good between await() and send() of their bucket.
template <class T, class Device>
class gradient_staging {
 public:
  gradient_staging(parameter_store<T>& store, std::size_t) : store_(&store) {}

  std::span<T> gradients() { return store_->gradients(); }

  /// Starts to bring bucket number `b`, all of which is in the context's queue of work.
  void fetch(context<Device>&, std::size_t, const gradient_bucket&) {}
  /// Whether it has come; waits until it has. Any thread may call them.
  bool has_come(std::size_t) const { return true; }
  void await(std::size_t) const {}
  /// Takes it back, before what is put into the context's queue from now on.
  void send(context<Device>&, const gradient_bucket&) {}

 private:
  parameter_store<T>* store_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
