// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `stochastic_binary_codec`: one bit per value, drawn at random, for the
/// smallest or the largest value of its tensor.

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/compress/quantize/stochastic_rounding.hpp>
#include <pufferfish/compress/sign/sign_codec.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of stochastic_binary_codec.
struct stochastic_binary_options {
  code_route route = code_route::gather;  ///< gather or two_hop; both are unbiased
  std::uint64_t seed = 1;                 ///< the draws also depend on step, rank, hop and parameter
};

/// Text of the options for messages, such as "stochastic binary, seed 1, gather".
inline std::string describe(const stochastic_binary_options& options) {
  return detail::message({"stochastic binary, seed ", options.seed, ", ", to_string(options.route)});
}

/// Codes each value by one random bit. For each tensor D with lo = min D_i and hi = max D_i:
///
///     C(D)_i = hi with probability (D_i - lo) / (hi - lo), else lo
///
/// E C(D) = D, and E (C(D)_i - D_i)^2 = (hi - D_i) (D_i - lo). A tensor of equal values is coded exactly.
///
/// The code, at an address that is a multiple of four: ceil(N / 32) words for all N values, bit i % 32 of
/// word i / 32 set where value i is hi; then lo and hi of all tensors as T.
///
/// Suresh, Yu, Kumar and McMahan, Distributed mean estimation with limited communication (ICML 2017), section
/// 2.1; a baseline in the discussion of Wang, Agarwal and Papailiopoulos, Pufferfish (MLSys 2021).
///
/// A tensor with a value that is not finite, or whose hi - lo overflows, decodes to NaN.
///
/// \code
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, stochastic_binary_options{});
/// \endcode
template <class T>
class stochastic_binary_codec {
 public:
  using value_type = T;
  using options_type = stochastic_binary_options;
  static constexpr bool has_fixed_length = true;

  /// `tensors`: places and sizes of the coded tensors. Only options.seed affects the codes: the route belongs
  /// to the class that sends them.
  explicit stochastic_binary_codec(std::vector<coded_tensor> tensors,
                                   const stochastic_binary_options& options = {})
      : options_(options), tensors_(std::move(tensors)), chunks_(tensors_), ranges_(chunks_.parts().size()) {}

  /// Length of a code in bytes: 4 ceil(N / 32) for the bits of N values and 2 sizeof(T) per tensor.
  std::size_t most_bytes() const { return word_bytes() + 2 * tensors_.size() * sizeof(T); }

  /// Writes the code of D = gradients + memory to `code`, and D - C(D) to the memory (see gradient_codec).
  /// Equal arguments give equal codes. Returns most_bytes().
  std::size_t encode(context<device::cpu>& ctx, const code_place& place, std::span<const T> gradients,
                     std::span<T> memory, std::span<std::byte> code) {
    const T* const values = detail::values_to_code(ctx, gradients, memory);
    const std::vector<detail::value_range<T>> ranges = find_ranges(ctx, values);
    const auto round = PUFFERFISH_KERNEL(widest_isa(), detail::rounding_passes, round_binary<T>);
    // The unused bits of the last word must be zero: encode_fields may leave out its last bytes.
    if (chunks_.size() > 0) detail::write_at(code, word_bytes() - sizeof(std::uint32_t), std::uint32_t{0});
    detail::encode_fields(
        ctx, chunks_, tensors_, detail::code_streams(options_.seed, "stochastic_binary", place, tensors_), 1,
        code.data(), [](index_t, index_t) {},
        [&](const detail::tensor_part& part, bool whole, const std::uint32_t* words, std::uint8_t* fields) {
          const detail::value_range<T>& range = ranges[part.tensor];
          if (!(range.high > range.low)) return detail::no_fields(fields, part.size());
          return round(whole, values + part.begin, words, {T(0x1p32), range.high - range.low}, range.low,
                       range.high, fields, part.size());
        });
    for (std::size_t t = 0; t < ranges.size(); ++t) {
      detail::write_at(code, word_bytes() + 2 * t * sizeof(T), ranges[t].low);
      detail::write_at(code, word_bytes() + (2 * t + 1) * sizeof(T), ranges[t].high);
    }
    if (!memory.empty()) decode(ctx, code, decode_as::subtraction, memory);
    return most_bytes();
  }

  /// Stores, adds or subtracts the decoded values; see gradient_codec. Throws value_error, with `to`
  /// unchanged, unless the code has most_bytes() bytes. All bits are valid.
  void decode(context<device::cpu>& ctx, std::span<const std::byte> code, decode_as as,
              std::span<T> to) const {
    detail::check_code_length("stochastic_binary_codec", code.size(), most_bytes());
    const auto put = PUFFERFISH_KERNEL(widest_isa(), detail::sign_code_passes, put_bits<T>);
    const auto* const words = reinterpret_cast<const std::uint32_t*>(code.data());
    chunks_.for_each(ctx, [&](index_t, index_t, std::span<const detail::tensor_part> parts, std::size_t) {
      for (const detail::tensor_part& part : parts) {
        const T low = detail::read_at<T>(code, word_bytes() + 2 * part.tensor * sizeof(T));
        const T high = detail::read_at<T>(code, word_bytes() + (2 * part.tensor + 1) * sizeof(T));
        // put_bits has the value of a set bit as an argument before the value of a clear bit.
        put(as, words + part.begin / detail::signs_a_word, part.begin % detail::signs_a_word, high, low,
            to.data() + part.begin, part.size());
      }
    });
  }

  /// Text of the options on which codes depend. The class that sends the codes adds the route.
  std::string describe() const { return detail::message({"stochastic binary, seed ", options_.seed}); }

 private:
  // Number of bytes of the bits of a code, before the ranges.
  std::size_t word_bytes() const {
    return static_cast<std::size_t>((chunks_.size() + detail::signs_a_word - 1) / detail::signs_a_word) *
           sizeof(std::uint32_t);
  }

  // Finds the range of each tensor; both ends are NaN if a value is not finite or the difference overflows.
  std::vector<detail::value_range<T>> find_ranges(context<device::cpu>& ctx, const T* values) {
    const auto range = PUFFERFISH_KERNEL(widest_isa(), detail::rounding_passes, range_of<T>);
    chunks_.for_each(ctx,
                     [&](index_t, index_t, std::span<const detail::tensor_part> parts, std::size_t first) {
                       for (const detail::tensor_part& part : parts)
                         ranges_[first++] = range(values + part.begin, part.size());
                     });
    constexpr T infinity = std::numeric_limits<T>::infinity();
    std::vector<detail::value_range<T>> result(tensors_.size(), {infinity, -infinity});
    for (std::size_t i = 0; i < ranges_.size(); ++i) {
      detail::value_range<T>& whole = result[chunks_.parts()[i].tensor];
      const T unusable = ranges_[i].low - ranges_[i].low;
      whole.low = std::min(whole.low, ranges_[i].low) + unusable;
      whole.high = std::max(whole.high, ranges_[i].high) + unusable;
    }
    for (detail::value_range<T>& whole : result) {
      if (!std::isfinite(whole.high - whole.low))
        whole.low = whole.high = std::numeric_limits<T>::quiet_NaN();
    }
    return result;
  }

  stochastic_binary_options options_;
  std::vector<coded_tensor> tensors_;
  detail::tensor_chunks chunks_;
  std::vector<detail::value_range<T>> ranges_;  // range of each part
};

/// Makes a compressor by stochastic binary quantization for the gradients of `store`, without error memory.
/// Throws value_error for the route `sparse`.
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const stochastic_binary_options& options) {
  return make_coded_compressor<stochastic_binary_codec<T>>(store, options, code_memory::none, options.route);
}

PUFFERFISH_NAMESPACE_END
