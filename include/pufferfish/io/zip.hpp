// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: zip archives in memory, as .npz files are: stored and deflated entries,
/// 64-bit sizes, checksums. No number in an archive is trusted: see zip_directory_reader,
/// inflate_zip_entry and check_zip_crc. Source: APPNOTE.TXT of PKWARE, version 6.3.

#include <zlib.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/error.hpp>
#include <pufferfish/io/error_text.hpp>
#include <pufferfish/io/gzip.hpp>
#include <pufferfish/io/utf8.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

inline constexpr std::uint32_t zip_local_signature = 0x04034b50;
inline constexpr std::uint32_t zip_central_signature = 0x02014b50;
inline constexpr std::uint32_t zip_end_signature = 0x06054b50;
inline constexpr std::uint32_t zip64_end_signature = 0x06064b50;
inline constexpr std::uint32_t zip64_locator_signature = 0x07064b50;
inline constexpr std::size_t zip_local_size = 30, zip_central_size = 46, zip_end_size = 22;
inline constexpr std::size_t zip64_end_size = 56, zip64_locator_size = 20;
inline constexpr std::uint16_t zip_stored = 0, zip_deflated = 8;
/// These values of a 16- or 32-bit field mean that the number is in the 64-bit form.
inline constexpr std::uint64_t zip_see64_short = 0xffff, zip_see64 = 0xffffffff;
/// Upper bound of deflate's compression ratio: 258 bytes of output from two bits.
inline constexpr std::uint64_t deflate_max_ratio = 1032;

/// An integer of Bytes bytes, little-endian, at an offset that the caller has checked.
template <std::size_t Bytes>
std::uint64_t zip_number(std::span<const std::uint8_t> bytes, std::size_t at) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < Bytes; ++i) value |= std::uint64_t{bytes[at + i]} << (8 * i);
  return value;
}

/// One file of an archive, with numbers that have been checked against the archive.
struct zip_entry {
  std::string name;
  std::uint16_t method = zip_stored;
  std::uint32_t crc = 0;
  std::uint64_t packed = 0;  ///< bytes stored in the archive
  std::uint64_t size = 0;    ///< declared bytes of the content
  std::uint64_t header = 0;  ///< offset of its local header
  std::span<const std::uint8_t> data;
};

/// Reads the directory of an archive. Throws io_error,
/// naming the archive and the entry, for any inconsistency.
class zip_directory_reader {
 public:
  zip_directory_reader(std::span<const std::uint8_t> file, const std::string& name)
      : file_(file), name_(name) {}

  /// `limit`: of the declared sizes of all entries together, in bytes.
  std::vector<zip_entry> operator()(std::uint64_t limit) {
    find_directory();
    std::vector<zip_entry> entries;
    std::uint64_t at = start_, promised = 0;
    for (std::uint64_t i = 0; i < count_; ++i) {
      entries.push_back(central_entry(at));
      const zip_entry& entry = entries.back();
      if (entry.size > limit - promised) {
        fail("its entries promise more than the limit of " + std::to_string(limit) + " bytes");
      }
      promised += entry.size;
    }
    if (at != end_) {
      fail("the zip directory ends at byte " + std::to_string(at) + ", not at " + std::to_string(end_));
    }
    for (zip_entry& entry : entries) locate(entry);
    check_overlaps(entries);
    return entries;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { PUFFERFISH_THROW(io_error(name_ + ": " + what)); }
  [[noreturn]] void fail(const zip_entry& entry, const std::string& what) const {
    fail("zip entry " + quote_name(entry.name) + " " + what);
  }

  /// The end record is at the end of the file, followed only by a comment whose length it contains.
  std::size_t find_end() const {
    const std::size_t size = file_.size();
    if (size >= zip_end_size) {
      const std::size_t last = size - zip_end_size, first = last > 0xffff ? last - 0xffff : 0;
      for (std::size_t at = last + 1; at-- > first;) {
        if (zip_number<4>(file_, at) == zip_end_signature && zip_number<2>(file_, at + 20) == last - at) {
          return at;
        }
      }
    }
    fail(std::to_string(size) + " bytes without a zip archive's end record");
  }

  /// Sets count_, start_ and end_: number of entries, first byte and end of the directory. Uses the 64-bit
  /// records if there are any.
  void find_directory() {
    std::size_t end = find_end();
    std::uint64_t disks = zip_number<2>(file_, end + 4) | zip_number<2>(file_, end + 6);
    std::uint64_t here = zip_number<2>(file_, end + 8);
    count_ = zip_number<2>(file_, end + 10);
    std::uint64_t size = zip_number<4>(file_, end + 12);
    start_ = zip_number<4>(file_, end + 16);
    if (end >= zip64_locator_size &&
        zip_number<4>(file_, end - zip64_locator_size) == zip64_locator_signature) {
      const std::size_t locator = end - zip64_locator_size;
      const std::uint64_t at = zip_number<8>(file_, locator + 8);
      if (at > locator || locator - at < zip64_end_size ||
          zip_number<4>(file_, static_cast<std::size_t>(at)) != zip64_end_signature) {
        fail("no 64-bit end record of the zip archive at byte " + std::to_string(at));
      }
      end = static_cast<std::size_t>(at);
      disks = zip_number<4>(file_, end + 16) | zip_number<4>(file_, end + 20);
      here = zip_number<8>(file_, end + 24);
      count_ = zip_number<8>(file_, end + 32);
      size = zip_number<8>(file_, end + 40);
      start_ = zip_number<8>(file_, end + 48);
    }
    if (disks != 0 || here != count_) fail("a zip archive in several parts");
    if (start_ > end || end - start_ != size) {
      fail("a zip directory of " + std::to_string(size) + " bytes at byte " + std::to_string(start_) +
           " does not end where the end record is, at byte " + std::to_string(end));
    }
    if (count_ > size / zip_central_size) {
      fail("a zip directory of " + std::to_string(size) + " bytes cannot have " + std::to_string(count_) +
           " entries");
    }
    end_ = end;
  }

  /// Replaces the `numbers` that are 32 one-bits by those of a 64-bit extra field, which keeps their order.
  void read_extra(const zip_entry& entry, std::span<const std::uint8_t> extra,
                  std::initializer_list<std::uint64_t*> numbers) const {
    while (extra.size() >= 4) {
      const std::uint64_t id = zip_number<2>(extra, 0), length = zip_number<2>(extra, 2);
      if (length > extra.size() - 4) break;
      if (id == 1) {
        std::size_t at = 4;
        for (std::uint64_t* number : numbers) {
          if (*number != zip_see64) continue;
          if (at + 8 > 4 + length) fail(entry, "has a 64-bit field of " + std::to_string(length) + " bytes");
          *number = zip_number<8>(extra, at);
          at += 8;
        }
        return;
      }
      extra = extra.subspan(4 + static_cast<std::size_t>(length));
    }
  }

  /// Reads the directory entry at `position` and moves `position` to the next one.
  zip_entry central_entry(std::uint64_t& position) const {
    const auto at = static_cast<std::size_t>(position);
    zip_entry entry;
    if (end_ - at < zip_central_size || zip_number<4>(file_, at) != zip_central_signature) {
      fail("no zip directory entry at byte " + std::to_string(at));
    }
    const auto name = static_cast<std::size_t>(zip_number<2>(file_, at + 28));
    const auto extra = static_cast<std::size_t>(zip_number<2>(file_, at + 30));
    const auto comment = static_cast<std::size_t>(zip_number<2>(file_, at + 32));
    if (name + extra + comment > end_ - at - zip_central_size) {
      fail("the zip directory entry at byte " + std::to_string(at) + " is longer than the directory");
    }
    entry.name.assign(reinterpret_cast<const char*>(file_.data()) + at + zip_central_size, name);
    if (first_invalid_utf8(entry.name) != name || entry.name.find('\0') != std::string::npos) {
      fail(entry, "has a name that is not UTF-8");
    }
    entry.method = static_cast<std::uint16_t>(zip_number<2>(file_, at + 10));
    entry.crc = static_cast<std::uint32_t>(zip_number<4>(file_, at + 16));
    entry.packed = zip_number<4>(file_, at + 20);
    entry.size = zip_number<4>(file_, at + 24);
    entry.header = zip_number<4>(file_, at + 42);
    read_extra(entry, file_.subspan(at + zip_central_size + name, extra),
               {&entry.size, &entry.packed, &entry.header});
    // Flags for encryption, patched data and an encrypted directory.
    if ((zip_number<2>(file_, at + 8) & 0x2061) != 0) fail(entry, "is encrypted or a patch");
    if (entry.method != zip_stored && entry.method != zip_deflated) {
      fail(entry,
           "is compressed by method " + std::to_string(entry.method) + "; known are 0 and 8 (deflate)");
    }
    if (entry.method == zip_stored ? entry.size != entry.packed
                                   : entry.size / deflate_max_ratio > entry.packed) {
      fail(entry,
           "promises " + std::to_string(entry.size) + " bytes and holds " + std::to_string(entry.packed));
    }
    position += zip_central_size + name + extra + comment;
    return entry;
  }

  /// Finds the data, which follow a local header that must agree with the directory.
  void locate(zip_entry& entry) const {
    if (entry.header > start_ || start_ - entry.header < zip_local_size ||
        zip_number<4>(file_, static_cast<std::size_t>(entry.header)) != zip_local_signature) {
      fail(entry, "has no local header at byte " + std::to_string(entry.header));
    }
    const auto at = static_cast<std::size_t>(entry.header);
    const auto name = static_cast<std::size_t>(zip_number<2>(file_, at + 26));
    const auto extra = static_cast<std::size_t>(zip_number<2>(file_, at + 28));
    const auto room = static_cast<std::size_t>(start_) - at - zip_local_size;
    if (name + extra > room || room - name - extra < entry.packed) {
      fail(entry, "of " + std::to_string(entry.packed) + " bytes at byte " + std::to_string(at) +
                      " goes beyond the data, which ends at byte " + std::to_string(start_));
    }
    const std::string_view local(reinterpret_cast<const char*>(file_.data()) + at + zip_local_size, name);
    std::uint64_t size = zip_number<4>(file_, at + 22), packed = zip_number<4>(file_, at + 18);
    read_extra(entry, file_.subspan(at + zip_local_size + name, extra), {&size, &packed});
    // If bit 3 is set, checksum and sizes follow the data, and may be zero in the local header.
    const bool later = (zip_number<2>(file_, at + 6) & 8) != 0;
    if (local != entry.name || zip_number<2>(file_, at + 8) != entry.method ||
        (!later &&
         (size != entry.size || packed != entry.packed || zip_number<4>(file_, at + 14) != entry.crc))) {
      fail(entry, "is another one in its local header at byte " + std::to_string(at));
    }
    entry.data = file_.subspan(at + zip_local_size + name + extra, static_cast<std::size_t>(entry.packed));
  }

  /// No byte may belong to two entries: otherwise a small file could hold any number of large ones.
  void check_overlaps(const std::vector<zip_entry>& entries) const {
    std::vector<const zip_entry*> order;
    for (const zip_entry& entry : entries) order.push_back(&entry);
    std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return a->header < b->header; });
    for (std::size_t i = 1; i < order.size(); ++i) {
      const auto end =
          static_cast<std::uint64_t>(order[i - 1]->data.data() - file_.data()) + order[i - 1]->data.size();
      if (order[i]->header < end) {
        fail(*order[i], "at byte " + std::to_string(order[i]->header) + " overlaps " +
                            quote_name(order[i - 1]->name) + ", which ends at byte " + std::to_string(end));
      }
    }
  }

  std::span<const std::uint8_t> file_;
  const std::string& name_;
  std::uint64_t count_ = 0, start_ = 0, end_ = 0;
};

/// The checksum of bytes with checksum `crc`, followed by `bytes`.
inline std::uint32_t zip_crc(std::uint32_t crc, std::span<const std::uint8_t> bytes) {
  if (bytes.empty()) return crc;  // for a null pointer, zlib returns the initial checksum
  return static_cast<std::uint32_t>(::crc32_z(crc, bytes.data(), bytes.size()));
}

/// Throws io_error unless the content has the entry's checksum.
inline void check_zip_crc(const zip_entry& entry, std::span<const std::uint8_t> content,
                          const std::string& file) {
  const std::uint32_t crc = zip_crc(0, content);
  if (crc == entry.crc) return;
  PUFFERFISH_THROW(io_error(file + ": zip entry " + quote_name(entry.name) + " is corrupt: its checksum is " +
                            std::to_string(crc) + ", the archive says " + std::to_string(entry.crc)));
}

/// The content of a deflated entry. Memory grows with the output, to at most twice its
/// size, so that an archive that declares more than it holds does not cause a large
/// allocation. Throws io_error if the data are corrupt, or shorter or longer than declared.
inline std::vector<std::uint8_t> inflate_zip_entry(const zip_entry& entry, const std::string& file) {
  const auto fail = [&](const std::string& what) {
    PUFFERFISH_THROW(io_error(file + ": zip entry " + quote_name(entry.name) + " " + what));
  };
  z_stream stream{};
  int code = inflateInit2(&stream, -15);
  if (code != Z_OK) fail("cannot be read: " + zlib_reason(stream, code));
  struct closer {
    z_stream* stream;
    ~closer() { inflateEnd(stream); }
  } const close_at_end{&stream};
  std::vector<std::uint8_t> content;
  std::size_t read = 0, used = 0;
  // One byte more than declared, so that a longer stream is detected.
  const std::uint64_t most = entry.size + 1;
  for (;;) {
    if (used == content.size()) {
      const std::uint64_t room = std::max<std::uint64_t>(2 * content.size(), std::uint64_t{1} << 16);
      content.resize(static_cast<std::size_t>(std::min(room, most)));
    }
    stream.next_in = const_cast<Bytef*>(entry.data.data() + read);  // zlib does not write to it
    stream.avail_in = zlib_piece(entry.data.size() - read);
    stream.next_out = content.data() + used;
    stream.avail_out = zlib_piece(content.size() - used);
    const uInt in_before = stream.avail_in, out_before = stream.avail_out;
    code = ::inflate(&stream, Z_NO_FLUSH);
    read += in_before - stream.avail_in;
    used += out_before - stream.avail_out;
    if (used > entry.size) fail("holds more than the " + std::to_string(entry.size) + " bytes it promises");
    if (code == Z_STREAM_END) break;
    if (code != Z_OK && code != Z_BUF_ERROR) fail("is corrupt: " + zlib_reason(stream, code));
    if (stream.avail_in == in_before && stream.avail_out == out_before) {
      fail("ends within its data, after " + std::to_string(used) + " of " + std::to_string(entry.size) +
           " bytes");
    }
  }
  if (used != entry.size || read != entry.data.size()) {
    fail("holds " + std::to_string(used) + " bytes in " + std::to_string(read) + ", but promises " +
         std::to_string(entry.size) + " in " + std::to_string(entry.data.size()));
  }
  content.resize(used);
  return content;
}

/// Compresses `head` followed by `body` into one raw deflate stream.
inline std::vector<std::uint8_t> deflate_for_zip(std::span<const std::uint8_t> head,
                                                 std::span<const std::uint8_t> body,
                                                 const std::string& file) {
  z_stream stream{};
  int code = deflateInit2(&stream, Z_DEFAULT_COMPRESSION, Z_DEFLATED, -15, 8, Z_DEFAULT_STRATEGY);
  if (code != Z_OK) PUFFERFISH_THROW(io_error(file + ": " + zlib_reason(stream, code)));
  struct closer {
    z_stream* stream;
    ~closer() { deflateEnd(stream); }
  } const close_at_end{&stream};
  std::vector<std::uint8_t> packed;
  std::size_t used = 0;
  for (const bool last : {false, true}) {
    const std::span<const std::uint8_t> part = last ? body : head;
    std::size_t read = 0;
    do {
      if (used == packed.size()) packed.resize(std::max<std::size_t>(2 * used, std::size_t{1} << 14));
      stream.next_in = const_cast<Bytef*>(part.data() + read);
      stream.avail_in = zlib_piece(part.size() - read);
      stream.next_out = packed.data() + used;
      stream.avail_out = zlib_piece(packed.size() - used);
      const uInt in_before = stream.avail_in, out_before = stream.avail_out;
      code = ::deflate(&stream, last && in_before == part.size() - read ? Z_FINISH : Z_NO_FLUSH);
      read += in_before - stream.avail_in;
      used += out_before - stream.avail_out;
      if (code != Z_OK && code != Z_BUF_ERROR && code != Z_STREAM_END) {
        PUFFERFISH_THROW(io_error(file + ": " + zlib_reason(stream, code)));
      }
    } while (last ? code != Z_STREAM_END : read < part.size());
  }
  packed.resize(used);
  return packed;
}

/// Writes an archive front to back: add() entry by entry, then finish(). Equal content gives equal bytes:
/// time stamps are all 1980-01-01.
template <class Sink>
class zip_writer {
 public:
  /// `sink(span)` receives the bytes. `wide`: use the 64-bit forms everywhere, even if not needed.
  zip_writer(const Sink& sink, bool wide) : sink_(sink), wide_(wide) {}

  /// Adds an entry whose stored bytes are `parts`, one after the other; entry.packed is their total size.
  void add(zip_entry entry, std::initializer_list<std::span<const std::uint8_t>> parts) {
    entry.header = written_;
    const bool large = wide_ || entry.size >= zip_see64 || entry.packed >= zip_see64;
    number(zip_local_signature, 4);
    common_fields(entry, large ? 45 : 20, large, large ? 20 : 0);
    text_ += entry.name;
    if (large) extra_field({entry.size, entry.packed});
    flush();
    for (const std::span<const std::uint8_t> part : parts) emit(part);
    entries_.push_back(std::move(entry));
  }

  /// Writes the directory and the end records. To be called once, after the last add().
  void finish() {
    const std::uint64_t start = written_;
    for (const zip_entry& entry : entries_) {
      const bool large = wide_ || entry.size >= zip_see64 || entry.packed >= zip_see64;
      const bool far = wide_ || entry.header >= zip_see64;
      const std::uint64_t extra = (large ? 16U : 0U) + (far ? 8U : 0U);
      number(zip_central_signature, 4);
      number(large || far ? 45 : 20, 2);  // made by
      common_fields(entry, large || far ? 45 : 20, large, extra > 0 ? extra + 4 : 0);
      number(0, 2);  // comment
      number(0, 2);  // disk
      number(0, 2);  // internal attributes
      number(0, 4);  // external attributes
      number(far ? zip_see64 : entry.header, 4);
      text_ += entry.name;
      if (large && far) {
        extra_field({entry.size, entry.packed, entry.header});
      } else if (large) {
        extra_field({entry.size, entry.packed});
      } else if (far) {
        extra_field({entry.header});
      }
      flush();
    }
    end_records(start, written_ - start);
  }

 private:
  void emit(std::span<const std::uint8_t> bytes) {
    if (!bytes.empty()) sink_(bytes);
    written_ += bytes.size();
  }
  void flush() {
    emit({reinterpret_cast<const std::uint8_t*>(text_.data()), text_.size()});
    text_.clear();
  }
  void number(std::uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) text_ += static_cast<char>((value >> (8 * i)) & 0xff);
  }

  /// The fields from "version needed" to the lengths of name and extra field, which both headers share.
  void common_fields(const zip_entry& entry, std::uint64_t version, bool large, std::uint64_t extra) {
    number(version, 2);
    number(0x0800, 2);  // names are UTF-8
    number(entry.method, 2);
    number(0, 2);       // time
    number(0x0021, 2);  // 1980-01-01
    number(entry.crc, 4);
    number(large ? zip_see64 : entry.packed, 4);
    number(large ? zip_see64 : entry.size, 4);
    number(entry.name.size(), 2);
    number(extra, 2);
  }
  void extra_field(std::initializer_list<std::uint64_t> numbers) {
    number(1, 2);
    number(8 * numbers.size(), 2);
    for (const std::uint64_t value : numbers) number(value, 8);
  }

  /// Writes the end record, before it the 64-bit ones if a number does not fit or `wide` is set.
  void end_records(std::uint64_t start, std::uint64_t size) {
    const std::uint64_t count = entries_.size();
    const bool large = wide_ || count >= zip_see64_short || start >= zip_see64 || size >= zip_see64;
    if (large) {
      const std::uint64_t here = written_;
      number(zip64_end_signature, 4);
      number(zip64_end_size - 12, 8);
      number(45, 2);
      number(45, 2);
      number(0, 8);  // disks
      for (const std::uint64_t value : {count, count, size, start}) number(value, 8);
      number(zip64_locator_signature, 4);
      number(0, 4);
      number(here, 8);
      number(1, 4);
    }
    number(zip_end_signature, 4);
    number(0, 4);  // disks
    for (int i = 0; i < 2; ++i) number(large ? zip_see64_short : count, 2);
    number(large ? zip_see64 : size, 4);
    number(large ? zip_see64 : start, 4);
    number(0, 2);
    flush();
  }

  const Sink& sink_;
  bool wide_;
  std::string text_;
  std::vector<zip_entry> entries_;
  std::uint64_t written_ = 0;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
