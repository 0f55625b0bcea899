// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// 64-bit digests of bytes, to distinguish networks, options and parameters; not cryptographic. The same
/// bytes have the same digest in every run and process on machines of one byte order.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace detail {

/// A bijection of 64 bits that spreads every input bit over all output bits (the finalizer of SplitMix64:
/// Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
constexpr std::uint64_t spread_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

}  // namespace detail

/// Builds one digest from several pieces. The length of every piece is hashed too, so "ab" + "c" and "a" +
/// "bc" differ. Each step hashes eight bytes and is a bijection of the state, so two inputs of equal length
/// that differ in only one word never collide.
/// \code
/// hasher h;
/// h.text("resnet18").number(batch).values(std::span<const float>(weights));
/// const std::uint64_t digest = h.digest();
/// \endcode
class hasher {
 public:
  constexpr hasher() = default;
  constexpr explicit hasher(std::uint64_t seed) : state_(detail::spread_bits(seed ^ initial)) {}

  /// Adds a piece: its bytes as stored in memory.
  hasher& bytes(std::span<const std::byte> piece) {
    step(piece.size());
    std::size_t at = 0;
    for (; piece.size() - at >= sizeof(std::uint64_t); at += sizeof(std::uint64_t)) {
      step(word(piece.data() + at, sizeof(std::uint64_t)));
    }
    if (at < piece.size()) step(word(piece.data() + at, piece.size() - at));
    return *this;
  }

  /// Adds the elements of an array as one piece, bit for bit: 0.0 and -0.0 differ. T must not have padding
  /// bytes.
  template <class T>
  hasher& values(std::span<const T> piece) {
    static_assert(
        std::is_trivially_copyable_v<T> && (std::is_same_v<T, float> || std::is_same_v<T, double> ||
                                            std::has_unique_object_representations_v<T>),
        "pufferfish::hasher: bytes of this type do not determine its value (padding or pointers inside): "
        "add its members one by one");
    return bytes(std::as_bytes(piece));
  }

  hasher& text(std::string_view piece) { return values(std::span<const char>(piece.data(), piece.size())); }

  /// Adds one integer by value; the type of the integer does not matter.
  template <class T>
  constexpr hasher& number(T value) {
    static_assert(std::is_integral_v<T>,
                  "pufferfish::hasher: number() takes integers; use values() for others");
    step(static_cast<std::uint64_t>(value));
    return *this;
  }

  /// Digest of all pieces added so far. More pieces may be added afterwards.
  constexpr std::uint64_t digest() const { return detail::spread_bits(state_ + pieces_); }

 private:
  static constexpr std::uint64_t initial = 0x9e3779b97f4a7c15U;  // 2^64 / golden ratio: no pattern

  // Mixes a word into the state.
  constexpr void step(std::uint64_t word) {
    state_ = detail::spread_bits(state_ ^ word) + initial;
    ++pieces_;
  }

  // The first `count` <= 8 bytes as a word, the others 0.
  static std::uint64_t word(const std::byte* from, std::size_t count) {
    std::uint64_t result = 0;
    std::memcpy(&result, from, count);
    return result;
  }

  std::uint64_t state_ = initial;
  std::uint64_t pieces_ = 0;
};

/// Digest of bytes: hasher().bytes(bytes).digest().
inline std::uint64_t digest(std::span<const std::byte> bytes) { return hasher().bytes(bytes).digest(); }
/// Digest of text, equal to the digest of the same bytes.
inline std::uint64_t digest(std::string_view text) { return hasher().text(text).digest(); }
/// Digest of the elements of an array: hasher().values(values).digest().
template <class T>
std::uint64_t digest(std::span<T> values) {
  return hasher().values(std::span<const T>(values)).digest();
}

namespace detail {

/// Text of `value` in hexadecimal: "0x" and 16 digits.
inline std::string hexadecimal(std::uint64_t value) {
  std::string text(18, '0');
  text[1] = 'x';
  for (std::size_t i = 18; i-- > 2; value >>= 4) text[i] = "0123456789abcdef"[value & 15U];
  return text;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
