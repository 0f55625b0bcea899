// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Scalars: `float`, `double` and our `bfloat16`; the type in which sums of each are accumulated. `float16`
/// is a format of messages.

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

/// IEEE 754 binary16 (5 exponent bits, 10 mantissa bits), what CUDA calls `__half`: a format in which numbers
/// travel, not one to compute in. Conversion from float rounds to nearest, ties to even, below 2^-14 to
/// multiples of 2^-24; from 65520 on a magnitude becomes infinity; a NaN stays a quiet NaN.
class float16 {
 public:
  constexpr float16() = default;
  constexpr explicit float16(float value) : bits_(round(value)) {}
  constexpr operator float() const {
    const std::uint32_t sign = (bits_ & 0x8000U) << 16, magnitude = bits_ & 0x7fffU;
    if (magnitude >= 0x7c00U) return std::bit_cast<float>(sign | 0x7f800000U | (magnitude & 0x3ffU) << 13);
    if (magnitude >= 0x0400U) return std::bit_cast<float>(sign | ((magnitude << 13) + rebias));
    const float value = static_cast<float>(magnitude) * 0x1p-24F;
    return sign != 0 ? -value : value;
  }

  /// The 16 bits as stored, and back.
  constexpr std::uint16_t bits() const { return bits_; }
  static constexpr float16 from_bits(std::uint16_t bits) {
    float16 result;
    result.bits_ = bits;
    return result;
  }

 private:
  static constexpr std::uint32_t rebias = 112U << 23;  // between the exponents of the two formats

  // The upper bits of `value`, rounded to even at bit `shift`.
  static constexpr std::uint32_t shifted(std::uint32_t value, std::uint32_t shift) {
    return (value + (1U << (shift - 1)) - 1U + ((value >> shift) & 1U)) >> shift;
  }
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

/// The type of the parameters, gradients and buffers of a layer that computes in T: T itself, but float for
/// types of 16 bits, which layers then read as rounded copies (Micikevicius et al., Mixed precision training,
/// ICLR 2018, section 3.1).
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
template <class T>
using parameter_t = typename parameter_of<T>::type;

/// The formats of such rounded copies, and that of the type T.
enum class rounded_format : int { none, bf16, fp16 };
template <class T>
inline constexpr rounded_format rounded_format_of = rounded_format::none;
template <>
inline constexpr rounded_format rounded_format_of<bfloat16> = rounded_format::bf16;
template <>
inline constexpr rounded_format rounded_format_of<float16> = rounded_format::fp16;

/// What files are read as. (Networks compute in float and double, on a device in its own types of 16 bits,
/// too.)
template <class T>
inline constexpr bool is_scalar_v = std::is_same_v<T, float> || std::is_same_v<T, double> ||
                                    std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>;

namespace detail {

/// A double as a float whose further rounding to 16 bits equals one rounding of the double: where the result
/// is not exact, it is the neighbour with an odd last bit (Boldo, Melquiond, IEEE Transactions on Computers
/// 57, 2008).
constexpr float round_to_odd(double value) {
  const auto near = static_cast<float>(value);
  const auto back = static_cast<double>(near);
  const auto bits = std::bit_cast<std::uint32_t>(near);
  if (back == value || value != value || (bits & 1U) != 0) return near;
  const bool below = (back < 0 ? -back : back) < (value < 0 ? -value : value);
  return std::bit_cast<float>(below ? bits + 1U : bits - 1U);
}

}  // namespace detail

/// A floating-point value as another type of those (float, double, bfloat16, float16), rounded once: to
/// nearest, ties to even; beyond the range to infinity. A NaN stays one.
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
