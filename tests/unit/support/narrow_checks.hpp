// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Comparison of operations on bfloat16 with the same operations on floats of the same values.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/random.hpp>
#include <pufferfish/core/view.hpp>

namespace test {
using namespace pufferfish;

/// Normal numbers that bfloat16 has, as elements of T.
template <class T>
std::vector<T> numbers(index_t size, std::uint64_t stream) {
  std::vector<float> drawn(static_cast<std::size_t>(size));
  fill_normal(std::span<float>(drawn), 1.0, random_stream(7, stream));
  std::vector<T> result;
  for (const float value : drawn) result.push_back(static_cast<T>(static_cast<float>(bfloat16(value))));
  return result;
}

/// Largest distance of a rounded number from the float, in units of 2^-8 of the float plus 2^-16 of the
/// largest float: at most 1 and a little for one rounding.
template <class T>
double roundings(const std::vector<T>& got, const std::vector<float>& want) {
  REQUIRE(got.size() == want.size());
  double largest = 1e-30, worst = 0.0;
  for (const float value : want) largest = std::max(largest, std::abs(static_cast<double>(value)));
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double exact = static_cast<double>(want[i]);
    const double unit = 0x1p-8 * std::abs(exact) + 0x1p-16 * largest;
    worst = std::max(worst, std::abs(static_cast<double>(got[i]) - exact) / unit);
  }
  return worst;
}

/// The results of an operation: elements of T, and floats.
template <class T>
struct results {
  std::vector<std::vector<T>> narrow;
  std::vector<std::vector<float>> wide;
};

/// Compares operation(number of T, context) for bfloat16 on one thread with that for float, and with that for
/// bfloat16 on three threads, which gives the same bits.
template <class Operation>
void compare(const Operation& operation, double most = 1.01) {
  cpu_context one({1}), three({3});
  const results<bfloat16> got = operation(bfloat16{}, one), again = operation(bfloat16{}, three);
  const results<float> want = operation(float{}, one);
  for (std::size_t i = 0; i < got.narrow.size(); ++i) {
    CAPTURE(i);
    CHECK(roundings(got.narrow[i], want.narrow[i]) < most);
    CHECK(std::equal(got.narrow[i].begin(), got.narrow[i].end(), again.narrow[i].begin(),
                     [](bfloat16 a, bfloat16 b) { return a.bits() == b.bits(); }));
  }
  for (std::size_t i = 0; i < got.wide.size(); ++i) {
    CAPTURE(i);
    CHECK(roundings(got.wide[i], want.wide[i]) < 0.05);
    CHECK(got.wide[i] == again.wide[i]);
  }
}

/// Largest distance of the elements, divided by the largest float: for results that are computed from rounded
/// intermediate results.
template <class T>
double distance(const std::vector<T>& got, const std::vector<float>& want) {
  REQUIRE(got.size() == want.size());
  double largest = 1e-30, worst = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(want[i])));
    worst = std::max(worst, std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i])));
  }
  return worst / largest;
}

template <class T, std::size_t N>
tensor_view<const T, N> view_of(const std::vector<T>& values, const extents<N>& shape) {
  return {values.data(), shape};
}
template <class T, std::size_t N>
tensor_view<T, N> view_of(std::vector<T>& values, const extents<N>& shape) {
  return {values.data(), shape};
}

}  // namespace test
