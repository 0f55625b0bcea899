// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `entry_atomo_codec`: randomly drawn entries of a gradient, as an unbiased code.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <pufferfish/compress/atomo/atomo_passes.hpp>
#include <pufferfish/compress/atomo/atomo_probabilities.hpp>
#include <pufferfish/compress/atomo/entry_atomo_options.hpp>
#include <pufferfish/compress/codes/tensor_chunks.hpp>
#include <pufferfish/compress/codes/two_hop_codes.hpp>
#include <pufferfish/compress/sparse/entry_lists.hpp>
#include <pufferfish/ops/elementwise/dropout.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Codec that keeps randomly drawn entries of each tensor. Entry D_i of a tensor is kept with probability
/// p_i, independently of the others, and C(D)_i = D_i / p_i, so that the mean of C(D) is D. The other entries
/// of C(D) are 0. With s = max(1, ratio n) for n elements, p = atomo_probabilities(D, s), which is
///
///     p_i = min(1, |D_i| / M),  C(D)_i = D_i where |D_i| > M, else M sign(D_i),  with sum of p_i = s
///
/// For an expected number of s entries the variance, sum of D_i^2 (1 / p_i - 1), is the least. Probabilities
/// are multiples of 2^-32, rounded up. Computing M takes one pass over the values per round of
/// detail::atomo_saturation, a few rounds in all. A tensor that is not finite is sent unchanged.
///
/// The code has for each tensor a uint32 with the number of kept entries, their values as T, then their
/// positions in the tensor as int32, ascending. Source: Wang, Sievert, Liu, Charles, Papailiopoulos and
/// Wright, ATOMO (NeurIPS 2018), with entries as atoms. s = ||D||_1 / max |D_i| gives TernGrad's
/// probabilities, s = ||D||_1 / ||D||_2 those of QSGD with one level.
///
/// \code
/// const entry_atomo_options options{.ratio = 0.01};
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, options);
/// \endcode
template <class T>
class entry_atomo_codec {
 public:
  using value_type = T;
  using options_type = entry_atomo_options;
  static constexpr bool has_fixed_length = false, has_entries = true;

  /// `tensors`: places and sizes of the coded tensors. Throws value_error unless 0 < ratio <= 1 and, naming
  /// the tensor, for a tensor of 2^31 elements or more.
  explicit entry_atomo_codec(std::vector<coded_tensor> tensors, const entry_atomo_options& options = {})
      : tensors_(std::move(tensors)), options_(options), chunks_(tensors_) {
    detail::check_entry_ratio("ATOMO", options.ratio);
    for (const auto& one : tensors_) detail::check_entry_indices("ATOMO", one.name, one.size);
    for (const detail::tensor_part& part : chunks_.parts()) {
      words_.push_back(bits_.size());
      bits_.resize(bits_.size() + count((part.size() + detail::signs_a_word - 1) / detail::signs_a_word));
    }
    tails_.resize(3 * words_.size());
    kept_.resize(words_.size());
  }

  /// Largest length of a code, which keeps all entries: 4 bytes per tensor and sizeof(T) + 4 bytes per
  /// element.
  std::size_t most_bytes() const {
    return tensors_.size() * sizeof(std::uint32_t) + count(chunks_.size()) * entry_bytes;
  }

  /// Writes the code of D = gradients + memory to `code`, and D - C(D) to the memory (see gradient_codec).
  /// Returns the number of bytes written, which differs from step to step and between ranks.
  std::size_t encode(context<device::cpu>& ctx, const code_place& place, std::span<const T> gradients,
                     std::span<T> memory, std::span<std::byte> code) {
    const T* const values = detail::values_to_code(ctx, gradients, memory);
    const std::vector<double> levels = saturations(ctx, values);
    draw(ctx, place, values, levels);
    // The number of kept entries before each part in its tensor, and of each tensor.
    std::vector<std::size_t> before(kept_.size()), totals(tensors_.size(), 0), places;
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      before[i] = totals[chunks_.parts()[i].tensor];
      totals[chunks_.parts()[i].tensor] += kept_[i];
    }
    std::size_t length = 0;
    for (const std::size_t total : totals) {
      places.push_back(length);
      detail::write_at(code, length, static_cast<std::uint32_t>(total));
      length += sizeof(std::uint32_t) + total * entry_bytes;
    }
    for_each_part(ctx, [&](const detail::tensor_part& part, std::size_t i) {
      const std::size_t first = places[part.tensor] + sizeof(std::uint32_t);
      const std::size_t indices = first + totals[part.tensor] * sizeof(T);
      const double level = levels[part.tensor];
      std::size_t entry = before[i];
      for (index_t base = part.begin, word = 0; base < part.end; base += detail::signs_a_word, ++word) {
        for (std::uint32_t left = bits_[words_[i] + count(word)]; left != 0; left &= left - 1, ++entry) {
          const index_t at = base + __builtin_ctz(left);
          const bool saturates = !(std::abs(static_cast<double>(values[at])) <= level);
          const T sent = saturates ? values[at] : std::copysign(static_cast<T>(level), values[at]);
          detail::write_at(code, first + entry * sizeof(T), sent);
          const auto index = static_cast<std::int32_t>(at - tensors_[part.tensor].offset);
          detail::write_at(code, indices + entry * sizeof(std::int32_t), index);
          if (!memory.empty()) memory[count(at)] -= sent;
        }
      }
    });
    return length;
  }

  /// Stores, adds or subtracts the decoded values; see gradient_codec. Throws value_error, with `to`
  /// unchanged, for a length that does not follow from the numbers of entries and, naming the tensor, for
  /// more entries than it has and for positions that are not ascending or not in the tensor.
  void decode(context<device::cpu>& ctx, std::span<const std::byte> code, decode_as as,
              std::span<T> to) const {
    std::vector<std::size_t> places;  // first bytes of the lists of values
    std::vector<index_t> counts;
    std::size_t next = 0;
    for (const coded_tensor& tensor : tensors_) {
      places.push_back(next += sizeof(std::uint32_t));
      if (next > code.size()) detail::check_code_length("entry_atomo_codec", code.size(), next);
      counts.push_back(index_t{detail::read_at<std::uint32_t>(code, places.back() - sizeof(std::uint32_t))});
      if (counts.back() > tensor.size) {
        detail::throw_error<value_error>({"entry_atomo_codec: a code with ", counts.back(), " entries of ",
                                          tensor.name, ", which has ", tensor.size});
      }
      next += count(counts.back()) * entry_bytes;
    }
    detail::check_code_length("entry_atomo_codec", code.size(), next);
    const detail::entry_lists lists(counts);
    const auto position_of = [&](std::size_t t, index_t i) {
      const std::size_t positions = places[t] + count(counts[t]) * sizeof(T);
      return index_t{detail::read_at<std::int32_t>(code, positions + count(i) * sizeof(std::int32_t))};
    };
    lists.for_each(ctx, [&](std::size_t t, index_t begin, index_t end) {
      const index_t first = begin - lists.first(t), last = end - lists.first(t);
      index_t before = first == 0 ? -1 : position_of(t, first - 1);
      for (index_t i = first; i < last; ++i) {
        const index_t position = position_of(t, i);
        if (position <= before || position >= tensors_[t].size) {
          detail::throw_error<value_error>({"entry_atomo_codec: position ", position, " after ", before,
                                            " in ", tensors_[t].name, ", which has ", tensors_[t].size});
        }
        before = position;
      }
    });
    if (as == decode_as::values) ops::fill(ctx, to, T(0));
    lists.for_each(ctx, [&](std::size_t t, index_t begin, index_t end) {
      for (index_t i = begin - lists.first(t); i < end - lists.first(t); ++i) {
        detail::put_decoded(as, detail::read_at<T>(code, places[t] + count(i) * sizeof(T)),
                            to[count(tensors_[t].offset + position_of(t, i))]);
      }
    });
  }

  /// Calls f(position, value) for each entry of a code, by ascending position over all tensors (see
  /// summed_entries). `code` must be the result of encode, which is not checked.
  template <class F>
  void for_each_entry(std::span<const std::byte> code, F&& f) const {
    std::size_t next = 0;
    for (const coded_tensor& tensor : tensors_) {
      const std::size_t size = detail::read_at<std::uint32_t>(code, next);
      const std::size_t values = next + sizeof(std::uint32_t), indices = values + size * sizeof(T);
      for (std::size_t i = 0; i < size; ++i) {
        f(tensor.offset + detail::read_at<std::int32_t>(code, indices + i * sizeof(std::int32_t)),
          detail::read_at<T>(code, values + i * sizeof(T)));
      }
      next = values + size * entry_bytes;
    }
  }

  /// Text of the options on which codes depend.
  std::string describe() const {
    return detail::message(
        {"ATOMO, entries, ratio ", detail::exact_number(options_.ratio), ", seed ", options_.seed});
  }

 private:
  static constexpr std::size_t entry_bytes = sizeof(T) + sizeof(std::int32_t);
  static std::size_t count(index_t i) { return static_cast<std::size_t>(i); }

  // Sums over a tensor: its tail, and its number of nonzero entries.
  struct sums {
    detail::atomo_tail tail;
    double atoms = 0;
  };

  // Calls f(part, number of the part) for all parts of all tensors, on all threads.
  template <class F>
  void for_each_part(context<device::cpu>& ctx, const F& f) const {
    chunks_.for_each(ctx,
                     [&](index_t, index_t, std::span<const detail::tensor_part> parts, std::size_t first) {
                       for (const detail::tensor_part& part : parts) f(part, first++);
                     });
  }

  // The saturation M of each tensor.
  std::vector<double> saturations(context<device::cpu>& ctx, const T* values) {
    std::vector<double> levels(tensors_.size(), std::numeric_limits<double>::infinity());
    std::vector<detail::atomo_saturation> all;
    std::vector<sums> tails = tails_up_to(ctx, values, levels);
    for (std::size_t t = 0; t < tails.size(); ++t) {
      const double kept = std::max(1.0, options_.ratio * static_cast<double>(tensors_[t].size));
      all.emplace_back(kept, tails[t].tail.sum, tails[t].atoms);
    }
    while (!std::all_of(all.begin(), all.end(), [](const auto& one) { return one.found(); })) {
      for (std::size_t t = 0; t < all.size(); ++t) levels[t] = all[t].found() ? -1.0 : all[t].level();
      tails = tails_up_to(ctx, values, levels);
      for (std::size_t t = 0; t < all.size(); ++t) {
        if (!all[t].found()) all[t].refine(tails[t].tail);
      }
    }
    for (std::size_t t = 0; t < all.size(); ++t) levels[t] = all[t].level();
    return levels;
  }

  // Sums of each tensor for its level. Tensors with a negative level are skipped.
  std::vector<sums> tails_up_to(context<device::cpu>& ctx, const T* values,
                                const std::vector<double>& levels) {
    const auto tail = PUFFERFISH_KERNEL(widest_isa(), detail::atomo_passes, magnitude_tail<T>);
    for_each_part(ctx, [&](const detail::tensor_part& part, std::size_t i) {
      const double level = levels[part.tensor];
      if (level >= 0.0) tail(values + part.begin, part.size(), level, &tails_[3 * i]);
    });
    std::vector<sums> result(tensors_.size());
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      sums& one = result[chunks_.parts()[i].tensor];
      one.tail.sum += tails_[3 * i];
      one.tail.above += tails_[3 * i + 1];
      one.atoms += tails_[3 * i + 2];
    }
    return result;
  }

  // Sets bits_ and kept_. Element i of a tensor uses word i of the tensor's random stream.
  void draw(context<device::cpu>& ctx, const code_place& place, const T* values,
            const std::vector<double>& levels) {
    const auto words_of = PUFFERFISH_KERNEL(widest_isa(), ops::detail::dropouts, random_words);
    const auto pick = PUFFERFISH_KERNEL(widest_isa(), detail::atomo_passes, draw_entries<T>);
    for_each_part(ctx, [&](const detail::tensor_part& part, std::size_t i) {
      constexpr index_t piece = 1024;
      const coded_tensor& tensor = tensors_[part.tensor];
      const random_stream random = detail::code_randoms(options_.seed, "entry ATOMO", place, tensor);
      std::uint32_t words[piece];
      index_t kept = 0;
      for (index_t at = 0; at < part.size(); at += piece) {
        const index_t here = std::min(piece, part.size() - at), first = part.begin + at;
        words_of(random.seed(), random.stream(),
                 static_cast<std::uint64_t>(tensor.first + first - tensor.offset), here, words);
        kept += pick(values + first, words, levels[part.tensor],
                     &bits_[words_[i] + count(at / detail::signs_a_word)], here);
      }
      kept_[i] = count(kept);
    });
  }

  std::vector<coded_tensor> tensors_;
  entry_atomo_options options_;
  detail::tensor_chunks chunks_;
  // Of each part: its first word of bits_, its number of kept entries, and the sums of tails_up_to.
  std::vector<std::size_t> words_, kept_;
  std::vector<double> tails_;
  std::vector<std::uint32_t> bits_;  // one bit per value: whether it is kept
};

/// ATOMO with entries as atoms for the gradients of a store: gathered_codes, or summed_entries for the route
/// `sparse`. Throws the errors of the codec's constructor, value_error for the route `two_hop`, and for
/// `sparse` also value_error for an arena of 2^31 elements or more.
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const entry_atomo_options& options) {
  return make_coded_compressor<entry_atomo_codec<T>>(store, options, options.memory, options.route);
}

PUFFERFISH_NAMESPACE_END
