// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../support/io_support.hpp"

#include <doctest/doctest.h>

#include <pufferfish/io/idx.hpp>

using namespace pufferfish;
using namespace io_test;

namespace {

bytes noise(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  bytes result(size);
  for (auto& b : result) b = static_cast<std::uint8_t>(random());
  return result;
}

/// An IDX header with the given 32-bit extents.
bytes header(std::uint8_t type, const std::vector<std::uint32_t>& extents) {
  bytes result{0, 0, type, static_cast<std::uint8_t>(extents.size())};
  for (const std::uint32_t extent : extents) {
    for (int shift = 24; shift >= 0; shift -= 8) result.push_back(static_cast<std::uint8_t>(extent >> shift));
  }
  return result;
}

}  // namespace

TEST_CASE("the bytes of an IDX file are the documented ones") {
  const bytes file = encode_idx({2, 3}, bytes{1, 2, 3, 4, 5, 6});
  CHECK(file == bytes{0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6});
}

TEST_CASE("IDX round trip, plain and gzip") {
  const scratch_folder folder;
  std::mt19937 random(3);
  for (int round = 0; round < 60; ++round) {
    std::vector<index_t> extents;
    std::size_t count = 1;
    const unsigned rank = 1 + random() % 4;
    for (unsigned d = 0; d < rank; ++d) {
      extents.push_back(static_cast<index_t>(random() % 8));
      count *= static_cast<std::size_t>(extents.back());
    }
    const bytes values = noise(count, static_cast<unsigned>(round));
    for (const char* name : {"a", "a.gz"}) {
      write_idx(folder / name, extents, values);
      const idx_array back = read_idx(folder / name);
      CHECK(back.extents == extents);
      CHECK(back.values == values);
    }
  }
  CHECK(is_gzip(read_file(folder / "a.gz")));
  CHECK(!is_gzip(read_file(folder / "a")));
}

TEST_CASE("encode_idx refuses shapes that do not fit") {
  CHECK_THROWS_AS(encode_idx({}, bytes{}), shape_error);
  CHECK_THROWS_AS(encode_idx({1, 1, 1, 1, 1}, bytes{1}), shape_error);
  CHECK_THROWS_AS(encode_idx({2, 3}, bytes(5)), shape_error);
  CHECK_THROWS_AS(encode_idx({-2, -3}, bytes(6)), shape_error);
  CHECK_THROWS_AS(encode_idx({index_t{1} << 32, 0}, bytes{}), shape_error);
  CHECK_THROWS_AS(encode_idx({0xffffffff, 0xffffffff, 0xffffffff}, bytes(1)), shape_error);
}

TEST_CASE("an IDX file cut anywhere, or prolonged, is an error") {
  for (const auto& extents : {std::vector<index_t>{7}, {2, 3}, {2, 2, 2}, {1, 2, 3, 2}, {0, 28, 28}}) {
    std::size_t count = 1;
    for (const index_t extent : extents) count *= static_cast<std::size_t>(extent);
    bytes file = encode_idx(extents, noise(count, 1));
    CHECK(accepted_prefixes(file, [](const bytes& b) { parse_idx(b, "x"); }) == 0);
    file.push_back(0);
    const std::string text = io_error_of([&] { parse_idx(file, "some.idx"); });
    CHECK(mentions(text, "some.idx"));
    CHECK(mentions(text, "needs " + std::to_string(count)));
    CHECK(mentions(text, "has " + std::to_string(count + 1)));
  }
}

TEST_CASE("wrong magic, type and rank are named") {
  const auto problem = [](bytes file) { return io_error_of([&] { parse_idx(file, "x"); }); };
  CHECK(mentions(problem({1, 0, 8, 1, 0, 0, 0, 0}), "not an IDX file"));
  CHECK(mentions(problem({0, 2, 8, 1, 0, 0, 0, 0}), "0 and 2"));
  CHECK(mentions(problem({0, 0, 13, 1, 0, 0, 0, 0}), "type code 13"));
  CHECK(mentions(problem({0, 0, 8, 0}), "0 IDX dimensions"));
  CHECK(mentions(problem({0, 0, 8, 5, 0, 0, 0, 0}), "5 IDX dimensions"));
  CHECK(mentions(problem({0, 0, 8, 255}), "255 IDX dimensions"));
  CHECK(mentions(problem({}), "0 bytes are too few"));
}

TEST_CASE("extents whose product overflows") {
  const auto problem = [](const std::vector<std::uint32_t>& extents) {
    return io_error_of([&] { parse_idx(header(8, extents), "x"); });
  };
  // 2^128 and 2^64 are 0 modulo 2^64: "no values" would fit the file.
  CHECK(mentions(problem({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}), "does not fit in memory"));
  CHECK(mentions(problem({0x10000, 0x10000, 0x10000, 0x10000}), "65536 x 65536 x 65536 x 65536"));
  CHECK(mentions(problem({0x80000000, 0x80000000, 4}), "does not fit in memory"));
  CHECK(mentions(problem({0x80000000, 0x80000000, 2}), "does not fit in memory"));  // 2^63: above PTRDIFF_MAX
  CHECK(mentions(problem({0x80000000, 0x80000000}), "needs 4611686018427387904"));
  // A zero does not excuse strides that overflow.
  CHECK(mentions(problem({0, 0xffffffff, 0xffffffff, 0xffffffff}), "does not fit in memory"));
  CHECK(problem({0, 0xffffffff}).empty());
}

TEST_CASE("damaged IDX files load or give an io_error") {
  const bytes plain = encode_idx({3, 4, 2}, noise(24, 5));
  CHECK(refused_damaged(plain, 5000, 23, [](const bytes& b) {
          const idx_array array = parse_idx(b, "x");
          index_t count = 1;
          for (const index_t extent : array.extents) count *= extent;
          if (count != static_cast<index_t>(array.values.size()))
            throw std::logic_error("shape does not fit");
        }) > 500);
  CHECK(refused_damaged(gzip(plain), 2000, 29, [](const bytes& b) {
          parse_idx(is_gzip(b) ? gunzip(b, "x", 1 << 20) : b, "x");
        }) > 1000);
}

TEST_CASE("files that are no files") {
  const scratch_folder folder;
  CHECK(mentions(io_error_of([&] { read_idx(folder / "missing"); }), "No such file"));
  CHECK(mentions(io_error_of([&] { read_idx(folder.path()); }), "Is a directory"));
  write_idx(folder / "bomb.gz", {1 << 22}, bytes(1 << 22, 0));
  CHECK(mentions(io_error_of([&] { read_idx(folder / "bomb.gz", 100000); }), "100000"));
}
