// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// IDX, the file format of MNIST. A file has two zero bytes, a type code, the number of dimensions, each
/// dimension as a big-endian 32-bit number, then the values with the last dimension fastest. Supported are
/// unsigned bytes in 1 to 4 dimensions. Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of
/// handwritten digits".

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/io/error_text.hpp>
#include <pufferfish/io/gzip.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The content of an IDX file: 1 to 4 extents, and as many values as their product. Element (i, j, k) of an
/// array with extents (a, b, c) is values[(i b + j) c + k].
struct idx_array {
  std::vector<index_t> extents;
  std::vector<std::uint8_t> values;
};

namespace detail {

/// Largest number of dimensions that is supported.
inline constexpr std::size_t idx_max_rank = 4;

/// Checks the first four bytes of an IDX file and returns the number of dimensions. Throws io_error, naming
/// the data, for fewer than four bytes, for a type other than unsigned bytes, and for dimensions outside
/// 1..4.
inline std::size_t idx_rank(std::span<const std::uint8_t> bytes, const std::string& name) {
  if (bytes.size() < 4) {
    throw_error<io_error>({name, ": ", bytes.size(), " bytes are too few for an IDX file"});
  }
  if (bytes[0] != 0 || bytes[1] != 0) {
    throw_error<io_error>({name, ": is not an IDX file: its first two bytes are ", bytes[0], " and ",
                           bytes[1], " instead of 0 and 0"});
  }
  if (bytes[2] != 0x08) {
    throw_error<io_error>({name, ": IDX type code ", bytes[2], " is not supported, only 8 (unsigned bytes)"});
  }
  if (bytes[3] < 1 || bytes[3] > idx_max_rank) {
    throw_error<io_error>({name, ": ", bytes[3], " IDX dimensions are not in 1..4"});
  }
  return bytes[3];
}

}  // namespace detail

/// Parses IDX data in memory. `name`: name of the data in error messages. An extent of 0 makes an empty
/// array. Throws io_error for a wrong magic number or type, for dimensions outside 1..4, and for extents
/// whose product is not the number of bytes that follow.
inline idx_array parse_idx(std::span<const std::uint8_t> bytes, const std::string& name) {
  const std::size_t rank = detail::idx_rank(bytes, name);
  const std::size_t header = 4 + 4 * rank;
  if (bytes.size() < header) {
    detail::throw_error<io_error>(
        {name, ": ", bytes.size(), " bytes, but the IDX header of ", rank, " dimensions has ", header});
  }
  idx_array result;
  std::uint64_t expected = 1;
  bool overflow = false;
  for (std::size_t d = 0; d < rank; ++d) {
    std::uint64_t extent = 0;
    for (std::size_t i = 0; i < 4; ++i) extent = extent << 8 | bytes[4 + 4 * d + i];
    // Zeros are left out of the product, so that the strides of an empty array cannot overflow either.
    overflow = __builtin_mul_overflow(expected, extent == 0 ? 1 : extent, &expected) || overflow;
    result.extents.push_back(static_cast<index_t>(extent));
  }
  if (overflow || expected > static_cast<std::uint64_t>(PTRDIFF_MAX)) {
    detail::throw_error<io_error>(
        {name, ": the IDX shape ", detail::shape_text(result.extents), " does not fit in memory"});
  }
  for (const index_t extent : result.extents) {
    if (extent == 0) expected = 0;
  }
  const std::size_t found = bytes.size() - header;
  if (found != expected) {
    detail::throw_error<io_error>({name, ": the IDX shape ", detail::shape_text(result.extents), " needs ",
                                   expected, " values, the file has ", found});
  }
  const auto values = bytes.subspan(header);
  result.values.assign(values.begin(), values.end());
  return result;
}

/// Reads an IDX file, plain or gzip. `limit` bounds the file and its decompressed size, in bytes. Throws
/// io_error for a file that cannot be read or decompressed, and for contents that parse_idx rejects.
/// \code
///   const idx_array labels = read_idx("train-labels-idx1-ubyte.gz");  // extents {60000}
/// \endcode
inline idx_array read_idx(const std::string& path, std::uint64_t limit = default_read_limit) {
  return parse_idx(read_plain_or_gzip(path, limit), path);
}

/// Encodes values as an IDX file of unsigned bytes: the inverse of parse_idx. Throws shape_error unless there
/// are 1..4 extents in 0 .. 2^32 - 1 whose product is the number of values.
inline std::vector<std::uint8_t> encode_idx(const std::vector<index_t>& extents,
                                            std::span<const std::uint8_t> values) {
  const std::string shape = "encode_idx: shape " + detail::shape_text(extents);
  if (extents.empty() || extents.size() > detail::idx_max_rank) {
    detail::throw_error<shape_error>({shape, " has ", extents.size(), " dimensions, not 1..4"});
  }
  std::uint64_t count = 1;
  bool fits = true;
  std::vector<std::uint8_t> bytes{0, 0, 0x08, static_cast<std::uint8_t>(extents.size())};
  for (const index_t extent : extents) {
    fits = fits && extent >= 0 && extent <= index_t{0xffffffff};
    fits = !__builtin_mul_overflow(count, static_cast<std::uint64_t>(extent), &count) && fits;
    for (int shift = 24; shift >= 0; shift -= 8) {
      bytes.push_back(static_cast<std::uint8_t>(static_cast<std::uint64_t>(extent) >> shift & 0xff));
    }
  }
  if (!fits || count != values.size()) {
    detail::throw_error<shape_error>({shape, " does not fit ", values.size(), " values"});
  }
  bytes.insert(bytes.end(), values.begin(), values.end());
  return bytes;
}

/// Writes an IDX file in one step (write_file_atomically), compressed with gzip if the path ends in ".gz".
/// Throws shape_error for extents that encode_idx rejects, and io_error if the file cannot be written.
inline void write_idx(const std::string& path, const std::vector<index_t>& extents,
                      std::span<const std::uint8_t> values) {
  const std::vector<std::uint8_t> bytes = encode_idx(extents, values);
  const bool compress = path.size() > 3 && path.compare(path.size() - 3, 3, ".gz") == 0;
  write_file_atomically(path, compress ? gzip(bytes) : bytes);
}

PUFFERFISH_NAMESPACE_END
