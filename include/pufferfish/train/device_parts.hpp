// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: what a training run and its tasks are made of on a device, besides layers. The CPU's here; a
/// device's comes with <pufferfish/gpu.hpp>.

#include <cstdint>
#include <span>
#include <type_traits>

#include <pufferfish/core/context.hpp>
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

  /// Integers on their way to where passes read them.
  class token_place {
   public:
    /// For up to so many.
    explicit token_place(index_t) {}
    /// Where they are now, until two calls later; they may change then.
    std::span<const std::int32_t> bring(context<device::cpu>&, std::span<const std::int32_t> tokens) {
      return tokens;
    }
  };

  template <class Root>
  static factorization factorize(model<Root>& net, factorize_policy policy, context<device::cpu>& ctx) {
    policy.threads = ctx.threads();
    return pufferfish::factorize(net, policy);
  }
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
