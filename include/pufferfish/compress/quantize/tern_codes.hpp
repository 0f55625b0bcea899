// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: codes values as signs and zeros in 2-bit fields, for both forms of TernGrad.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/compress/codes/code_route.hpp>
#include <pufferfish/compress/quantize/stochastic_rounding.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Whether `name` is the name of a parameter, or of a layer that contains it: "fc" names "fc" and
/// "fc.weight".
inline bool names_parameter(std::string_view name, std::string_view parameter) {
  return parameter.substr(0, name.size()) == name &&
         (parameter.size() == name.size() || parameter[name.size()] == '.');
}

/// Returns `clip`. Throws value_error unless it is finite and not negative.
inline double checked_tern_clip(double clip) {
  if (!(clip >= 0.0 && std::isfinite(clip))) {
    throw_error<value_error>({"tern_grad: clip ", clip, " is not a number of deviations, 0 or more"});
  }
  return clip;
}

/// Throws value_error if one of `names` is neither the name of a tensor nor that of a layer.
inline void check_tern_skips(const std::vector<std::string>& names,
                             const std::vector<coded_tensor>& tensors) {
  for (const std::string& name : names) {
    const bool known = std::any_of(tensors.begin(), tensors.end(), [&](const coded_tensor& tensor) {
      return names_parameter(name, tensor.name);
    });
    if (!known) throw_error<value_error>({"tern_grad: skip names ", name, ", which is no parameter"});
  }
}

/// Throws value_error, naming `user`, for the route `sparse`: the codes are not lists of entries.
inline void check_tern_route(const char* user, code_route route) {
  if (route != code_route::sparse) return;
  throw_error<value_error>({user, ": TernGrad's codes are not lists of entries, so their route cannot be \"",
                            to_string(route), "\""});
}

/// Whether a stream of 2-bit fields has a field 11.
inline bool has_invalid_tern(std::span<const std::byte> code) {
  std::uint64_t both = 0;
  std::size_t i = 0;
  for (; i + 8 <= code.size(); i += 8) {
    const auto word = read_at<std::uint64_t>(code, i);
    both |= word & word >> 1;
  }
  for (; i < code.size(); ++i) both |= std::to_integer<unsigned>(code[i] & code[i] >> 1);
  return (both & 0x5555555555555555U) != 0;
}

/// Two upper bounds of the scaler of a tensor: clip times the standard deviation of its values, and their
/// largest magnitude. The latter is NaN if a value is not finite.
template <class T>
struct tern_bounds {
  T clip, largest;
};

/// Codes some tensors as signs and zeros, without gaps; the other tensors are sent whole. The coded tensors
/// have offsets of their own, counted without the whole ones; position() maps them back.
template <class T>
class tern_codes {
 public:
  static constexpr int bits = 2;

  /// `whole`: names of the parameters and layers that are sent whole. Throws value_error unless clip is
  /// finite and not negative.
  tern_codes(const std::vector<coded_tensor>& tensors, double clip, const std::vector<std::string>& whole)
      : clip_(checked_tern_clip(clip)), chunks_({}) {
    index_t offset = 0;
    for (const coded_tensor& tensor : tensors) {
      if (std::any_of(whole.begin(), whole.end(),
                      [&](const std::string& name) { return names_parameter(name, tensor.name); })) {
        whole_.push_back(tensor);
        whole_size_ += tensor.size;
        continue;
      }
      moves_.push_back(tensor.offset - offset);
      coded_.push_back(tensor);
      coded_.back().offset = offset;
      offset += tensor.size;
    }
    chunks_ = tensor_chunks(coded_);
  }

  /// The coded values, cut into chunks.
  const tensor_chunks& chunks() const { return chunks_; }
  /// The coded tensors, with offsets among the coded values.
  const std::vector<coded_tensor>& coded() const { return coded_; }
  /// Number of values that are sent whole.
  index_t whole_size() const { return whole_size_; }
  /// Number of bytes of the fields of all coded values.
  std::size_t code_bytes() const { return field_bytes(chunks_.size(), bits); }
  /// Position of a part of a coded tensor among all values.
  index_t position(const tensor_part& part) const { return part.begin + moves_[part.tensor]; }

  /// Computes the bounds of every coded tensor. If clip is 0 or all values of the tensor are equal, both
  /// bounds are the largest magnitude.
  std::vector<tern_bounds<T>> bounds(context<device::cpu>& ctx, const T* values) const {
    const auto range_of = PUFFERFISH_KERNEL(widest_isa(), rounding_passes, range_of<T>);
    const auto moments_of = PUFFERFISH_KERNEL(widest_isa(), rounding_passes, moments_of<T>);
    std::vector<value_moments> moments(chunks_.parts().size());
    std::vector<T> largest(moments.size());
    chunks_.for_each(ctx, [&](index_t, index_t, std::span<const tensor_part> parts, std::size_t i) {
      for (const tensor_part& part : parts) {
        const T* const from = values + position(part);
        // If the origin is a value of the tensor, equal values have a deviation of exactly zero.
        const T origin = values[coded_[part.tensor].offset + moves_[part.tensor]];
        if (clip_ > 0.0) moments[i] = moments_of(from, origin, part.size());
        largest[i++] = largest_magnitude(range_of(from, part.size()));
      }
    });
    std::vector<value_moments> sums(coded_.size());
    std::vector<tern_bounds<T>> result(coded_.size(), {T(0), T(0)});
    for (std::size_t i = 0; i < moments.size(); ++i) {
      const std::size_t t = chunks_.parts()[i].tensor;
      sums[t].sum += moments[i].sum;
      sums[t].squares += moments[i].squares;
      T& most = result[t].largest;
      most = largest[i] <= most || most != most ? most : largest[i];
    }
    for (std::size_t t = 0; t < result.size(); ++t) result[t].clip = clip_of(t, sums[t], result[t].largest);
    return result;
  }

  /// Writes code_bytes() bytes: field 1 for a plus, 2 for a minus, 0 for zero. streams and scalers: one per
  /// coded tensor. `values`: all values, those of tensors sent whole included. A tensor with scaler 0 is
  /// coded as zeros.
  void encode(context<device::cpu>& ctx, const std::vector<random_stream>& streams,
              const std::vector<T>& scalers, const T* values, std::byte* code) const {
    const auto round = PUFFERFISH_KERNEL(widest_isa(), rounding_passes, round_ternary<T>);
    encode_fields(
        ctx, chunks_, coded_, streams, bits, code, [](index_t, index_t) {},
        [&](const tensor_part& part, bool whole, const std::uint32_t* words, std::uint8_t* fields) {
          const T scaler = scalers[part.tensor];
          if (scaler == T(0)) return no_fields(fields, part.size());
          return round(whole, values + position(part), words, {T(0x1p32), scaler}, scaler, fields,
                       part.size());
        });
  }

  /// Calls f(position, size, first) for the tensors that are sent whole: their positions among all values and
  /// among those sent whole.
  template <class F>
  void for_each_whole(F&& f) const {
    index_t first = 0;
    for (const coded_tensor& tensor : whole_) {
      f(tensor.offset, tensor.size, first);
      first += tensor.size;
    }
  }

 private:
  // Returns clip times the standard deviation, or `largest` if the deviation is zero or not finite.
  T clip_of(std::size_t tensor, const value_moments& sums, T largest) const {
    const auto size = static_cast<double>(coded_[tensor].size);
    const double mean = sums.sum / size, variance = sums.squares / size - mean * mean;
    if (!(variance > 0.0 && std::isfinite(variance))) return largest;
    return static_cast<T>(
        std::min(clip_ * std::sqrt(variance), static_cast<double>(std::numeric_limits<T>::max())));
  }

  double clip_;
  std::vector<coded_tensor> coded_;  // coded tensors, with offsets without gaps
  std::vector<index_t> moves_;       // position among all values minus offset, for each coded tensor
  tensor_chunks chunks_;             // chunks of coded_
  std::vector<coded_tensor> whole_;
  index_t whole_size_ = 0;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
