// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the k-th largest magnitude of a list, in linear time, by histograms of the bits of the values.

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <pufferfish/compress/sign/signum.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Returns the key of x: the bits of |x| as an unsigned integer. Keys have the order of magnitudes; -0 and +0
/// have key 0, NaN the largest keys.
template <class T>
PUFFERFISH_ALWAYS_INLINE bits_like<T> magnitude_key(T x) {
  return std::bit_cast<bits_like<T>>(x) & (~bits_like<T>{0} >> 1);
}

/// Counts the keys by a digit: the 11 bits from `shift` on. At most 2^32 - 1 keys of a digit can be counted.
template <class Word>
class digit_histogram {
 public:
  static constexpr int digit_bits = 11, highest_shift = 8 * static_cast<int>(sizeof(Word)) - 1 - digit_bits;

  /// Starts with no keys. `shift`: lowest bit of the digit.
  explicit digit_histogram(int shift) : shift_(shift) {}

  /// The digit of a key.
  Word digit(Word key) const { return (key >> shift_) & (digits - 1); }
  /// Counts a key.
  void add(Word key) { ++counts_[digit(key)]; }
  /// Number of counted keys with this digit.
  index_t count(Word digit) const { return counts_[digit]; }

  /// The digit of the k-th largest of the counted keys, k >= 1. Reduces k to the rank among the keys with
  /// this digit.
  Word digit_of(index_t& k) const {
    Word result = digits - 1;
    for (; k > counts_[result]; --result) k -= counts_[result];
    return result;
  }

 private:
  static constexpr Word digits = Word{1} << digit_bits;
  int shift_;
  std::array<std::uint32_t, digits> counts_{};
};

/// Finds the k-th largest key, 1 <= k <= keys.size(). The highest bit of all keys must be 0. On return k is
/// the number of keys equal to the result that are among the k largest. Overwrites `keys`. Takes at most
/// ceil(bits / 11) passes, 3 for float and 6 for double; each keeps only the keys with the digit of the
/// result.
template <class Word>
Word kth_largest(std::vector<Word>& keys, index_t& k) {
  using histogram = digit_histogram<Word>;
  for (int shift = histogram::highest_shift; keys.size() > 1;
       shift = std::max(0, shift - histogram::digit_bits)) {
    histogram counts(shift);
    for (const Word key : keys) counts.add(key);
    const Word digit = counts.digit_of(k);
    std::erase_if(keys, [&](Word key) { return counts.digit(key) != digit; });
    if (shift == 0) break;  // the keys that are left are equal
  }
  return keys.front();
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
