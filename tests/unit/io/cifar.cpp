// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../support/io_support.hpp"

#include <doctest/doctest.h>

#include <pufferfish/io/cifar.hpp>

using namespace pufferfish;
using namespace io_test;

namespace {
bytes records(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  bytes result(count * 3073);
  for (auto& b : result) b = static_cast<std::uint8_t>(random());
  for (std::size_t n = 0; n < count; ++n) result[n * 3073] %= 10;
  return result;
}
}  // namespace

TEST_CASE("planes become NHWC") {
  for (const std::size_t count : {0UL, 1UL, 3UL}) {
    const bytes file = records(count, 1);
    const cifar_batch batch = parse_cifar10(file, "x");
    REQUIRE(batch.labels.size() == count);
    REQUIRE(batch.pixels.size() == count * 3072);
    std::size_t wrong = 0;
    for (std::size_t n = 0; n < count; ++n) {
      if (batch.labels[n] != file[n * 3073]) ++wrong;
      for (std::size_t y = 0; y < 32; ++y) {
        for (std::size_t x = 0; x < 32; ++x) {
          for (std::size_t c = 0; c < 3; ++c) {
            if (batch.pixels[((n * 32 + y) * 32 + x) * 3 + c] != file[n * 3073 + 1 + c * 1024 + y * 32 + x])
              ++wrong;
          }
        }
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("only whole records") {
  const bytes file = records(2, 2);
  // Nothing, or exactly the first record, is a batch too.
  CHECK(accepted_prefixes(file, [](const bytes& b) { parse_cifar10(b, "x"); }) == 2);
  const std::string text = io_error_of([&] { parse_cifar10(std::span(file).first(3074), "batch.bin"); });
  CHECK(mentions(text, "batch.bin"));
  CHECK(mentions(text, "3074 bytes"));
}

TEST_CASE("a label above 9 is named with its record") {
  bytes file = records(5, 3);
  file[4 * 3073] = 10;
  file[3 * 3073] = 255;
  const std::string text = io_error_of([&] { parse_cifar10(file, "x"); });
  CHECK(mentions(text, "record 3 is 255"));
}

TEST_CASE("damaged batches load or give an io_error") {
  CHECK(refused_damaged(records(1, 4), 1500, 31, [](const bytes& b) {
          for (const std::int32_t label : parse_cifar10(b, "x").labels) {
            if (label < 0 || label > 9) throw std::logic_error("label out of range");
          }
        }) > 50);
}

TEST_CASE("batches from files, plain and gzip") {
  const scratch_folder folder;
  const bytes file = records(2, 6);
  write_file_atomically(folder / "a.bin", file);
  write_file_atomically(folder / "b.bin", gzip(file));
  CHECK(read_cifar10(folder / "a.bin").pixels == read_cifar10(folder / "b.bin").pixels);
  CHECK(mentions(io_error_of([&] { read_cifar10(folder / "a.bin", 6145); }), "6145"));
  CHECK(mentions(io_error_of([&] { read_cifar10(folder / "b.bin", 6145); }), "6145"));
  CHECK(mentions(io_error_of([&] { read_cifar10(folder / "c.bin"); }), "No such file"));
}
