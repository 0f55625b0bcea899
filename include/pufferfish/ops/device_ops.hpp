// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: how an operation finds its implementation on a device.
///
/// An operation is a function template over the element type and the device, declared once, in ops/. It
/// checks its arguments, returns early if there is nothing to do, and computes on the CPU itself. For another
/// device it calls a static function of a struct template over the device; each folder of ops/ has one such
/// struct, for example elementwise_ops<Device>. That function does not check the arguments again. It has the
/// name of the operation, unless several operations share it:
///
/// \code
/// template <class T, class Device>
/// void add(context<Device>& ctx, std::span<const T> x, std::span<T> y) {
///   PUFFERFISH_ASSERT(x.size() == y.size(), "add: lengths differ");
///   if constexpr (!is_cpu<Device>) {
///     elementwise_ops<Device>::add(ctx, x, y);
///   } else {
///     ...
///   }
/// }
/// PUFFERFISH_SEPARATE_OPERATION(dense, add);
/// \endcode
///
/// gpu/ops/ specialises the structs for device::gpu. A program that uses an operation there includes
/// <pufferfish/gpu.hpp>; without it the compiler reports that the struct is incomplete.

#include <type_traits>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/separate.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

template <class Device>
inline constexpr bool is_cpu = std::is_same_v<Device, device::cpu>;

template <class Device>
struct attention_ops;
template <class Device>
struct conv_ops;
template <class Device>
struct copy_ops;
template <class Device>
struct elementwise_ops;
template <class Device>
struct embedding_ops;
template <class Device>
struct linear_ops;
template <class Device>
struct loss_ops;
template <class Device>
struct norm_ops;
template <class Device>
struct pooling_ops;
template <class Device>
struct recurrent_ops;

}  // namespace ops
PUFFERFISH_NAMESPACE_END
