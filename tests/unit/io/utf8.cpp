// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <cstdint>
#include <random>
#include <string>
#include <string_view>

#include <doctest/doctest.h>

#include <pufferfish/io/utf8.hpp>

using namespace pufferfish;

namespace {

/// Well-formed UTF-8 by decoding and re-encoding: the plain reference.
bool reference_valid(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const auto first = static_cast<std::uint8_t>(text[at]);
    const int length = first < 0x80       ? 1
                       : first >> 5 == 6  ? 2
                       : first >> 4 == 14 ? 3
                       : first >> 3 == 30 ? 4
                                          : 0;
    if (length == 0 || at + static_cast<std::size_t>(length) > text.size()) return false;
    std::uint32_t code = length == 1 ? first : first & (0x7fU >> length);
    for (int i = 1; i < length; ++i) {
      const auto next = static_cast<std::uint8_t>(text[at + static_cast<std::size_t>(i)]);
      if (next >> 6 != 2) return false;
      code = code << 6 | (next & 0x3fU);
    }
    const int needed = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    if (needed != length || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return false;
    at += static_cast<std::size_t>(length);
  }
  return true;
}

}  // namespace

TEST_CASE("UTF-8: every sequence of two bytes, and random longer ones, against the reference") {
  int differences = 0;
  for (unsigned a = 0; a < 256; ++a) {
    for (unsigned b = 0; b < 256; ++b) {
      const std::string text{static_cast<char>(a), static_cast<char>(b)};
      if ((first_invalid_utf8(text) == text.size()) != reference_valid(text)) ++differences;
    }
  }
  std::mt19937 random(5);
  int valid = 0;
  for (int round = 0; round < 200000; ++round) {
    // Leading and continuation bytes only, around the borders of the table.
    constexpr std::uint8_t lead[] = {0xc1, 0xc2, 0xdf, 0xe0, 0xe1, 0xec, 0xed,
                                     0xee, 0xef, 0xf0, 0xf1, 0xf4, 0xf5};
    constexpr std::uint8_t next[] = {0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0};
    std::string text{static_cast<char>(lead[random() % sizeof lead])};
    for (unsigned i = random() % 4; i > 0; --i) text += static_cast<char>(next[random() % sizeof next]);
    const bool expected = reference_valid(text);
    valid += expected ? 1 : 0;
    if ((first_invalid_utf8(text) == text.size()) != expected) ++differences;
  }
  CHECK(differences == 0);
  CHECK(valid > 1000);
}
