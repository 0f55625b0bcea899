// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: decides which convolutions on a device are computed on tensor cores, and which by kernels of
/// warp groups (gpu/kernels/conv/halo_conv.hpp).

#include <cstdint>

#include <pufferfish/gpu/kernels/conv/halo_conv.hpp>
#include <pufferfish/gpu/runtime/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Whether kernels for elements of T multiply on tensor cores: always for 16-bit types, and for float in
/// math_mode::tf32.
template <class T>
bool by_tensor_cores(const context<device::gpu>& ctx) {
  return sizeof(T) == 2 || ctx.math() == math_mode::tf32;
}

/// Number of elements in a vector load or store of 16 bytes.
template <class T>
inline constexpr int vector_of = static_cast<int>(16 / sizeof(T));

/// Whether kernels of warp groups compute a convolution of elements of T: the plan fits, the device has warp
/// groups, and all addresses are multiples of 16.
template <class T, class... P>
bool by_warp_groups(const kernels::halo_plan& plan, const P*... operands) {
  return sizeof(T) == 2 && plan.fits && ((reinterpret_cast<std::uintptr_t>(operands) | ...) & 15U) == 0 &&
         kernels::halo_available();
}

/// Calls call(plan) and returns true if by_warp_groups.
template <class T, class Call, class... P>
bool done_by_warp_groups(const kernels::halo_plan& plan, Call call, const P*... operands) {
  if constexpr (sizeof(T) == 2) {
    if (!by_warp_groups<T>(plan, operands...)) return false;
    call(plan);
    return true;
  }
  return false;
}

/// Whether a low-rank convolution that warp groups cannot compute in one pass is faster by warp groups in two
/// passes than by other kernels in one: on an H100 with 1,024 images of 8 x 8 pixels, but not with 128. With
/// stride 2, this has not been measured.
template <class T, class... P>
bool is_faster_apart(context<device::gpu>& ctx, const kernels::conv_geometry& g, const P*... operands) {
  return ctx.conv_library() == nullptr && g.stride_height == 1 && g.out_pixels() >= (index_t{1} << 15) &&
         by_warp_groups<T>(kernels::plan_halo_forward(g), operands...);
}

}  // namespace gpu::detail
PUFFERFISH_NAMESPACE_END
