// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Gzip (RFC 1952) in memory, through zlib: decompression with a bound on the output, and compression.

#include <zlib.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/io/file.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Whether the bytes start with the two magic bytes of gzip.
inline bool is_gzip(std::span<const std::uint8_t> bytes) {
  return bytes.size() >= 2 && bytes[0] == 0x1f && bytes[1] == 0x8b;
}

namespace detail {

/// The largest number of bytes, at most `bytes`, that one call of zlib accepts. zlib counts bytes as unsigned
/// int.
inline uInt zlib_piece(std::size_t bytes) {
  return static_cast<uInt>(std::min<std::size_t>(bytes, std::numeric_limits<uInt>::max()));
}

/// The message of a zlib error, or its code if zlib gives no message.
inline std::string zlib_reason(const z_stream& stream, int code) {
  return stream.msg != nullptr ? std::string(stream.msg) : "zlib error " + std::to_string(code);
}

/// The state of one decompression of gzip data by zlib. The input and the name must outlive the object.
class inflater {
 public:
  /// `name`: name of the data in error messages. Throws io_error if zlib cannot be initialized.
  inflater(std::span<const std::uint8_t> input, const std::string& name) : input_(input), name_(name) {
    const int code = inflateInit2(&stream_, 15 + 16);  // largest window; only the framing of gzip
    if (code != Z_OK) throw_error<io_error>({name_, ": ", zlib_reason(stream_, code)});
  }
  inflater(const inflater&) = delete;
  inflater& operator=(const inflater&) = delete;
  ~inflater() { inflateEnd(&stream_); }

  /// Decompresses the next bytes into `out`. Returns the number of bytes written, which is less than
  /// out.size() only at the end of the last member. Throws io_error for data that is corrupt, truncated, or
  /// followed by other bytes.
  std::size_t fill(std::span<std::uint8_t> out) {
    std::size_t filled = 0;
    while (filled < out.size() && !done_) {
      stream_.next_in = const_cast<Bytef*>(input_.data() + read_);  // zlib does not write to it
      stream_.avail_in = zlib_piece(input_.size() - read_);
      stream_.next_out = out.data() + filled;
      stream_.avail_out = zlib_piece(out.size() - filled);
      const uInt in_before = stream_.avail_in;
      const uInt out_before = stream_.avail_out;
      const int code = inflate(&stream_, Z_NO_FLUSH);
      read_ += in_before - stream_.avail_in;
      filled += out_before - stream_.avail_out;
      if (code == Z_STREAM_END) {
        next_member();
      } else if (code != Z_OK && code != Z_BUF_ERROR) {
        fail("is corrupt", zlib_reason(stream_, code));
      } else if (stream_.avail_in == in_before && stream_.avail_out == out_before) {
        fail("is truncated", "the stream does not end");
      }
    }
    return filled;
  }

 private:
  /// Continues with the next gzip member. Members may follow each other (RFC 1952, 2.2); any other data after
  /// a member is an error.
  void next_member() {
    if (read_ == input_.size()) {
      done_ = true;
      return;
    }
    if (!is_gzip(input_.subspan(read_))) {
      fail("has bytes after its end", std::to_string(input_.size() - read_) + " that are not gzip");
    }
    const int code = inflateReset(&stream_);
    if (code != Z_OK) fail("cannot be continued", zlib_reason(stream_, code));
  }

  /// Throws io_error with the position in the compressed data.
  [[noreturn]] void fail(const std::string& what, const std::string& why) const {
    throw_error<io_error>(
        {name_, ": gzip data ", what, " at byte ", read_, " of ", input_.size(), ": ", why});
  }

  std::span<const std::uint8_t> input_;
  const std::string& name_;
  z_stream stream_{};
  std::size_t read_ = 0;
  bool done_ = false;
};

}  // namespace detail

/// Decompresses gzip data, one member or several in a row. `name`: name of the data in error messages.
/// `limit` bounds the result, in bytes. Memory use is at most about twice the size decompressed so far, so
/// that a small hostile file cannot allocate much. Throws io_error for data that is not gzip, truncated,
/// corrupt (also by its checksum), followed by other bytes, or longer than the limit.
/// \code
///   const std::vector<std::uint8_t> packed = gzip(bytes);
///   const std::vector<std::uint8_t> again = gunzip(packed, "bytes");
/// \endcode
inline std::vector<std::uint8_t> gunzip(std::span<const std::uint8_t> bytes, const std::string& name,
                                        std::uint64_t limit = default_read_limit) {
  if (!is_gzip(bytes)) detail::throw_error<io_error>({name, ": is not gzip data"});
  detail::inflater source(bytes, name);
  std::vector<std::uint8_t> result;
  std::size_t used = 0;
  for (;;) {
    result.resize(std::max<std::size_t>(2 * used, std::size_t{1} << 14));
    const std::size_t got = source.fill(std::span(result).subspan(used));
    used += got;
    if (used > limit) {
      detail::throw_error<io_error>({name, ": ", bytes.size(),
                                     " bytes of gzip data decompress to more than the limit of ", limit,
                                     " bytes"});
    }
    if (used < result.size()) break;
  }
  result.resize(used);
  return result;
}

/// Reads a file and decompresses it if its first bytes are those of gzip; its name does not matter. `limit`
/// bounds the file and the result, in bytes. A gzip file is in memory together with its content. Throws
/// io_error for a file that read_file or gunzip rejects.
inline std::vector<std::uint8_t> read_plain_or_gzip(const std::string& path,
                                                    std::uint64_t limit = default_read_limit) {
  std::vector<std::uint8_t> bytes = read_file(path, limit);
  if (!is_gzip(bytes)) return bytes;
  return gunzip(bytes, path, limit);
}

/// Compresses bytes into one gzip member without a name or a time stamp, so that equal input gives equal
/// bytes (with one version of zlib). `level`: 0 (no compression) .. 9 (smallest result). Throws value_error
/// for another level, and io_error if zlib fails.
inline std::vector<std::uint8_t> gzip(std::span<const std::uint8_t> bytes, int level = 9) {
  if (level < 0 || level > 9) {
    detail::throw_error<value_error>({"gzip: level ", level, " is not in 0..9"});
  }
  z_stream stream{};
  int code = deflateInit2(&stream, level, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
  if (code != Z_OK) detail::throw_error<io_error>({"gzip: ", detail::zlib_reason(stream, code)});
  struct closer {
    z_stream* stream;
    ~closer() { deflateEnd(stream); }
  } const close_at_end{&stream};

  std::vector<std::uint8_t> result;
  std::size_t read = 0;
  std::size_t used = 0;
  do {
    if (used == result.size()) result.resize(std::max<std::size_t>(2 * used, std::size_t{1} << 14));
    stream.next_in = const_cast<Bytef*>(bytes.data() + read);
    stream.avail_in = detail::zlib_piece(bytes.size() - read);
    stream.next_out = result.data() + used;
    stream.avail_out = detail::zlib_piece(result.size() - used);
    const uInt in_before = stream.avail_in;
    const uInt out_before = stream.avail_out;
    code = deflate(&stream, in_before == bytes.size() - read ? Z_FINISH : Z_NO_FLUSH);
    read += in_before - stream.avail_in;
    used += out_before - stream.avail_out;
  } while (code == Z_OK || code == Z_BUF_ERROR);
  if (code != Z_STREAM_END) detail::throw_error<io_error>({"gzip: ", detail::zlib_reason(stream, code)});
  result.resize(used);
  return result;
}

PUFFERFISH_NAMESPACE_END
