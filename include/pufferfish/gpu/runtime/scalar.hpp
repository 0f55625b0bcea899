// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// 16-bit types in which a network computes on a device: `resnet18<gpu::bf16, device::gpu>()`. The network's
/// parameters, gradients and statistics are floats: parameter_t.
///
/// A 16-bit network reads rounded copies of its parameters, which parameter_store::rounded() returns. Kernels
/// load elements in 16 bits, compute in float, and round each result once.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <pufferfish/core/scalar.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// bfloat16: the exponent range of float, 8 bits of precision. Networks of this type need no loss scale.
using bf16 = __nv_bfloat16;
/// IEEE half precision: 11 bits of precision from 2^-14 to 65504. Training needs loss scaling (loss_scaler).
using fp16 = __half;

}  // namespace gpu

template <>
struct parameter_of<gpu::bf16> {
  using type = float;
};
template <>
struct parameter_of<gpu::fp16> {
  using type = float;
};
template <>
inline constexpr rounded_format rounded_format_of<gpu::bf16> = rounded_format::bf16;
template <>
inline constexpr rounded_format rounded_format_of<gpu::fp16> = rounded_format::fp16;

PUFFERFISH_NAMESPACE_END
