// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `sign_codec`: sends one sign per value and one scale per tensor. With error feedback the method is
/// EF-signSGD.

#include <cstdint>
#include <string>
#include <vector>

#include <pufferfish/compress/codes/tensor_chunks.hpp>
#include <pufferfish/compress/codes/two_hop_codes.hpp>
#include <pufferfish/compress/sign/signum.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of sign_codec. With error feedback the method is EF-signSGD if codes are gathered, and
/// DoubleSqueeze if codes are sent in two hops.
struct sign_codec_options {
  code_memory memory = code_memory::error_feedback;
  code_route route = code_route::gather;  ///< gather or two_hop
};

/// Text of the options for messages, such as "sign and norm, error feedback, gather".
inline std::string describe(const sign_codec_options& options) {
  return detail::message({"sign and norm, ", to_string(options.memory), ", ", to_string(options.route)});
}

namespace detail {

/// The kernels of sign_codes.inc. Bit i of a run of words belongs to value i.
///   sum_of_magnitudes(x, count)       sum of the |x_i|, in double
///   subtract_signs(scale, x, count)   x -= scale sign(x), with sign(0) = 1
///   put_bits(as, words, shift, low, high, to, count)  stores, adds or subtracts `low` where the bit is set,
///                                     else `high`; the first value has bit `shift` of words[0]
#define PUFFERFISH_KERNELS sign_code_passes
#define PUFFERFISH_KERNEL_FILE <pufferfish/compress/sign/sign_codes.inc>
#include <pufferfish/linalg/for_each_target.inc>

}  // namespace detail

/// Codes each value of D = gradients + memory by its sign. For each tensor D of n values:
///
///     s = (|D_0| + ... + |D_n-1|) / n;  C(D)_i = s sign(D_i)  with sign(0) = 1
///
/// The code, at an address that is a multiple of four: ceil(N / 32) words for all N values, bit i % 32 of
/// word i / 32 set where value i is negative; then the scales of all tensors as T. s is summed in double and
/// rounded to T.
/// ||D - C(D)||^2 = ||D||^2 - ||D||_1^2 / n up to the rounding of s. Karimireddy et al., ICML 2019,
/// section 4.
///
/// D = (1, -3, 0, 2) has s = 1.5, C(D) = (1.5, -1.5, 1.5, 1.5), and the memory becomes (-0.5, -1.5, -1.5,
/// 0.5). A value that is not finite makes all decoded values of its tensor not finite.
///
/// \code
/// gradient_exchange<float, self> exchange(net.store(), comm, {}, sign_codec_options{});
/// \endcode
template <class T>
class sign_codec {
 public:
  using value_type = T;
  using options_type = sign_codec_options;
  static constexpr bool has_fixed_length = true;

  /// `tensors`: places and sizes of the coded tensors. The options do not change the codes: memory and route
  /// belong to the class that sends them.
  explicit sign_codec(std::vector<coded_tensor> tensors, const sign_codec_options& = {})
      : tensors_(std::move(tensors)), chunks_(tensors_), sums_(chunks_.parts().size()) {}

  /// Length of a code of N values in bytes: 4 ceil(N / 32) + sizeof(T) x number of tensors.
  std::size_t most_bytes() const { return word_bytes() + tensors_.size() * sizeof(T); }

  /// Writes the code of D = gradients + memory to `code`, and D - C(D) to the memory (see gradient_codec).
  /// `place` is ignored: the code is deterministic. Returns most_bytes().
  std::size_t encode(context<device::cpu>& ctx, const code_place&, std::span<const T> gradients,
                     std::span<T> memory, std::span<std::byte> code) {
    const auto pack = PUFFERFISH_KERNEL(widest_isa(), detail::sign_passes, momentum_signs<T>);
    const auto sum = PUFFERFISH_KERNEL(widest_isa(), detail::sign_code_passes, sum_of_magnitudes<T>);
    auto* const words = reinterpret_cast<std::uint32_t*>(code.data());
    chunks_.for_each(
        ctx, [&](index_t begin, index_t end, std::span<const detail::tensor_part> parts, std::size_t first) {
          T without_memory[detail::tensor_chunks::chunk_size];
          T* const values = memory.empty() ? without_memory : memory.data() + begin;
          if (memory.empty()) std::fill_n(values, end - begin, T(0));
          pack(memory.empty() ? T(0) : T(1), T(1), false, gradients.data() + begin, values,
               words + begin / detail::signs_a_word, end - begin);
          for (const detail::tensor_part& part : parts) {
            sums_[first++] = sum(values + (part.begin - begin), part.size());
          }
        });
    const std::vector<T> scales = mean_magnitudes();
    std::ranges::copy(std::as_bytes(std::span(scales)), code.data() + word_bytes());
    if (!memory.empty()) subtract(ctx, scales, memory);
    return most_bytes();
  }

  /// Stores, adds or subtracts the decoded values; see gradient_codec. Throws value_error, with `to`
  /// unchanged, unless the code has most_bytes() bytes. All bits and scales are valid.
  void decode(context<device::cpu>& ctx, std::span<const std::byte> code, decode_as as,
              std::span<T> to) const {
    detail::check_code_length("sign_codec", code.size(), most_bytes());
    const auto put = PUFFERFISH_KERNEL(widest_isa(), detail::sign_code_passes, put_bits<T>);
    const auto* const words = reinterpret_cast<const std::uint32_t*>(code.data());
    chunks_.for_each(ctx, [&](index_t, index_t, std::span<const detail::tensor_part> parts, std::size_t) {
      for (const detail::tensor_part& part : parts) {
        const T scale = detail::read_at<T>(code, word_bytes() + part.tensor * sizeof(T));
        put(as, words + part.begin / detail::signs_a_word, part.begin % detail::signs_a_word, -scale, scale,
            to.data() + part.begin, part.size());
      }
    });
  }

  /// Name of the method. The class that sends the codes adds memory and route.
  std::string describe() const { return "sign and norm"; }

 private:
  // Number of bytes of the signs of a code, before the scales.
  std::size_t word_bytes() const {
    return static_cast<std::size_t>((chunks_.size() + detail::signs_a_word - 1) / detail::signs_a_word) *
           sizeof(std::uint32_t);
  }

  // The scale s of each tensor: the sums of its parts in order, divided by its size.
  std::vector<T> mean_magnitudes() const {
    std::vector<double> sums(tensors_.size(), 0.0);
    for (std::size_t i = 0; i < sums_.size(); ++i) sums[chunks_.parts()[i].tensor] += sums_[i];
    std::vector<T> result(sums.size());
    for (std::size_t t = 0; t < sums.size(); ++t) {
      result[t] = static_cast<T>(sums[t] / static_cast<double>(tensors_[t].size));
    }
    return result;
  }

  // Computes memory -= s sign(memory), which changes D to D - C(D).
  void subtract(context<device::cpu>& ctx, const std::vector<T>& scales, std::span<T> memory) const {
    const auto subtract = PUFFERFISH_KERNEL(widest_isa(), detail::sign_code_passes, subtract_signs<T>);
    chunks_.for_each(ctx, [&](index_t, index_t, std::span<const detail::tensor_part> parts, std::size_t) {
      for (const detail::tensor_part& part : parts) {
        subtract(scales[part.tensor], memory.data() + part.begin, part.size());
      }
    });
  }

  std::vector<coded_tensor> tensors_;
  detail::tensor_chunks chunks_;
  std::vector<double> sums_;  // sum of magnitudes of each part
};

/// Makes a compressor with sign_codec for the gradients of `store`: with error feedback EF-signSGD or
/// DoubleSqueeze. Throws value_error for the route `sparse`.
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const sign_codec_options& options) {
  return make_coded_compressor<sign_codec<T>>(store, options, options.memory, options.route);
}

PUFFERFISH_NAMESPACE_END
