// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `tern_codec`: randomly drawn signs and zeros, and one scaler per tensor. See
/// compress/quantize/tern_grad.hpp for the compressor and for the form whose scalers all ranks share.

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/compress/codes/two_hop_codes.hpp>
#include <pufferfish/compress/quantize/tern_codes.hpp>
#include <pufferfish/core/number_text.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of TernGrad: shared_tern_grad if shared_scaler is true, else tern_codec.
struct tern_grad_options {
  double clip = 2.5;          ///< limit of values in standard deviations, finite; 0: no limit
  bool shared_scaler = true;  ///< all ranks share one scaler for each tensor
  /// Names of parameters that are sent whole, or of layers all of whose parameters are sent whole: "fc"
  /// stands for "fc.weight" and "fc.bias".
  std::vector<std::string> skip = {};
  code_route route = code_route::gather;  ///< gather or two_hop
  std::uint64_t seed = 1;                 ///< the draws also depend on step, rank and parameter
};

/// Text of the options for messages, such as "TernGrad, clip 2.5, seed 1, own scalers, gather", with
/// ", whole: fc" after the seed if fc is sent whole.
inline std::string describe(const tern_grad_options& options) {
  std::string text =
      detail::message({"TernGrad, clip ", detail::shortest_number(options.clip), ", seed ", options.seed});
  for (std::size_t i = 0; i < options.skip.size(); ++i)
    text += (i == 0 ? ", whole: " : " ") + options.skip[i];
  text += options.shared_scaler ? ", shared scalers, " : ", own scalers, ";
  return text + to_string(options.route);
}

/// Codes values as randomly drawn signs and zeros. For each tensor D of n values with mean m:
///
///     sigma^2 = (1 / n) sum_i (D_i - m)^2;  s = min(clip sigma, max_i |D_i|)
///     C(D)_i = s sign(D_i) with probability min(1, |D_i| / s), else 0
///
/// E C(D) is D limited to the range -s .. s. If clip sigma is zero, because clip is 0 or all values are equal
/// (such as the value of a tensor of one element), then s = max_i |D_i| and E C(D) = D. C(D) = D for
/// parameters that options.skip names. sigma is summed in double.
///
/// The code: fields of 2 bits for the values of all tensors that are not sent whole, field i in the bits
/// [2 i, 2 i + 2) of a little-endian stream of bytes, 0 for zero, 1 for plus, 2 for minus; then s as T for
/// each of these tensors; then the values of tensors that are sent whole, as T.
///
/// Wen, Xu, Yan, Wu, Wang, Chen and Li, TernGrad (NIPS 2017). options.shared_scaler has no effect here.
///
/// A tensor with a value that is not finite decodes to NaN. A name in options.skip that no tensor has is
/// ignored here; new_compressor refuses such names.
template <class T>
class tern_codec {
 public:
  using value_type = T;
  using options_type = tern_grad_options;
  static constexpr bool has_fixed_length = true;

  /// `tensors`: places and sizes of the coded tensors. Throws value_error unless clip is finite and not
  /// negative.
  explicit tern_codec(const std::vector<coded_tensor>& tensors, const tern_grad_options& options = {})
      : options_(options), codes_(tensors, options.clip, options.skip) {}

  /// Length of a code in bytes: ceil(N / 4) for the fields of N coded values, sizeof(T) per coded tensor, and
  /// sizeof(T) per value that is sent whole.
  std::size_t most_bytes() const {
    return whole_byte() + static_cast<std::size_t>(codes_.whole_size()) * sizeof(T);
  }

  /// Writes the code of D = gradients + memory to `code`, and D - C(D) to the memory (see gradient_codec).
  /// Equal arguments give equal codes. Returns most_bytes().
  std::size_t encode(context<device::cpu>& ctx, const code_place& place, std::span<const T> gradients,
                     std::span<T> memory, std::span<std::byte> code) {
    const T* const values = detail::values_to_code(ctx, gradients, memory);
    std::vector<T> scalers;
    for (const detail::tern_bounds<T>& bounds : codes_.bounds(ctx, values)) {
      scalers.push_back(bounds.clip < bounds.largest ? bounds.clip : bounds.largest);
    }
    codes_.encode(ctx, detail::code_streams(options_.seed, "tern_grad", place, codes_.coded()), scalers,
                  values, code.data());
    std::ranges::copy(std::as_bytes(std::span(scalers)), code.data() + codes_.code_bytes());
    codes_.for_each_whole([&](index_t position, index_t size, index_t first) {
      std::memcpy(code.data() + whole_byte(first), values + position,
                  static_cast<std::size_t>(size) * sizeof(T));
    });
    if (!memory.empty()) decode(ctx, code, decode_as::subtraction, memory);
    return most_bytes();
  }

  /// Stores, adds or subtracts the decoded values; see gradient_codec. Throws value_error, with `to`
  /// unchanged, unless the code has most_bytes() bytes, and for a field whose bits are 11.
  void decode(context<device::cpu>& ctx, std::span<const std::byte> code, decode_as as,
              std::span<T> to) const {
    detail::check_code_length("tern_codec", code.size(), most_bytes());
    if (detail::has_invalid_tern(code.first(codes_.code_bytes()))) {
      PUFFERFISH_THROW(value_error("tern_codec: a field 11 in a code"));
    }
    const auto ternary = PUFFERFISH_KERNEL(widest_isa(), detail::field_passes, ternary_fields);
    detail::decode_fields(
        ctx, codes_.chunks(), codes_.bits, code.data(),
        [&](std::uint8_t* fields, index_t count) { ternary(fields, count); },
        [&](const detail::tensor_part& part, const std::int8_t* levels) {
          const T scaler = detail::read_at<T>(code, codes_.code_bytes() + part.tensor * sizeof(T));
          detail::put_levels(as, levels, scaler, to.data() + codes_.position(part), part.size());
        });
    codes_.for_each_whole([&](index_t position, index_t size, index_t first) {
      for (index_t i = 0; i < size; ++i) {
        detail::put_decoded(as, detail::read_at<T>(code, whole_byte(first + i)),
                            to[static_cast<std::size_t>(position + i)]);
      }
    });
  }

  /// Text of the options on which codes depend. The class that sends the codes adds the route.
  std::string describe() const {
    tern_grad_options own = options_;
    own.shared_scaler = false;
    const std::string whole = pufferfish::describe(own);
    return whole.substr(0, whole.rfind(','));
  }

 private:
  // First byte of value number `value` of those that are sent whole.
  std::size_t whole_byte(index_t value = 0) const {
    return codes_.code_bytes() + (codes_.coded().size() + static_cast<std::size_t>(value)) * sizeof(T);
  }

  tern_grad_options options_;
  detail::tern_codes<T> codes_;
};

PUFFERFISH_NAMESPACE_END
