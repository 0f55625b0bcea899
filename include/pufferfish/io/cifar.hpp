// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The "binary version" of CIFAR-10: records of one label byte (0..9) and 3,072 pixel bytes: the red, green
/// and blue plane of a 32 x 32 image, row by row. Source: A. Krizhevsky, "Learning Multiple Layers of
/// Features from Tiny Images", 2009, and its data page.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/io/gzip.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The records of one batch file. `pixels`: NHWC, [labels.size() x 32 x 32 x 3], values 0..255.
struct cifar_batch {
  std::vector<std::uint8_t> pixels;  ///< pixels of all records
  std::vector<std::int32_t> labels;  ///< class of each record, 0..9
};

/// Parses a CIFAR-10 batch in memory and reorders its planes to NHWC: pixel (y, x), channel c of record n is
/// pixels[((32 n + y) 32 + x) 3 + c]. Empty input gives no records. `name`: name of the data in error
/// messages. Throws io_error for a length that is not a multiple of 3,073, and for a label above 9 (with the
/// number of the record, from 0).
inline cifar_batch parse_cifar10(std::span<const std::uint8_t> bytes, const std::string& name) {
  constexpr std::size_t channels = 3;
  constexpr std::size_t plane = 32 * 32;
  constexpr std::size_t record = 1 + channels * plane;
  if (bytes.size() % record != 0) {
    detail::throw_error<io_error>(
        {name, ": ", bytes.size(), " bytes are not a whole number of CIFAR-10 records of 3073 bytes"});
  }
  const std::size_t count = bytes.size() / record;
  cifar_batch result;
  result.pixels.resize(count * channels * plane);
  result.labels.resize(count);
  for (std::size_t n = 0; n < count; ++n) {
    const auto source = bytes.subspan(n * record, record);
    if (source[0] > 9) {
      detail::throw_error<io_error>({name, ": the label of record ", n, " is ", source[0], ", not in 0..9"});
    }
    result.labels[n] = source[0];
    std::uint8_t* const image = result.pixels.data() + n * channels * plane;
    for (std::size_t c = 0; c < channels; ++c) {
      for (std::size_t i = 0; i < plane; ++i) image[i * channels + c] = source[1 + c * plane + i];
    }
  }
  return result;
}

/// Reads a CIFAR-10 batch file, plain or gzip. `limit` bounds the file and its decompressed size, in bytes.
/// Throws io_error for a file that cannot be read or decompressed, and for contents that parse_cifar10
/// rejects.
inline cifar_batch read_cifar10(const std::string& path, std::uint64_t limit = default_read_limit) {
  return parse_cifar10(read_plain_or_gzip(path, limit), path);
}

PUFFERFISH_NAMESPACE_END
