// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Scalar types: `float`, `double` and `bfloat16`; the accumulator type of each. `float16` is a
/// storage and message format.

#include <bit>
#include <cstdint>
#include <type_traits>

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Brain float: the upper half of an IEEE float (8 exponent bits, 7 mantissa bits). Bit-compatible with
/// `__nv_bfloat16` and `c10::BFloat16`. Conversion from float rounds to nearest, ties to even; a NaN stays a
/// quiet NaN. Arithmetic happens in float after implicit conversion.
/// Zero by default. Conversion to float is exact.
class bfloat16 {
 public:
  constexpr bfloat16() = default;
  constexpr explicit bfloat16(float value) : bits_(round(value)) {}
  constexpr operator float() const { return std::bit_cast<float>(std::uint32_t{bits_} << 16); }

  /// The 16 bits as stored.
  constexpr std::uint16_t bits() const { return bits_; }
  /// The number that is stored as `bits`.
  static constexpr bfloat16 from_bits(std::uint16_t bits) {
    bfloat16 result;
    result.bits_ = bits;
    return result;
  }

 private:
  // The upper half, rounded to nearest, ties to even. A NaN keeps its upper bits and becomes quiet.
  static constexpr std::uint16_t round(float value) {
    const auto wide = std::bit_cast<std::uint32_t>(value);
    if ((wide & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((wide >> 16) | 0x0040U);
    const std::uint32_t half_minus_tie = 0x7fffU + ((wide >> 16) & 1U);
    return static_cast<std::uint16_t>((wide + half_minus_tie) >> 16);
  }

  std::uint16_t bits_ = 0;
};

static_assert(sizeof(bfloat16) == 2 && std::is_trivially_copyable_v<bfloat16>);

namespace detail {

/// Two bfloat16 elements that are adjacent along the depth of a product. Products of pairs add both products
/// to one float: sum += a.first b.first + a.second b.second.
struct bf16_pair {
  bfloat16 first, second;
};

static_assert(sizeof(bf16_pair) == 4 && alignof(bf16_pair) == 2);

}  // namespace detail

/// IEEE 754 binary16 (5 exponent bits, 10 mantissa bits), CUDA's `__half`: a format for storage and messages,
/// not for arithmetic. Conversion from float rounds to nearest, ties to even, below 2^-14 to multiples of
/// 2^-24. A magnitude of 65520 or more becomes infinity. A NaN stays a quiet NaN.
/// Zero by default. Conversion to float is exact.
class float16 {
 public:
  constexpr float16() = default;
  constexpr explicit float16(float value) : bits_(round(value)) {}
  /// The number as a float, exactly; numbers below 2^-14 become normal floats.
  constexpr operator float() const {
    const std::uint32_t sign = (bits_ & 0x8000U) << 16, magnitude = bits_ & 0x7fffU;
    if (magnitude >= 0x7c00U) return std::bit_cast<float>(sign | 0x7f800000U | (magnitude & 0x3ffU) << 13);
    if (magnitude >= 0x0400U) return std::bit_cast<float>(sign | ((magnitude << 13) + rebias));
    const float value = static_cast<float>(magnitude) * 0x1p-24F;
    return sign != 0 ? -value : value;
  }

  /// The 16 bits as stored.
  constexpr std::uint16_t bits() const { return bits_; }
  /// The number that is stored as `bits`.
  static constexpr float16 from_bits(std::uint16_t bits) {
    float16 result;
    result.bits_ = bits;
    return result;
  }

 private:
  static constexpr std::uint32_t rebias = 112U << 23;  // difference of the exponent biases of the two formats

  // Computes value / 2^shift, rounded to nearest, ties to even.
  static constexpr std::uint32_t shifted(std::uint32_t value, std::uint32_t shift) {
    return (value + (1U << (shift - 1)) - 1U + ((value >> shift) & 1U)) >> shift;
  }
  // The bits of the number, rounded to nearest, ties to even.
  static constexpr std::uint16_t round(float value) {
    const auto wide = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (wide >> 16) & 0x8000U, magnitude = wide & 0x7fffffffU;
    std::uint32_t half = 0;
    if (magnitude > 0x7f800000U) {
      half = 0x7e00U | ((magnitude >> 13) & 0x3ffU);
    } else if (magnitude >= 0x47800000U) {  // 2^16
      half = 0x7c00U;
    } else if (magnitude >= 0x38800000U) {  // 2^-14; a carry out of the largest mantissa gives infinity
      half = shifted(magnitude - rebias, 13);
    } else if (magnitude > 0x33000000U) {  // 2^-25 itself is a tie with zero
      half = shifted((magnitude & 0x7fffffU) | 0x800000U, 126U - (magnitude >> 23));
    }
    return static_cast<std::uint16_t>(sign | half);
  }

  std::uint16_t bits_ = 0;
};

static_assert(sizeof(float16) == 2 && std::is_trivially_copyable_v<float16>);

/// The type in which long sums of T are accumulated: float for
/// bfloat16, double for all others.
template <class T>
struct accumulator {
  using type = double;
};
template <>
struct accumulator<bfloat16> {
  using type = float;
};
/// The type in which long sums of T are accumulated.
template <class T>
using accumulator_t = typename accumulator<T>::type;

/// The type of the parameters, gradients and buffers of a layer that computes in T. It is T itself, but float
/// for 16-bit types: such layers read 16-bit rounded copies of float parameters (Micikevicius et al., Mixed
/// precision training, ICLR 2018, section 3.1).
template <class T>
struct parameter_of {
  using type = T;
};
template <>
struct parameter_of<bfloat16> {
  using type = float;
};
template <>
struct parameter_of<float16> {
  using type = float;
};
/// The type of the parameters of a layer that computes in T.
template <class T>
using parameter_t = typename parameter_of<T>::type;

/// Formats of 16-bit rounded copies; rounded_format_of<T> is the format of type T.
/// none: T is not a 16-bit format.
enum class rounded_format : int { none, bf16, fp16 };
/// Format of a 16-bit type; none for others.
template <class T>
inline constexpr rounded_format rounded_format_of = rounded_format::none;
template <>
inline constexpr rounded_format rounded_format_of<bfloat16> = rounded_format::bf16;
template <>
inline constexpr rounded_format rounded_format_of<float16> = rounded_format::fp16;

/// Whether T is an element type that files may have. (Networks compute in float and double, on the CPU also
/// in bfloat16, on a device also in the device's own 16-bit types.)
template <class T>
inline constexpr bool is_scalar_v = std::is_same_v<T, float> || std::is_same_v<T, double> ||
                                    std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>;

namespace detail {

/// Rounds a double to float by round-to-odd: an inexact result is the neighbouring float whose last bit is
/// odd. Rounding that float further to 16 bits equals rounding the double once (Boldo, Melquiond, IEEE
/// Transactions on Computers 57, 2008).
constexpr float round_to_odd(double value) {
  const auto near = static_cast<float>(value);
  const auto back = static_cast<double>(near);
  const auto bits = std::bit_cast<std::uint32_t>(near);
  if (back == value || value != value || (bits & 1U) != 0) return near;
  const bool below = (back < 0 ? -back : back) < (value < 0 ? -value : value);
  return std::bit_cast<float>(below ? bits + 1U : bits - 1U);
}

}  // namespace detail

/// Converts between float, double, bfloat16 and float16 with a single rounding: to nearest, ties to even;
/// values out of range become infinity. A NaN stays a NaN.
template <class To, class From>
constexpr To scalar_cast(From value) {
  static_assert(is_scalar_v<To> && is_scalar_v<From>,
                "pufferfish: scalar_cast converts floating-point scalars");
  if constexpr (sizeof(To) > 2) {
    return static_cast<To>(value);
  } else if constexpr (std::is_same_v<From, double>) {
    return To(detail::round_to_odd(value));
  } else {
    return To(static_cast<float>(value));
  }
}

PUFFERFISH_NAMESPACE_END
