// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Scalars: `float`, `double` and our `bfloat16`; the type in which sums of each are accumulated.

#include <bit>
#include <cstdint>
#include <type_traits>

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Brain float: the upper half of an IEEE float (8 exponent bits, 7 mantissa bits). Bit-compatible with
/// `__nv_bfloat16` and `c10::BFloat16`. Conversion from float rounds to nearest, ties to even; a NaN stays a
/// quiet NaN. Arithmetic happens in float after implicit conversion.
class bfloat16 {
 public:
  constexpr bfloat16() = default;
  constexpr explicit bfloat16(float value) : bits_(round(value)) {}
  constexpr operator float() const { return std::bit_cast<float>(std::uint32_t{bits_} << 16); }

  /// The 16 bits as stored, and back.
  constexpr std::uint16_t bits() const { return bits_; }
  static constexpr bfloat16 from_bits(std::uint16_t bits) {
    bfloat16 result;
    result.bits_ = bits;
    return result;
  }

 private:
  static constexpr std::uint16_t round(float value) {
    const auto wide = std::bit_cast<std::uint32_t>(value);
    if ((wide & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((wide >> 16) | 0x0040U);
    const std::uint32_t half_minus_tie = 0x7fffU + ((wide >> 16) & 1U);
    return static_cast<std::uint16_t>((wide + half_minus_tie) >> 16);
  }

  std::uint16_t bits_ = 0;
};

static_assert(sizeof(bfloat16) == 2 && std::is_trivially_copyable_v<bfloat16>);

/// The type that sums of T are accumulated in where the order of additions is long: double for float and
/// double.
template <class T>
struct accumulator {
  using type = double;
};
template <>
struct accumulator<bfloat16> {
  using type = float;
};
template <class T>
using accumulator_t = typename accumulator<T>::type;

/// Scalars that layers can be instantiated with.
template <class T>
inline constexpr bool is_scalar_v =
    std::is_same_v<T, float> || std::is_same_v<T, double> || std::is_same_v<T, bfloat16>;

PUFFERFISH_NAMESPACE_END
