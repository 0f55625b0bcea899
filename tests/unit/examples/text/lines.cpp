// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../../../../examples/text/lines.hpp"
#include "../../support/io_support.hpp"

#include <doctest/doctest.h>

using namespace examples;
using namespace io_test;
using pufferfish::gzip;
using pufferfish::write_file_atomically;

namespace {

using strings = std::vector<std::string>;

strings lines(std::string_view text) { return parse_lines(to_bytes(text), "x"); }

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
