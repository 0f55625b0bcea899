// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
/// \file
/// libFuzzer harness of the parsers of data sets: the first byte chooses the format, the rest is the file. A
/// parser may accept or throw io_error; what it accepts must be consistent. Tensor files have harnesses of
/// their own.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include <pufferfish/io/cifar.hpp>
#include <pufferfish/io/gzip.hpp>
#include <pufferfish/io/idx.hpp>

namespace {

constexpr std::uint64_t output_limit = std::uint64_t{1} << 22;

void require(bool condition) {
  if (!condition) std::abort();
}

std::size_t product(const std::vector<pufferfish::index_t>& shape) {
  std::size_t count = 1;
  for (const pufferfish::index_t extent : shape) count *= static_cast<std::size_t>(extent);
  return count;
}

void try_idx(std::span<const std::uint8_t> file) {
  const pufferfish::idx_array array = pufferfish::parse_idx(file, "fuzz");
  require(product(array.extents) == array.values.size());
  const auto again = pufferfish::encode_idx(array.extents, array.values);
  require(std::vector<std::uint8_t>(file.begin(), file.end()) == again);
}

void try_gzip(std::span<const std::uint8_t> file) {
  require(pufferfish::gunzip(file, "fuzz", output_limit).size() <= output_limit);
}

void try_cifar(std::span<const std::uint8_t> file) {
  const pufferfish::cifar_batch batch = pufferfish::parse_cifar10(file, "fuzz");
  require(batch.pixels.size() == batch.labels.size() * 3072);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::span<const std::uint8_t> file(data + 1, size - 1);
  try {
    switch (data[0] % 3) {
      case 0:
        try_idx(file);
        break;
      case 1:
        try_gzip(file);
        break;
      default:
        try_cifar(file);
        break;
    }
  } catch (const pufferfish::io_error&) {
  }
  return 0;
}
