// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The narrow formats in which gradients travel, and what a number that is not finite is, as functions of
/// single elements for the host and the device. The bits are those of core/scalar.hpp.

#include <cstring>

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

enum class wire_format : int { bf16, fp16 };

/// Smaller than any place of an element.
inline constexpr std::uint64_t all_finite = ~std::uint64_t{0};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

PUFFERFISH_HOST_DEVICE inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
PUFFERFISH_HOST_DEVICE inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// The upper half of a float, rounded to nearest, ties to even; a NaN stays one.
struct bf16_wire {
  PUFFERFISH_HOST_DEVICE static std::uint16_t narrow(float value) {
    const std::uint32_t wide = bits_of(value);
    const bool is_nan = (wide & 0x7fffffffU) > 0x7f800000U;
    const std::uint32_t half =
        is_nan ? (wide >> 16) | 0x0040U : (wide + (0x7fffU + ((wide >> 16) & 1U))) >> 16;
    return static_cast<std::uint16_t>(half);
  }
  PUFFERFISH_HOST_DEVICE static float widen(std::uint16_t bits) {
    return float_of(static_cast<std::uint32_t>(bits) << 16);
  }
};

/// IEEE binary16: rounded likewise, below 2^-14 to multiples of 2^-24; infinite from 65520 on.
struct fp16_wire {
  PUFFERFISH_HOST_DEVICE static std::uint16_t narrow(float value) {
    const std::uint32_t wide = bits_of(value), magnitude = wide & 0x7fffffffU;
    std::uint32_t half;
    if (magnitude > 0x7f800000U) {
      half = 0x7e00U | ((magnitude >> 13) & 0x3ffU);
    } else if (magnitude >= 0x47800000U) {
      half = 0x7c00U;
    } else if (magnitude >= 0x38800000U) {
      const std::uint32_t rebiased = magnitude - (112U << 23);
      half = (rebiased + 0xfffU + ((rebiased >> 13) & 1U)) >> 13;
    } else {
      // Units of 1/2's last place are 2^-24: the sum is rounded to them.
      half = bits_of(float_of(magnitude) + 0.5F) - 0x3f000000U;
    }
    return static_cast<std::uint16_t>(((wide >> 16) & 0x8000U) | half);
  }
  PUFFERFISH_HOST_DEVICE static float widen(std::uint16_t bits) {
    const std::uint32_t wide = bits, sign = (wide & 0x8000U) << 16, magnitude = wide & 0x7fffU;
    if (magnitude >= 0x7c00U) return float_of(sign | 0x7f800000U | (magnitude & 0x3ffU) << 13);
    if (magnitude >= 0x0400U) return float_of(sign | ((magnitude << 13) + (112U << 23)));
    const float value = static_cast<float>(magnitude) * 0x1p-24F;
    return sign != 0 ? -value : value;
  }
};

template <class T>
PUFFERFISH_HOST_DEVICE bool is_finite(T value) {
  return value - value == T(0);
}

PUFFERFISH_KERNELS_END
