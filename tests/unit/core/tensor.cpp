// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <pufferfish/core/arena.hpp>
#include <pufferfish/core/memory.hpp>
#include <pufferfish/core/parameter.hpp>
#include <pufferfish/core/scalar.hpp>
#include <pufferfish/core/tape.hpp>
#include <pufferfish/core/tensor.hpp>
#include <utility>

namespace {

using namespace pufferfish;

TEST_CASE("aligned_buffer: aligned, zeroed, empty ones own nothing") {
  for (const index_t count : {1, 2, 15, 16, 17, 1000}) {
    const aligned_buffer<float> buffer(count);
    CHECK(buffer.size() == count);
    CHECK(reinterpret_cast<std::uintptr_t>(buffer.data()) % memory_alignment == 0);
    CHECK(std::all_of(buffer.span().begin(), buffer.span().end(), [](float x) { return x == 0.0F; }));
  }
  CHECK(aligned_buffer<double>(0).data() == nullptr);
  CHECK_THROWS_WITH_AS(aligned_buffer<double>(-4), "negative size -4", shape_error);
}

TEST_CASE("aligned_buffer: copies are deep, moves leave an empty buffer") {
  aligned_buffer<int> first(5);
  first.data()[4] = 9;
  aligned_buffer<int> second = first;
  CHECK(second.data() != first.data());
  CHECK(second.data()[4] == 9);
  first.data()[4] = 1;
  CHECK(second.data()[4] == 9);
  const int* memory = first.data();
  const aligned_buffer<int> third = std::move(first);
  CHECK(third.data() == memory);
  CHECK(first.size() == 0);  // NOLINT(bugprone-use-after-move): what is left is part of the contract
  CHECK(first.data() == nullptr);
  second = third;
  CHECK(second.data()[4] == 1);
  second = aligned_buffer<int>();
  CHECK(second.size() == 0);
}

TEST_CASE("tensor: shape, access and views of the same memory") {
  tensor<float, 3> a({2, 3, 4});
  CHECK(a.size() == 24);
  CHECK(a.extent(2) == 4);
  a(1, 2, 3) = 5.0F;
  CHECK(a.flat().back() == 5.0F);
  const tensor_view<const float, 3> view = std::as_const(a);
  CHECK(&view(1, 2, 3) == &a(1, 2, 3));
  const tensor_view<float, 3> writable = a;
  writable(0, 0, 0) = 2.0F;
  CHECK(a.flat().front() == 2.0F);
  CHECK(tensor<float, 2>({0, 7}).size() == 0);
  CHECK(tensor<float, 2>().size() == 0);
  CHECK_THROWS_AS((tensor<float, 2>({3, -1})), shape_error);
  CHECK_THROWS_AS((tensor<float, 2>({-1, -1})), shape_error);
}

TEST_CASE("memory: sizes that cannot be counted in elements or in bytes are refused, not wrapped") {
  constexpr index_t large = index_t{1} << 32, quarter = index_t{1} << 61;  // of 4 bytes: 2^63
  CHECK_THROWS_AS((tensor<float, 2>({large, large})), shape_error);
  CHECK_THROWS_AS((tensor<float, 4>({large, large, 0, 1})), shape_error);
  CHECK_THROWS_WITH_AS(
      aligned_buffer<float>(quarter, uninitialized),
      "2305843009213693952 elements of 4 bytes have more bytes than 9223372036854775807, the most "
      "that can be counted",
      shape_error);
  CHECK_THROWS_AS(memory_block<float>(host_memory(), 2 * quarter, uninitialized), shape_error);
  CHECK_THROWS_AS(memory_block<float>(host_memory(), -1), shape_error);
  CHECK_THROWS_AS(memory_block<float>(host_memory(), 1, uninitialized, quarter), shape_error);
  stack_arena arena;
  scratch_frame frame(arena);
  CHECK_THROWS_AS((void)frame.take<float>(2 * quarter), shape_error);
  CHECK_THROWS_AS((void)frame.take<float>(-1), shape_error);
  CHECK_THROWS_AS((frame.take<float, 2>({large, large})), shape_error);
  CHECK_THROWS_AS((void)arena.allocate(std::numeric_limits<std::size_t>::max()), shape_error);
  tape passes;
  CHECK_THROWS_AS((void)passes.push<double>(quarter), shape_error);
  CHECK_THROWS_AS((void)passes.push_notes<double>(quarter), shape_error);
  CHECK_THROWS_AS((passes.push<double, 2>({large, large})), shape_error);
  CHECK(passes.empty());
  CHECK(arena.in_use() == 0);
}

TEST_CASE("parameter: a layout whose size does not fit is refused before its strides wrap") {
  constexpr index_t large = index_t{1} << 32;
  CHECK_THROWS_AS((void)logical_layout::kernel(large, large, 3, 3), shape_error);
  CHECK_THROWS_AS((void)logical_layout::matrix(large, large).size(), shape_error);
  CHECK_THROWS_AS(parameter<float>(logical_layout::matrix(large, large), parameter_role::weight),
                  shape_error);
}

TEST_CASE("tensor: a dense copy of a strided view, into another scalar") {
  tensor<float, 2> a({3, 5});
  for (index_t i = 0; i < 3; ++i) {
    for (index_t j = 0; j < 5; ++j) a(i, j) = static_cast<float>(10 * i + j);
  }
  const tensor<double, 2> turned(transpose(a.view()));
  CHECK(turned.shape() == extents<2>{5, 3});
  CHECK(turned.view().is_contiguous());
  for (index_t i = 0; i < 3; ++i) {
    for (index_t j = 0; j < 5; ++j) CHECK(turned(j, i) == static_cast<double>(a(i, j)));
  }
  const tensor<bfloat16, 2> narrow(a.view());
  CHECK(static_cast<float>(narrow(2, 4)) == 24.0F);
}

}  // namespace
