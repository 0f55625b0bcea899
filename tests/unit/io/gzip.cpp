// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../support/io_support.hpp"

#include <doctest/doctest.h>

#include <pufferfish/io/gzip.hpp>

using namespace pufferfish;
using namespace io_test;

namespace {
bytes noise(std::size_t size, unsigned seed, unsigned alphabet) {
  std::mt19937 random(seed);
  bytes result(size);
  for (auto& b : result) b = static_cast<std::uint8_t>(random() % alphabet);
  return result;
}
}  // namespace

TEST_CASE("gzip and gunzip are inverse") {
  for (const std::size_t size : {0UL, 1UL, 2UL, 1000UL, 16384UL, 16385UL, 500000UL}) {
    for (const unsigned alphabet : {1U, 4U, 256U}) {
      const bytes content = noise(size, 3, alphabet);
      for (const int level : {0, 1, 9}) CHECK(gunzip(gzip(content, level), "x") == content);
    }
  }
  CHECK(gzip(noise(1000, 1, 4)) == gzip(noise(1000, 1, 4)));
  CHECK(gzip(noise(1000, 1, 4)).size() < 500);
  CHECK_THROWS_AS(gzip(bytes(3), 10), value_error);
  CHECK_THROWS_AS(gzip(bytes(3), -1), value_error);
}

TEST_CASE("gunzip reads what other programs write") {
  // printf 'pufferfish' | gzip -9n; then once more with a file name in the header
  const bytes plain{0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x03, 0x2b, 0x28, 0x4d, 0x4b, 0x4b,
                    0x2d, 0x4a, 0xcb, 0x2c, 0xce, 0x00, 0x00, 0xfe, 0x0d, 0x0e, 0x94, 0x0a, 0x00, 0x00, 0x00};
  CHECK(to_text(gunzip(plain, "x")) == "pufferfish");
  bytes named = plain;
  named[3] = 0x08;
  const bytes name = to_bytes(std::string("name\0", 5));
  named.insert(named.begin() + 10, name.begin(), name.end());
  CHECK(to_text(gunzip(named, "x")) == "pufferfish");
}

TEST_CASE("gunzip reads several members") {
  bytes both = gzip(to_bytes("one "));
  for (const char* part : {"", "two"}) {
    const bytes next = gzip(to_bytes(part));
    both.insert(both.end(), next.begin(), next.end());
  }
  CHECK(to_text(gunzip(both, "x")) == "one two");
}

TEST_CASE("a gzip file cut anywhere is an error") {
  const bytes content = noise(700, 5, 16);
  CHECK(accepted_prefixes(gzip(content), [](const bytes& b) { gunzip(b, "x"); }) == 0);
  CHECK(accepted_prefixes(gzip(content, 0), [](const bytes& b) { gunzip(b, "x"); }) == 0);
  bytes two = gzip(content);
  const std::size_t whole = two.size();
  two.insert(two.end(), two.begin(), two.begin() + static_cast<std::ptrdiff_t>(whole));
  // The end of the first member is an end, every other cut is not.
  CHECK(accepted_prefixes(two, [](const bytes& b) { gunzip(b, "x"); }) == 1);
}

TEST_CASE("damaged gzip files: an io_error, never the wrong content") {
  const bytes content = noise(300, 9, 20);
  const bytes good = gzip(content);
  int wrong = 0;
  const int refused = refused_damaged(good, 4000, 17, [&](const bytes& b) {
    if (gunzip(b, "x", 1 << 20) != content) ++wrong;
  });
  CHECK(wrong == 0);  // the checksum catches what inflate does not
  CHECK(refused > 3000);
}

TEST_CASE("errors name file and numbers") {
  bytes tail = gzip(to_bytes("pufferfish"));
  tail.insert(tail.end(), {'j', 'u', 'n', 'k'});
  const std::string trailing = io_error_of([&] { gunzip(tail, "some.gz"); });
  CHECK(mentions(trailing, "some.gz"));
  CHECK(mentions(trailing, "4 that are not gzip"));
  tail.resize(tail.size() - 4);
  tail.push_back(0);
  CHECK(mentions(io_error_of([&] { gunzip(tail, "x"); }), "1 that are not gzip"));
  CHECK(mentions(io_error_of([&] { gunzip(to_bytes("PK\x03\x04"), "x"); }), "is not gzip"));
  CHECK(mentions(io_error_of([&] { gunzip({}, "x"); }), "is not gzip"));
  bytes checksum = gzip(to_bytes("pufferfish"));
  checksum[checksum.size() - 6] ^= 1;
  CHECK(mentions(io_error_of([&] { gunzip(checksum, "x"); }), "is corrupt"));
}

TEST_CASE("decompression bombs stop at the limit") {
  const bytes bomb = gzip(bytes(std::size_t{64} << 20, 0));
  CHECK(bomb.size() < 100000);
  const std::string text = io_error_of([&] { gunzip(bomb, "bomb", 1 << 20); });
  CHECK(mentions(text, "bomb"));
  CHECK(mentions(text, "1048576"));
  CHECK(mentions(text, std::to_string(bomb.size())));
  const bytes small = gzip(bytes(1000, 1));
  CHECK(gunzip(small, "x", 1000).size() == 1000);
  CHECK(mentions(io_error_of([&] { gunzip(small, "x", 999); }), "999"));
  // A bomb of many members
  bytes members;
  for (int i = 0; i < 2000; ++i) members.insert(members.end(), small.begin(), small.end());
  CHECK(mentions(io_error_of([&] { gunzip(members, "x", 100000); }), "100000"));
}

TEST_CASE("read_plain_or_gzip tells by content, not by name") {
  const scratch_folder folder;
  const bytes content = noise(5000, 2, 8);
  write_file_atomically(folder / "plain.gz", content);
  write_file_atomically(folder / "packed", gzip(content));
  CHECK(read_plain_or_gzip(folder / "plain.gz") == content);
  CHECK(read_plain_or_gzip(folder / "packed") == content);
  write_file_atomically(folder / "empty", {});
  CHECK(read_plain_or_gzip(folder / "empty").empty());
  CHECK(mentions(io_error_of([&] { read_plain_or_gzip(folder / "packed", 4999); }), folder / "packed"));
  CHECK(mentions(io_error_of([&] { read_plain_or_gzip(folder.path()); }), "Is a directory"));
}
