// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <pufferfish/core/view.hpp>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using namespace pufferfish;

std::vector<int> counted(index_t count) {
  std::vector<int> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

TEST_CASE("view: row-major strides, volume and element access agree") {
  const extents<3> shape{2, 3, 5};
  CHECK(volume<3>(shape) == 30);
  CHECK(row_major<3>(shape) == extents<3>{15, 5, 1});
  CHECK(volume<0>({}) == 1);
  std::vector<int> values = counted(30);
  const tensor_view<int, 3> view(values.data(), shape);
  int next = 0;
  for (index_t i = 0; i < 2; ++i) {
    for (index_t j = 0; j < 3; ++j) {
      for (index_t k = 0; k < 5; ++k) CHECK(view(i, j, k) == next++);
    }
  }
  view(1, 2, 4) = -7;
  CHECK(values.back() == -7);
}

TEST_CASE("view: transpose, permute and slice share the elements") {
  std::vector<int> values = counted(24);
  const tensor_view<int, 3> view(values.data(), {2, 3, 4});
  const auto turned = view.permute({2, 0, 1});
  CHECK(turned.shape() == extents<3>{4, 2, 3});
  for (index_t i = 0; i < 2; ++i) {
    for (index_t j = 0; j < 3; ++j) {
      for (index_t k = 0; k < 4; ++k) CHECK(&turned(k, i, j) == &view(i, j, k));
    }
  }
  const auto part = view.slice(1, 1, 2);
  CHECK(part.shape() == extents<3>{2, 2, 4});
  CHECK(&part(1, 0, 3) == &view(1, 1, 3));
  CHECK_FALSE(part.is_contiguous());
  CHECK(view.slice(0, 1, 1).is_contiguous());
  const tensor_view<int, 2> matrix(values.data(), {4, 6});
  CHECK(&transpose(matrix)(5, 3) == &matrix(3, 5));
}

TEST_CASE("view: contiguity ignores strides of extents below two") {
  int value = 0;
  CHECK(tensor_view<int, 2>(&value, {1, 1}, {77, 99}).is_contiguous());
  std::vector<int> values = counted(6);
  CHECK(tensor_view<int, 2>(values.data(), {1, 6}, {1000, 1}).is_contiguous());
  CHECK_FALSE(tensor_view<int, 2>(values.data(), {6, 1}, {2, 1}).is_contiguous());
  CHECK_FALSE(transpose(tensor_view<int, 2>(values.data(), {2, 3})).is_contiguous());
}

TEST_CASE("view: flat and reshape take contiguous views only") {
  std::vector<int> values = counted(12);
  const tensor_view<int, 2> view(values.data(), {3, 4});
  CHECK(view.flat().size() == 12);
  CHECK(&view.reshape<3>({2, 3, 2})(1, 0, 1) == &values[7]);
  CHECK_THROWS_AS((void)transpose(view).flat(), shape_error);
  CHECK_THROWS_AS((void)transpose(view).reshape<1>({12}), shape_error);
  CHECK_THROWS_WITH_AS((void)view.reshape<2>({5, 2}), "tensor_view: cannot reshape [3 x 4] to [5 x 2]",
                       shape_error);
}

TEST_CASE("view: empty and null views, negative extents") {
  const tensor_view<float, 2> none;
  CHECK(none.is_null());
  CHECK(none.empty());
  CHECK(none.flat().empty());
  float value = 0;
  const tensor_view<float, 2> empty(&value, {0, 5});
  CHECK(empty.empty());
  CHECK_FALSE(empty.is_null());
  CHECK(empty.slice(1, 2, 3).empty());
  CHECK_THROWS_WITH_AS((tensor_view<float, 2>(&value, {2, -3})), "negative extent in [2 x -3]", shape_error);
}

TEST_CASE("view: extents whose product does not fit are refused, wherever an extent of zero is") {
  constexpr index_t large = index_t{1} << 32, most = std::numeric_limits<index_t>::max();
  const char* const text =
      "[4294967296 x 4294967296] has more elements than 9223372036854775807, the most that can be counted";
  float value = 0;
  CHECK_THROWS_WITH_AS((void)volume<2>({large, large}), text, shape_error);
  CHECK_THROWS_WITH_AS((void)row_major<2>({large, large}), text, shape_error);
  CHECK_THROWS_WITH_AS((tensor_view<float, 2>(&value, {large, large})), text, shape_error);
  CHECK_THROWS_WITH_AS((tensor_view<float, 2>(&value, {large, large}, {0, 0})), text, shape_error);
  CHECK_THROWS_AS((void)volume<3>({large, 0, large}), shape_error);
  CHECK_THROWS_AS((void)volume<3>({0, large, large}), shape_error);
  CHECK_THROWS_AS((void)volume<2>({-1, -1}), shape_error);
  CHECK_THROWS_AS((void)volume<2>({std::numeric_limits<index_t>::min(), 1}), shape_error);
  CHECK(volume<1>({most}) == most);
  CHECK(volume<3>({most / 7, 1, 7}) == most / 7 * 7);
  CHECK(volume<2>({0, most}) == 0);
  static_assert(volume<3>({2, 3, 5}) == 30);
  const tensor_view<float, 2> broadcast(&value, {large, 3}, {0, 0});  // no such memory, but such a view
  CHECK(broadcast.size() == 3 * large);
  CHECK_THROWS_AS((void)broadcast.reshape<3>({large, large, 3}), shape_error);
}

TEST_CASE("view: conversion adds const and never drops it") {
  CHECK(std::is_convertible_v<tensor_view<float, 2>, tensor_view<const float, 2>>);
  CHECK_FALSE(std::is_convertible_v<tensor_view<const float, 2>, tensor_view<float, 2>>);
  CHECK_FALSE(std::is_convertible_v<tensor_view<float, 2>, tensor_view<const double, 2>>);
}

TEST_CASE("view: copy between random strides equals element-wise assignment") {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    extents<3> shape{};
    const unsigned most = round % 4 == 0 ? 40 : 5;  // copies of large dimensions are made in blocks
    for (index_t& extent : shape) extent = static_cast<index_t>(random() % most);
    std::vector<int> source = counted(volume<3>(shape));
    std::vector<long> target(source.size(), -1);
    std::array<std::size_t, 3> order{0, 1, 2};
    std::shuffle(order.begin(), order.end(), random);
    const auto from = tensor_view<int, 3>(source.data(), shape).permute(order);
    const tensor_view<long, 3> to(target.data(), from.shape());
    copy(from, to);
    int wrong = 0;
    for (index_t i = 0; i < to.extent(0); ++i) {
      for (index_t j = 0; j < to.extent(1); ++j) {
        for (index_t k = 0; k < to.extent(2); ++k) wrong += to(i, j, k) != from(i, j, k);
      }
    }
    CHECK(wrong == 0);
  }
  int a = 0;
  int b = 0;
  CHECK_THROWS_WITH_AS(copy(tensor_view<int, 1>(&a, {1}), tensor_view<int, 1>(&b, {0})),
                       "copy: source is [1], target [0]", shape_error);
}

}  // namespace
