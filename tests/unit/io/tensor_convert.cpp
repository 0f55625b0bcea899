// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// F32, F64, F16 and BF16: every dtype of a file, read into every scalar.
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/io/safetensors.hpp>

#include "../support/io_support.hpp"

using namespace pufferfish;
using namespace io_test;

namespace {

/// A value of T by its definition: of the two neighbours in T the nearer one; of two as near, the one with an
/// even last bit.
template <class T>
T nearest(double value) {
  if constexpr (sizeof(T) > 2) {
    return static_cast<T>(value);  // the processor's
  } else {
    constexpr std::uint16_t infinity = std::is_same_v<T, float16> ? 0x7c00 : 0x7f80;
    const auto number = [](int bits) {
      // One step beyond the largest number, where infinity is, stands the next power of two.
      const double at =
          bits == infinity
              ? std::ldexp(1.0, std::is_same_v<T, float16> ? 16 : 128)
              : static_cast<double>(static_cast<float>(T::from_bits(static_cast<std::uint16_t>(bits))));
      return at;
    };
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (magnitude >= number(infinity)) return T::from_bits(sign | infinity);
    int low = 0;
    for (int step = 0x4000; step > 0; step /= 2) {
      if (low + step < infinity && number(low + step) <= magnitude) low += step;
    }
    const double middle = number(low) / 2 + number(low + 1) / 2;
    const bool up = magnitude > middle || (magnitude == middle && low % 2 != 0);
    return T::from_bits(static_cast<std::uint16_t>(sign | (low + (up ? 1 : 0))));
  }
}

std::vector<double> tricky_values() {
  const auto power = [](int exponent) { return std::ldexp(1.0, exponent); };
  const double tiny = power(-45);
  std::vector<double> values{0.0, 1.0, 0.1, 3.0, 1e5, 1e-3, 1.0 / 3};
  for (const int last : {-10, -7, -23}) {  // bits of F16, BF16, F32: ties, and their neighbours
    for (const double unit : {1.0, power(-14), power(-126), power(15)}) {
      for (const double odd : {0.0, 1.0}) {
        const double tie = unit * (1.0 + odd * power(last) + power(last - 1));
        values.insert(values.end(), {tie, tie * (1.0 + tiny), tie * (1.0 - tiny)});
      }
    }
  }
  for (const int least : {-24, -133, -149}) {  // the least numbers of F16, BF16, F32
    for (const double count : {0.5, 1.0, 1.5, 2.5, 3.5, 1000.25}) {
      for (const double near : {1.0, 1.0 + tiny, 1.0 - tiny}) values.push_back(count * power(least) * near);
    }
  }
  // Around the largest numbers.
  values.insert(values.end(), {65504.0, 65519.999, 65520.0, 65520.001, 65536.0, 3.3895313892515355e38,
                               3.3961775292304985e38, 3.3961775292304987e38, 3.4028234663852886e38,
                               3.4028235677973366e38, 3.5e38, 1e300, 1e-320});
  for (std::size_t i = 0, n = values.size(); i < n; ++i) values.push_back(-values[i]);
  return values;
}

template <class T>
bool same(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

/// Reads one dtype of a file into all four scalars.
template <class Stored>
void check_reads(const safetensors_file& file, const std::vector<Stored>& stored) {
  const auto into = [&]<class To>(To) {
    std::vector<To> read(stored.size());
    read_tensor_converted<To>(file, "w", std::span<To>(read));
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < stored.size(); ++i)
      wrong += !same(read[i], nearest<To>(static_cast<double>(stored[i])));
    CHECK(wrong == 0);
  };
  into(float());
  into(double());
  into(bfloat16());
  into(float16());
}

TEST_CASE_TEMPLATE("tensor files: every floating dtype is read into every scalar", Stored, float, double,
                   bfloat16, float16) {
  std::vector<Stored> stored;
  for (const double value : tricky_values()) stored.push_back(nearest<Stored>(value));
  const std::vector<tensor_entry> entries{
      make_tensor_entry("w", {static_cast<index_t>(stored.size())}, std::span<const Stored>(stored))};
  check_reads<Stored>(safetensors_file::parse(encode_safetensors(entries), "x"), stored);
}

TEST_CASE_TEMPLATE("tensor files: values are written rounded once", From, float, double, bfloat16, float16) {
  std::vector<From> values;
  for (const double value : tricky_values()) values.push_back(nearest<From>(value));
  const auto as = [&]<class To>(To) {
    bytes written{1, 2, 3};  // is appended to
    detail::append_floating<From>(dtype_of_v<To>, values, written);
    REQUIRE(written.size() == 3 + values.size() * sizeof(To));
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      To value;
      std::memcpy(&value, written.data() + 3 + i * sizeof(To), sizeof(To));
      wrong += !same(value, nearest<To>(static_cast<double>(values[i])));
    }
    CHECK(wrong == 0);
  };
  as(float());
  as(double());
  as(bfloat16());
  as(float16());
}

TEST_CASE("scalar_cast: infinities and NaN stay what they are") {
  const auto check = [](auto from) {
    using From = decltype(from);
    const auto into = []<class To>(To) {
      const auto number = [](double value) { return scalar_cast<To>(scalar_cast<From>(value)); };
      CHECK(static_cast<double>(number(HUGE_VAL)) == HUGE_VAL);
      CHECK(static_cast<double>(number(-HUGE_VAL)) == -HUGE_VAL);
      CHECK(std::isnan(static_cast<double>(number(std::numeric_limits<double>::quiet_NaN()))));
    };
    into(float());
    into(double());
    into(bfloat16());
    into(float16());
  };
  check(float());
  check(double());
  check(bfloat16());
  check(float16());
  static_assert(scalar_cast<float16>(1.0 + 0x1p-11 + 0x1p-40).bits() == 0x3c01);  // not by way of a float
  static_assert(scalar_cast<bfloat16>(1.0 + 0x1p-8 + 0x1p-40).bits() == 0x3f81);
}

}  // namespace
