// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <pufferfish/core/random.hpp>

namespace {

using namespace pufferfish;

TEST_CASE("philox4x32-10 gives the known answers of its authors") {
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) ==
        std::array<std::uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}) ==
        std::array<std::uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        std::array<std::uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("uniform and normal numbers have the moments they should") {
  const random_stream random(7, stream_id("moments"));
  constexpr int count = 200000;
  double uniform_sum = 0, normal_sum = 0, normal_squares = 0, normal_fourths = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    const double u = random.uniform(i), n = random.child("n").normal(i);
    REQUIRE((u >= 0.0 && u < 1.0));
    uniform_sum += u;
    normal_sum += n;
    normal_squares += n * n;
    normal_fourths += n * n * n * n;
  }
  CHECK(uniform_sum / count == doctest::Approx(0.5).epsilon(0.01));
  CHECK(std::abs(normal_sum / count) < 0.01);
  CHECK(normal_squares / count == doctest::Approx(1.0).epsilon(0.02));
  CHECK(normal_fourths / count == doctest::Approx(3.0).epsilon(0.05));
}

TEST_CASE("below: in range, every value, evenly") {
  const random_stream random(3, 1);
  std::array<int, 7> seen{};
  for (std::uint64_t i = 0; i < 70000; ++i) ++seen[static_cast<std::size_t>(random.below(i, 7))];
  for (int count : seen) CHECK(std::abs(count - 10000) < 500);
  CHECK(random.below(0, 1) == 0);
}

TEST_CASE("random_permutation: each number once, another seed another order, the same one the same") {
  for (index_t count : {0, 1, 2, 1000}) {
    auto order = random_permutation(count, {1, 2});
    CHECK(order == random_permutation(count, {1, 2}));
    if (count == 1000) CHECK(order != random_permutation(count, {2, 2}));
    std::sort(order.begin(), order.end());
    for (std::size_t i = 0; i < order.size(); ++i) REQUIRE(order[i] == i);
  }
}

TEST_CASE("streams of different names and numbers differ") {
  CHECK(stream_id("shuffle") != stream_id("augment"));
  CHECK(substream(1, 0) != substream(1, 1));
  CHECK(substream(1, 0) != substream(2, 0));
}

}  // namespace
