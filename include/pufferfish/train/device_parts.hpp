// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: what a training run and its tasks are made of on a device, besides layers. The CPU's here; a
/// device's comes with <pufferfish/gpu.hpp>.

#include <cstddef>
#include <type_traits>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/memory.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/optim/optimizer.hpp>
#include <pufferfish/train/loader.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

template <class Device>
struct device_parts {
  static_assert(!std::is_same_v<Device, device::gpu>,
                "pufferfish: training on device::gpu is defined by <pufferfish/gpu.hpp>: include that header "
                "in this file (it needs the CUDA Toolkit, not nvcc)");
};

template <>
struct device_parts<device::cpu> {
  /// Of a context.
  using machine_options = context_options;

  /// SGD or Adam over arenas of T.
  template <class T>
  using optimizer_type = optimizer<T>;

  /// Batches of images in the device's memory.
  using image_source = loader;

  /// What a step reads, on its way to where it reads it: here, where it is written.
  class input_place {
   public:
    /// Room for `room` bytes.
    explicit input_place(index_t room) : place_(memory_of<device::cpu>::source(), room, uninitialized) {}
    /// Where to write what the next bring() brings.
    std::byte* write() { return place_.data(); }
    /// Brings the first so many bytes of it, and says where they are then, until the next write().
    const std::byte* bring(context<device::cpu>&, index_t) { return place_.data(); }

   private:
    memory_block<std::byte> place_;
  };

  /// In how many rows a step computes so many tokens, at least as many.
  static index_t rows_of_tokens(index_t tokens) { return tokens; }

  /// Whether parameters lie where the run is.
  static void check_place(const context<device::cpu>&, const void*) {}

  /// Threads for work on the host between steps.
  static int host_threads(const context<device::cpu>& ctx) { return ctx.threads(); }

  template <class Root>
  static factorization factorize(model<Root>& net, factorize_policy policy, context<device::cpu>& ctx,
                                 const network_statistics* statistics) {
    policy.threads = ctx.threads();
    return pufferfish::factorize(net, policy, statistics);
  }
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
