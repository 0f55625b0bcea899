// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <pufferfish/core/scalar.hpp>
#include <random>
#include <type_traits>

using pufferfish::bfloat16;
using pufferfish::float16;

namespace {

float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

// Nearest bfloat16 by comparing distances in double, ties to the even pattern: the slow reference. Finite
// input only. The step above the largest finite value counts as infinity, at the distance that a further
// binade gives it.
std::uint16_t nearest_by_distance(float value) {
  const auto wide = std::bit_cast<std::uint32_t>(value);
  const auto below = static_cast<std::uint16_t>(wide >> 16);  // towards zero
  const auto above = static_cast<std::uint16_t>(below + 1);   // away from zero
  const double low = std::fabs(static_cast<double>(float_of(std::uint32_t{below} << 16)));
  const bool overflows = (above & 0x7fffU) == 0x7f80U;
  const double high =
      overflows ? std::ldexp(1.0, 128) : std::fabs(static_cast<double>(float_of(std::uint32_t{above} << 16)));
  const double magnitude = std::fabs(static_cast<double>(value));
  const double to_low = magnitude - low;
  const double to_high = high - magnitude;
  if (to_low < to_high) return below;
  if (to_high < to_low) return above;
  return (below & 1U) == 0 ? below : above;
}

}  // namespace

TEST_CASE("bfloat16: all 65536 patterns survive the way to float and back") {
  int wrong = 0;
  for (std::uint32_t pattern = 0; pattern <= 0xffffU; ++pattern) {
    const auto bits = static_cast<std::uint16_t>(pattern);
    const auto back = bfloat16(static_cast<float>(bfloat16::from_bits(bits)));
    const bool is_nan = (bits & 0x7fffU) > 0x7f80U;
    // A signalling NaN comes back quiet; nothing else changes.
    const auto expected = static_cast<std::uint16_t>(is_nan ? bits | 0x0040U : bits);
    if (back.bits() != expected) ++wrong;
    if (std::isnan(static_cast<float>(back)) != is_nan) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE("bfloat16: rounds to nearest, ties to even") {
  CHECK(bfloat16(1.0F).bits() == 0x3f80);
  CHECK(bfloat16(float_of(0x3f808000)).bits() == 0x3f80);  // tie, even below
  CHECK(bfloat16(float_of(0x3f808001)).bits() == 0x3f81);
  CHECK(bfloat16(float_of(0x3f817fff)).bits() == 0x3f81);
  CHECK(bfloat16(float_of(0x3f818000)).bits() == 0x3f82);  // tie, even above
  CHECK(bfloat16(float_of(0xbf818000)).bits() == 0xbf82);
  CHECK(bfloat16(std::numeric_limits<float>::max()).bits() == 0x7f80);
  CHECK(bfloat16(-std::numeric_limits<float>::infinity()).bits() == 0xff80);
  CHECK(bfloat16(-0.0F).bits() == 0x8000);

  std::mt19937 random(1);
  int wrong = 0;
  for (int i = 0; i < 200000; ++i) {
    auto bits = static_cast<std::uint32_t>(random());
    if (i % 3 == 0) bits = (bits & 0xffff0000U) | 0x8000U;  // an exact tie
    if ((bits & 0x7f800000U) == 0x7f800000U) continue;      // infinity or NaN
    if (bfloat16(float_of(bits)).bits() != nearest_by_distance(float_of(bits))) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE("bfloat16: a NaN stays a NaN, whatever its payload and sign") {
  for (const std::uint32_t bits :
       {0x7f800001U, 0x7fc00000U, 0x7fffffffU, 0xff800001U, 0xffffffffU, 0x7f80ffffU}) {
    const bfloat16 value(float_of(bits));
    CHECK(std::isnan(static_cast<float>(value)));
    CHECK((value.bits() & 0x0040U) != 0);                         // quiet
    CHECK((value.bits() & 0x8000U) == ((bits >> 16) & 0x8000U));  // sign kept
  }
}

TEST_CASE("float16: all 65536 patterns survive the way to float and back") {
  int wrong = 0;
  for (std::uint32_t pattern = 0; pattern <= 0xffffU; ++pattern) {
    const auto bits = static_cast<std::uint16_t>(pattern);
    const float value = float16::from_bits(bits);
    const bool is_nan = (bits & 0x7fffU) > 0x7c00U;
    const auto expected = static_cast<std::uint16_t>(is_nan ? bits | 0x0200U : bits);
    if (float16(value).bits() != expected) ++wrong;
    if (std::isnan(value) != is_nan) ++wrong;
    if (std::signbit(value) != ((bits & 0x8000U) != 0)) ++wrong;
    // The definition, for what is finite.
    const int exponent = static_cast<int>(bits >> 10 & 0x1fU), mantissa = static_cast<int>(bits & 0x3ffU);
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    if (exponent < 31 && std::fabs(static_cast<double>(value)) != magnitude) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE("float16: rounds to nearest, ties to even, in every binade and below the normal numbers") {
  int wrong = 0;
  for (std::uint32_t below = 0; below < 0x7c00U; ++below) {
    const double low = static_cast<double>(float{float16::from_bits(static_cast<std::uint16_t>(below))});
    const double high =
        below + 1 < 0x7c00U
            ? static_cast<double>(float{float16::from_bits(static_cast<std::uint16_t>(below + 1))})
            : 65536.0;
    const auto middle = static_cast<float>((low + high) / 2);  // exact
    const std::uint32_t even = (below & 1U) == 0 ? below : below + 1;
    if (float16(middle).bits() != even) ++wrong;
    if (float16(-middle).bits() != (even | 0x8000U)) ++wrong;
    if (float16(std::nextafter(middle, 0.0F)).bits() != below) ++wrong;
    if (float16(std::nextafter(middle, 1e9F)).bits() != below + 1) ++wrong;
  }
  CHECK(wrong == 0);
  CHECK(float16(std::numeric_limits<float>::max()).bits() == 0x7c00);
  CHECK(float16(-std::numeric_limits<float>::infinity()).bits() == 0xfc00);
  CHECK(float16(std::numeric_limits<float>::denorm_min()).bits() == 0);
  CHECK(float16(-0.0F).bits() == 0x8000);
  CHECK(float16(std::numeric_limits<float>::signaling_NaN()).bits() > 0x7e00 - 1);
  static_assert(float16(1.5F).bits() == 0x3e00 && float16::from_bits(0x0001) == 0x1p-24F);
}

TEST_CASE("scalars: accumulators and the list of scalars") {
  CHECK(std::is_same_v<pufferfish::accumulator_t<float>, double>);
  CHECK(std::is_same_v<pufferfish::accumulator_t<double>, double>);
  CHECK(std::is_same_v<pufferfish::accumulator_t<bfloat16>, float>);
  CHECK(pufferfish::is_scalar_v<bfloat16>);
  CHECK_FALSE(pufferfish::is_scalar_v<int>);
}
