// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Device tags and the primary template of `context`. A layer's code is written once; the context of its
/// device provides memory, threads or a stream, and the operations.

#include <type_traits>

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Tags that select a device at compile time: context<device::cpu>, context<device::gpu>. They have no state.
namespace device {
struct cpu {};
struct gpu {};
}  // namespace device

/// Executes operations on one device. `context<device::cpu>` is in core/context.hpp, `context<device::gpu>`
/// comes with <pufferfish/gpu.hpp>.
template <class Device>
class context {
  static_assert(
      !std::is_same_v<Device, device::gpu>,
      "pufferfish: context<device::gpu> is defined by <pufferfish/gpu.hpp>: include that header in this "
      "file (it needs the CUDA Toolkit, not nvcc)");
  static_assert(std::is_same_v<Device, device::gpu>,
                "pufferfish: a device is pufferfish::device::cpu or pufferfish::device::gpu");
};

PUFFERFISH_NAMESPACE_END
