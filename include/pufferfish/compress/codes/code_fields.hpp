// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: codes that consist of fields of a few bits, one per value. The fields
/// represent small whole numbers (levels).
///
/// Field i of b bits occupies the bits [b i, b i + b) of a little-endian stream of bytes. Packing and
/// unpacking use one byte per field in between, in pieces that stay in a core's first cache.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <pufferfish/compress/codes/tensor_chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Number of values that are coded or decoded together. Fields of any width fill whole bytes of a piece, and
/// a chunk consists of whole pieces.
inline constexpr index_t field_piece = 2048;
static_assert(tensor_chunks::chunk_size % field_piece == 0);

/// Number of bytes of a stream of `count` fields of `bits` bits.
constexpr std::size_t field_bytes(index_t count, int bits) {
  return (static_cast<std::size_t>(count) * static_cast<std::size_t>(bits) + 7) / 8;
}

/// An unsigned integer type of `Bytes` bytes: 1, 2, 4 or 8.
template <int Bytes>
using bytes_word =
    std::conditional_t<Bytes == 8, std::uint64_t,
                       std::conditional_t<Bytes == 4, std::uint32_t,
                                          std::conditional_t<Bytes == 2, std::uint16_t, std::uint8_t>>>;

/// The kernels of code_fields.inc. Unpacked fields take a byte each; a piece of them is aligned to 8 bytes.
///   pack_fields(bits, fields, count, code)    packs fields of 1, 2, 4 or 8 bits; the unused bits of the
///                                             last byte become 0
///   unpack_fields(bits, code, count, fields)  the reverse, for 2, 4 or 8 bits
///   signed_fields(bits, fields, count)        fields with a sign in the highest of `bits` bits and a
///                                             magnitude in the others become std::int8_t, in place
///   ternary_fields(fields, count)             fields 0, 1, 2 become std::int8_t 0, 1, -1, in place
///   add_levels(levels, to, count)             to_i += levels_i
///   scaled_levels(levels, scale, to, count)   to_i = levels_i scale
#define PUFFERFISH_KERNELS field_passes
#define PUFFERFISH_KERNEL_FILE <pufferfish/compress/codes/code_fields.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// Field i of a stream. This function is the scalar reference for unpack_fields.
inline unsigned field_at(const std::uint8_t* code, int bits, index_t i) {
  const index_t bit = bits * i;
  return static_cast<unsigned>(code[bit / 8]) >> bit % 8 & ((1U << bits) - 1U);
}

/// Writes the numbers sum + most, 0 <= sum + most <= 2 most, as a stream of fields of `bits` bits, 2 to 32.
/// Writes field_bytes(count, bits) bytes; unused bits of the last byte are 0. `to` needs no alignment.
inline void pack_sums(int bits, const std::int32_t* sums, std::int32_t most, index_t count,
                      std::uint8_t* to) {
  std::uint64_t waiting = 0;
  int filled = 0;
  for (index_t i = 0; i < count; ++i) {
    waiting |= static_cast<std::uint64_t>(sums[i] + most) << filled;
    filled += bits;
    if (filled < 32) continue;
    const auto word = static_cast<std::uint32_t>(waiting);
    std::memcpy(to, &word, sizeof word);
    to += sizeof word;
    waiting >>= 32;
    filled -= 32;
  }
  for (; filled > 0; filled -= 8, waiting >>= 8) *to++ = static_cast<std::uint8_t>(waiting);
}

/// The inverse of pack_sums: reads field_bytes(count, bits) bytes. Returns false if a sum is above `most`;
/// the sums are written nevertheless. A field is at least 0, so no sum is below -most.
inline bool unpack_sums(int bits, const std::uint8_t* from, std::int32_t most, index_t count,
                        std::int32_t* sums) {
  const std::uint8_t* const end = from + field_bytes(count, bits);
  const std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
  std::uint64_t waiting = 0;
  int filled = 0;
  std::int32_t largest = 0;
  for (index_t i = 0; i < count; ++i) {
    if (filled < bits) {
      std::uint32_t word = 0;
      if (end - from >= 4) {
        std::memcpy(&word, from, sizeof word);
        from += sizeof word;
      } else {
        for (int shift = 0; from < end; shift += 8) word |= static_cast<std::uint32_t>(*from++) << shift;
      }
      waiting |= std::uint64_t{word} << filled;
      filled += 32;
    }
    const auto field = static_cast<std::int32_t>(waiting & mask);
    largest = std::max(largest, field);
    sums[i] = field - most;
    waiting >>= bits;
    filled -= bits;
  }
  return largest <= 2 * most;
}

/// Stores, adds or subtracts levels times a scale: to = levels scale, to += levels scale or to -= levels
/// scale. Products are rounded before they are added. `count` must be at most field_piece.
template <class T>
void put_levels(decode_as as, const std::int8_t* levels, T scale, T* to, index_t count) {
  const auto scaled = PUFFERFISH_KERNEL(widest_isa(), field_passes, scaled_levels<T, std::int8_t>);
  if (as == decode_as::values) return scaled(levels, scale, to, count);
  T products[field_piece];
  scaled(levels, as == decode_as::addition ? scale : -scale, products, count);
  PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, add<T>)(products, to, count);
}

/// Calls f(part) for the intersections of the given parts with [begin, end).
template <class F>
void for_each_part(std::span<const tensor_part> parts, index_t begin, index_t end, F&& f) {
  for (const tensor_part& part : parts) {
    const index_t first = std::max(begin, part.begin), last = std::min(end, part.end);
    if (first < last) f(tensor_part{part.tensor, first, last});
  }
}

/// Decodes a stream of fields, on all threads. Each piece is unpacked; to_levels(fields, count) turns its
/// fields into std::int8_t levels in place; then put(part, levels) is called for the parts of tensors in the
/// piece.
template <class ToLevels, class Put>
void decode_fields(context<device::cpu>& ctx, const tensor_chunks& chunks, int bits, const std::byte* code,
                   ToLevels&& to_levels, Put&& put) {
  const auto unpack = PUFFERFISH_KERNEL(widest_isa(), field_passes, unpack_fields);
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(code);
  chunks.for_each(ctx, [&](index_t begin, index_t end, std::span<const tensor_part> parts, std::size_t) {
    alignas(64) std::uint8_t fields[field_piece];
    for (index_t at = begin; at < end; at += field_piece) {
      const index_t last = std::min(end, at + field_piece);
      unpack(bits, bytes + at * bits / 8, last - at, fields);
      to_levels(fields, last - at);
      for_each_part(parts, at, last, [&](const tensor_part& part) {
        put(part, reinterpret_cast<const std::int8_t*>(fields) + (part.begin - at));
      });
    }
  });
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
