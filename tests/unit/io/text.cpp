// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../support/io_support.hpp"

#include <doctest/doctest.h>

#include <pufferfish/io/text.hpp>

using namespace pufferfish;
using namespace io_test;

namespace {

using strings = std::vector<std::string>;

strings lines(std::string_view text) { return parse_lines(to_bytes(text), "x"); }

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

TEST_CASE("lines") {
  CHECK(lines("").empty());
  CHECK(lines("\n") == strings{""});
  CHECK(lines("a") == strings{"a"});
  CHECK(lines("a\n") == strings{"a"});
  CHECK(lines("a\n\nb") == strings{"a", "", "b"});
  CHECK(lines("a\r\nb\r\n") == strings{"a", "b"});
  CHECK(lines("\xef\xbb\xbfgr\xc3\xbc\xc3\x9f\n") == strings{"gr\xc3\xbc\xc3\x9f"});
}

TEST_CASE("words") {
  using views = std::vector<std::string_view>;
  CHECK(split_words("").empty());
  CHECK(split_words(" \t ").empty());
  CHECK(split_words("one") == views{"one"});
  CHECK(split_words("  one two\tthree ") == views{"one", "two", "three"});
}

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

TEST_CASE("the line that is not UTF-8 is named") {
  const std::string text = io_error_of([] { lines("one\ntwo\nth\xffree\nfour"); });
  CHECK(mentions(text, "line 3"));
  CHECK(mentions(text, "byte 10 of the text is 255"));
  CHECK(mentions(io_error_of([] { lines("cut \xe2\x82"); }), "line 1"));
}

TEST_CASE("text files, plain and gzip") {
  const scratch_folder folder;
  write_file_atomically(folder / "a", to_bytes("one two\nthree\n"));
  write_file_atomically(folder / "b.gz", gzip(to_bytes("one two\nthree\n")));
  CHECK(read_lines(folder / "a") == strings{"one two", "three"});
  CHECK(read_lines(folder / "b.gz") == strings{"one two", "three"});
  CHECK(mentions(io_error_of([&] { read_lines(folder / "a", 5); }), "5 bytes"));
  CHECK(mentions(io_error_of([&] { read_lines(folder / "b.gz", 13); }), "bytes"));
  CHECK(mentions(io_error_of([&] { read_lines(folder / "none"); }), folder / "none"));
  write_file_atomically(folder / "bad", to_bytes("a\nb\n\x80"));
  const std::string text = io_error_of([&] { read_lines(folder / "bad"); });
  CHECK(mentions(text, folder / "bad"));
  CHECK(mentions(text, "line 3"));
}
