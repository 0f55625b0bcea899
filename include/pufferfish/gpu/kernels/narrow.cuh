// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Conversions of floats to numbers of 16 bits, rounded to nearest with ties to even, and back.

#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// The bits of a bfloat16. A NaN stays a NaN.
struct bf16_bits {
  /// Rounds a float to nearest, ties to even.
  static __device__ std::uint16_t narrow(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
  /// Converts exactly.
  static __device__ float widen(std::uint16_t x) { return __bfloat162float(__ushort_as_bfloat16(x)); }
};
/// The bits of an IEEE half-precision number. A NaN stays a NaN.
struct fp16_bits {
  /// Rounds a float to nearest, ties to even.
  static __device__ std::uint16_t narrow(float x) { return __half_as_ushort(__float2half_rn(x)); }
  /// Converts exactly.
  static __device__ float widen(std::uint16_t x) { return __half2float(__ushort_as_half(x)); }
};

PUFFERFISH_KERNELS_END
