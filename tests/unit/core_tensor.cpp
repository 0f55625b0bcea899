// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <pufferfish/core/scalar.hpp>
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
  CHECK_THROWS_WITH_AS(aligned_buffer<double>(-4), "aligned_buffer: negative size -4", shape_error);
}

TEST_CASE("aligned_buffer: copies are deep, moves leave nothing behind") {
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
