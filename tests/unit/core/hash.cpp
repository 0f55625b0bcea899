// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include <pufferfish/core/hash.hpp>

namespace pf = pufferfish;

TEST_CASE("digest: equal bytes give equal digests, at any address") {
  const std::string text = "stage1.conv2.down float [16 x 3 x 3 x 64]";
  for (std::size_t length = 0; length <= text.size(); ++length) {
    const std::uint64_t expected = pf::digest(std::string_view(text).substr(0, length));
    for (std::size_t shift = 0; shift < 8; ++shift) {
      std::vector<char> memory(64 + 8, '?');
      std::memcpy(memory.data() + shift, text.data(), length);
      CHECK(pf::digest(std::string_view(memory.data() + shift, length)) == expected);
    }
  }
}

TEST_CASE("digest: every single bit and every length counts") {
  for (std::size_t size : {1U, 7U, 8U, 9U, 16U, 61U}) {
    std::set<std::uint64_t> seen;
    std::vector<unsigned char> bytes(size, 0);
    seen.insert(pf::digest(std::span<unsigned char>(bytes)));
    for (std::size_t bit = 0; bit < 8 * size; ++bit) {
      bytes[bit / 8] = static_cast<unsigned char>(1U << (bit % 8));
      seen.insert(pf::digest(std::span<const unsigned char>(bytes)));
      bytes[bit / 8] = 0;
    }
    CHECK(seen.size() == 8 * size + 1);
  }
  std::set<std::uint64_t> zeros;
  const std::vector<unsigned char> bytes(100, 0);
  for (std::size_t size = 0; size <= 100; ++size) zeros.insert(pf::digest(std::span(bytes.data(), size)));
  CHECK(zeros.size() == 101);
}

TEST_CASE("digest: one changed bit changes about half of the digest") {
  std::uint64_t word = 0x0123456789abcdefU;
  const std::uint64_t before = pf::digest(std::span<const std::uint64_t>(&word, 1));
  int changed = 0;
  for (int bit = 0; bit < 64; ++bit) {
    const std::uint64_t other = word ^ (std::uint64_t{1} << bit);
    changed += std::popcount(before ^ pf::digest(std::span<const std::uint64_t>(&other, 1)));
  }
  CHECK(changed > 64 * 28);
  CHECK(changed < 64 * 36);
}

TEST_CASE("hasher: pieces keep their borders, their order and their bits") {
  CHECK(pf::hasher().text("ab").text("c").digest() != pf::hasher().text("a").text("bc").digest());
  CHECK(pf::hasher().text("ab").text("").digest() != pf::hasher().text("ab").digest());
  CHECK(pf::hasher().number(1).number(2).digest() != pf::hasher().number(2).number(1).digest());
  CHECK(pf::hasher().number(7).digest() == pf::hasher().number(std::uint64_t{7}).digest());
  CHECK(pf::hasher().number(-1).digest() == pf::hasher().number(std::int64_t{-1}).digest());
  CHECK(pf::hasher(1).digest() != pf::hasher(2).digest());
  const std::array<float, 2> zeros{0.0F, -0.0F};
  CHECK(pf::digest(std::span<const float>(&zeros[0], 1)) != pf::digest(std::span<const float>(&zeros[1], 1)));
}

TEST_CASE("digest: does not change from version to version, since files may hold it") {
  CHECK(pf::digest(std::string_view("")) == 0x2a98f501af37e97fU);
  CHECK(pf::digest(std::string_view("pufferfish")) == 0x925a3b0009570aabU);
}
