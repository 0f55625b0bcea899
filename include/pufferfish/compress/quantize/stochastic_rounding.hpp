// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: unbiased rounding of values to a few levels by random draws, for codecs that send the levels as
/// fields of a few bits (compress/codes/code_fields.hpp).
///
/// A draw u has 32 random bits: an event of probability f happens if u < floor(2^32 f). The upper 16 bits
/// decide all but one draw in 65,536. So the upper bits are generated for all values, the lower bits only for
/// runs of values with an undecided draw. Value i of a parameter has draw i of the parameter's stream, so
/// that a draw does not depend on chunks, stripes or threads.

#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/compress/codes/code_fields.hpp>
#include <pufferfish/ops/elementwise/dropout.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Computes x numerator / divisor as x lift factor. `lift` is 1 or, for divisors so small that numerator /
/// divisor might overflow, a power of two. Valid for 0 <= x <= divisor, numerator <= 2^32.
template <class T>
struct quotient {
  /// `divisor` must be above 0.
  quotient(T numerator, T divisor)
      : lift(divisor < std::numeric_limits<T>::min() * T(0x1p40) ? T(0x1p100) : T(1)),
        factor(numerator / (divisor * lift)) {}
  T lift, factor;
};

/// Smallest and largest of some values; both are NaN if a value is not finite.
template <class T>
struct value_range {
  T low = 0, high = 0;
};

/// Sum of the differences x_i - shift of some values, and sum of the squares of these differences.
struct value_moments {
  double sum = 0.0, squares = 0.0;
};

/// Draw i of a stream. With i = 64 g + 32 h + j, the upper half of the draw is half h (0: the lower one) of
/// word 32 g + j of the stream. The lower half of the draw is the lower half of word i of the child "lower".
inline std::uint32_t draw_at(const random_stream& random, std::uint64_t i) {
  const std::uint32_t upper = random.word(i / 64 * 32 + i % 32) >> (i / 32 % 2 * 16) & 0xffffU;
  return upper << 16 | (random.child("lower").word(i) & 0xffffU);
}

/// The kernels of stochastic_rounding.inc. `spread_halves(words, count, to)` writes the upper halves of 2
/// count draws from `count` words of the stream, a multiple of 32. `range_of(x, count)` is the value_range of
/// at least one value, `moments_of(x, shift, count)` the value_moments.
///
/// The rounding kernels write one field per value of x, a byte each. `words` has the draws of the values: all
/// bits if `whole` is true, else the upper halves. The result is false if the upper halves do not decide all
/// values; the fields are then invalid. The number s is above zero.
///
/// round_levels(whole, x, words, quotient(l, s), l, bits, fields, count): with a_i = min(l, l |x_i| / s) the
/// field has the magnitude floor(a_i), plus one with probability a_i - floor(a_i), and bit `bits` - 1 is set
/// where x_i < 0.
///
/// round_ternary(whole, x, words, quotient(2^32, s), s, fields, count): with probability |x_i| / s, and
/// always where |x_i| >= s, the field is 2 for x_i < 0 and 1 for other x_i; else it is 0.
///
/// round_binary(whole, x, words, quotient(2^32, high - low), low, high, fields, count): the field is 1 with
/// probability (x_i - low) / (high - low), and always where x_i >= high; else it is 0.
#define PUFFERFISH_KERNELS rounding_passes
#define PUFFERFISH_KERNEL_FILE <pufferfish/compress/quantize/stochastic_rounding.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// Sets all fields to 0, which is the result of a rounding kernel for values that are all zero. Returns true,
/// as a kernel does if the upper 16 bits of the random draws decide the rounding of every value.
inline bool no_fields(std::uint8_t* fields, index_t count) {
  std::fill_n(fields, count, std::uint8_t{0});
  return true;
}

/// Largest |x_i| of the values x that have this range, never -0; NaN if a value is not finite.
template <class T>
T largest_magnitude(const value_range<T>& range) {
  return range.high > -range.low ? range.high : T(0) - range.low;  // never -0
}

/// Makes the streams of random words, one for each of `tensors`, from seed, name of the method (`system`) and
/// place; see code_randoms.
inline std::vector<random_stream> code_streams(std::uint64_t seed, std::string_view system,
                                               const code_place& place,
                                               const std::vector<coded_tensor>& tensors) {
  std::vector<random_stream> result;
  for (const coded_tensor& tensor : tensors) result.push_back(code_randoms(seed, system, place, tensor));
  return result;
}

/// Generates the draws of up to field_piece consecutive values. Results point into the object and are valid
/// until its next call. The object takes about 17 KB; each task has its own.
class draws_of_run {
 public:
  /// Returns the upper halves of the draws first .. first + count - 1 of a stream, in 32-bit words.
  const std::uint32_t* upper_halves(const random_stream& random, std::uint64_t first, index_t count) {
    const auto words_of = PUFFERFISH_KERNEL(widest_isa(), ops::detail::dropouts, random_words);
    const auto spread = PUFFERFISH_KERNEL(widest_isa(), rounding_passes, spread_halves);
    const auto skip = static_cast<index_t>(first % 64);
    const index_t words = (skip + count + 63) / 64 * 32;
    words_of(random.seed(), random.stream(), first / 64 * 32, words, words_);
    spread(words_, words, draws_);
    return draws_ + skip;
  }
  /// Returns all bits of the draws of the last call of upper_halves, which must have the same arguments.
  const std::uint32_t* whole(const random_stream& random, std::uint64_t first, index_t count) {
    const auto words_of = PUFFERFISH_KERNEL(widest_isa(), ops::detail::dropouts, random_words);
    const random_stream lower = random.child("lower");
    std::uint32_t* const draws = draws_ + first % 64;
    words_of(lower.seed(), lower.stream(), first, count, words_);
    for (index_t i = 0; i < count; ++i) draws[i] = draws[i] << 16 | (words_[i] & 0xffffU);
    return draws;
  }

 private:
  std::uint32_t words_[field_piece + 64];
  std::uint32_t draws_[field_piece + 128];
};

/// Writes a stream of fields of `bits` bits, on all threads. start(begin, end) is called for every chunk
/// before its fields are computed. round(part, whole, words, fields) is called for the parts of tensors in
/// every piece and writes a field for each value of the part; `whole`, `words`, `fields` and the result are
/// those of the rounding kernels.
template <class Start, class Round>
void encode_fields(context<device::cpu>& ctx, const tensor_chunks& chunks,
                   const std::vector<coded_tensor>& tensors, const std::vector<random_stream>& streams,
                   int bits, std::byte* code, Start&& start, Round&& round) {
  const auto pack = PUFFERFISH_KERNEL(widest_isa(), field_passes, pack_fields);
  auto* const bytes = reinterpret_cast<std::uint8_t*>(code);
  chunks.for_each(ctx, [&](index_t begin, index_t end, std::span<const tensor_part> parts, std::size_t) {
    alignas(64) std::uint8_t fields[field_piece];
    draws_of_run draws;
    start(begin, end);
    for (index_t at = begin; at < end; at += field_piece) {
      const index_t last = std::min(end, at + field_piece);
      for_each_part(parts, at, last, [&](const tensor_part& part) {
        const coded_tensor& tensor = tensors[part.tensor];
        const random_stream& random = streams[part.tensor];
        const auto first = static_cast<std::uint64_t>(tensor.first + part.begin - tensor.offset);
        std::uint8_t* const to = fields + (part.begin - at);
        if (round(part, false, draws.upper_halves(random, first, part.size()), to)) return;
        round(part, true, draws.whole(random, first, part.size()), to);
      });
      pack(bits, fields, last - at, bytes + at * bits / 8);
    }
  });
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
