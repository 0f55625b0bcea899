// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `top_k_codec`: sends the values of largest magnitude and their indices. With error feedback the method is
/// top-k with memory.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/compress/codes/two_hop_codes.hpp>
#include <pufferfish/compress/sparse/entry_lists.hpp>
#include <pufferfish/compress/sparse/select_largest.hpp>
#include <pufferfish/core/number_text.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The set from which the largest values are selected: each tensor by itself, or all values together.
enum class top_k_scope { tensor, arena };

/// Options of top_k_codec.
struct top_k_options {
  double ratio = 0.01;  ///< share of the values that is sent; above 0, at most 1
  /// Whether half as many values are sent: float values and their indices then take `ratio` of the gradients'
  /// bytes.
  bool halved = false;
  top_k_scope scope = top_k_scope::tensor;  ///< arena: the compressor cannot work bucket by bucket
  code_memory memory = code_memory::error_feedback;
  code_route route = code_route::gather;  ///< gather, two_hop or sparse
};

namespace detail {

/// Text of the options on which codes depend, such as "top-k, ratio 0.01, per tensor".
inline std::string describe_codes(const top_k_options& options) {
  return message({"top-k, ratio ", shortest_number(options.ratio), options.halved ? " halved, " : ", ",
                  options.scope == top_k_scope::tensor ? "per tensor" : "over all tensors"});
}

}  // namespace detail

/// Text of all options for messages, such as "top-k, ratio 0.01, per tensor, error feedback", then
/// ", two hops" or ", sparse sum" for these routes.
inline std::string describe(const top_k_options& options) {
  std::string text = detail::message({detail::describe_codes(options), ", ", to_string(options.memory)});
  if (options.route != code_route::gather) text += std::string(", ") + to_string(options.route);
  return text;
}

/// Codes the values of largest magnitude of D = gradients + memory. For each tensor D of n values and
/// k = max(1, floor(ratio n)), with `halved` k = max(1, floor(ratio n / 2)):
///
///     C(D)_i = D_i for the k values of largest |D_i|, of equal ones those with the lower index; else 0
///
/// The code, at an address that is a multiple of four: for each tensor its k values, as T, then their k
/// indices, as 32-bit integers, ascending and local to the tensor. With scope `arena` all values together are
/// treated as one tensor. With error feedback the memory of sent entries becomes exactly zero. ||D - C(D)||^2
/// <= (1 - k / n) ||D||^2. Aji and Heafield, EMNLP 2017; Stich, Cordonnier and Jaggi, NeurIPS 2018; `halved`
/// is the reference of Vogels et al., NeurIPS 2019.
///
/// D = (3, -3, 2, 3) with k = 2 sends the indices 0 and 1, and the memory becomes (0, 0, 2, 3). NaN counts as
/// the largest magnitude, so that it is sent. A code of float has 8 bytes per entry: without `halved`, codes
/// are longer than the gradients at a ratio above 1/2. Selection is exact and takes linear time
/// (largest_selector).
///
/// \code
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, top_k_options{.ratio = 0.01});
/// \endcode
template <class T>
class top_k_codec {
 public:
  using value_type = T;
  using options_type = top_k_options;
  static constexpr bool has_fixed_length = true, has_entries = true;

  /// `tensors`: places and sizes of the coded tensors. Throws value_error unless 0 < ratio <= 1, and, naming
  /// the tensor, for a tensor of 2^31 values or more; with scope `arena` for all tensors together.
  explicit top_k_codec(std::vector<coded_tensor> tensors, const top_k_options& options = {})
      : options_(options),
        tensors_(selected_tensors(std::move(tensors), options)),
        lists_(counts_of(tensors_, options)),
        selector_("top_k", tensors_),
        chunks_(tensors_) {}

  /// Whether the code of a part of the arena is a part of the code of the whole: false for scope `arena`.
  static bool has_parts(const top_k_options& options) { return options.scope == top_k_scope::tensor; }

  /// Length of a code in bytes: sizeof(T) + 4 for each of the k entries of every tensor.
  std::size_t most_bytes() const { return static_cast<std::size_t>(lists_.size()) * entry_bytes; }

  /// Writes the code of D = gradients + memory to `code`, and D - C(D) to the memory (see gradient_codec).
  /// `place` is ignored: the code is deterministic. Returns most_bytes().
  std::size_t encode(context<device::cpu>& ctx, const code_place&, std::span<const T> gradients,
                     std::span<T> memory, std::span<std::byte> code) {
    if (memory.empty()) {
      selector_.select(ctx, lists_, gradients);
    } else {
      selector_.select_sums(ctx, lists_, gradients, memory);
    }
    const T* const values = selector_.values().data();
    const std::int32_t* const indices = selector_.indices().data();
    lists_.for_each(ctx, [&](std::size_t t, index_t begin, index_t end) {
      const auto count = static_cast<std::size_t>(end - begin);
      std::memcpy(code.data() + value_byte(t, begin), values + begin, count * sizeof(T));
      std::memcpy(code.data() + index_byte(t, begin), indices + begin, count * sizeof(std::int32_t));
      if (memory.empty()) return;
      T* const left = memory.data() + tensors_[t].offset;
      for (index_t i = begin; i < end; ++i) left[indices[i]] = T(0);
    });
    return most_bytes();
  }

  /// Stores, adds or subtracts the decoded values; see gradient_codec. Throws value_error, with `to`
  /// unchanged, unless the code has most_bytes() bytes, and, naming the tensor, for indices that are not
  /// ascending or not in the tensor. Takes time in proportion to the arena for decode_as::values, which
  /// writes zeros, and to the entries otherwise.
  void decode(context<device::cpu>& ctx, std::span<const std::byte> code, decode_as as,
              std::span<T> to) const {
    detail::check_code_length("top_k_codec", code.size(), most_bytes());
    check_indices(ctx, code);
    chunks_.for_each(
        ctx, [&](index_t begin, index_t end, std::span<const detail::tensor_part> parts, std::size_t) {
          if (as == decode_as::values) std::fill(to.begin() + begin, to.begin() + end, T(0));
          for (const detail::tensor_part& part : parts) put_part(code, as, part, to.data());
        });
  }

  /// Calls f(position in the arena, value) for each entry of `code`, a result of encode that is not checked.
  template <class F>
  void for_each_entry(std::span<const std::byte> code, F&& f) const {
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      std::size_t byte = value_byte(t, lists_.first(t));
      for (const std::int32_t index : indices_in(code, t)) {
        f(tensors_[t].offset + index, detail::read_at<T>(code, byte));
        byte += sizeof(T);
      }
    }
  }

  /// Describes only the options on which codes depend. The class that sends the codes (gathered_codes, ...)
  /// appends the kind of memory to this text.
  std::string describe() const { return detail::describe_codes(options_); }

 private:
  // Bytes of a value and its index
  static constexpr std::size_t entry_bytes = sizeof(T) + sizeof(std::int32_t);

  // The tensors in which entries are selected: those given or, with scope `arena`, a single one for all.
  static std::vector<coded_tensor> selected_tensors(std::vector<coded_tensor> tensors,
                                                    const top_k_options& options) {
    detail::check_entry_ratio("top_k", options.ratio);
    const index_t size = coded_size(tensors);
    if (options.scope == top_k_scope::tensor || size == 0) return tensors;
    return {{"the arena of all tensors", logical_layout::vector(size), 0, size}};
  }
  // The number k of entries of each tensor.
  static std::vector<index_t> counts_of(const std::vector<coded_tensor>& tensors,
                                        const top_k_options& options) {
    std::vector<index_t> counts;
    for (const coded_tensor& tensor : tensors) {
      counts.push_back(
          detail::entries_of_share(options.halved ? 0.5 * options.ratio : options.ratio, tensor.size));
    }
    return counts;
  }

  // First byte of an entry's value in a code. Entries are numbered as in lists_.
  std::size_t value_byte(std::size_t tensor, index_t entry) const {
    const auto first = static_cast<std::size_t>(lists_.first(tensor));
    return first * entry_bytes + (static_cast<std::size_t>(entry) - first) * sizeof(T);
  }
  // First byte of an entry's index in a code.
  std::size_t index_byte(std::size_t tensor, index_t entry) const {
    const auto first = static_cast<std::size_t>(lists_.first(tensor));
    const auto values = static_cast<std::size_t>(lists_.count(tensor)) * sizeof(T);
    return first * entry_bytes + values + (static_cast<std::size_t>(entry) - first) * sizeof(std::int32_t);
  }
  // The indices of a tensor in a code.
  std::span<const std::int32_t> indices_in(std::span<const std::byte> code, std::size_t tensor) const {
    return {reinterpret_cast<const std::int32_t*>(code.data() + index_byte(tensor, lists_.first(tensor))),
            static_cast<std::size_t>(lists_.count(tensor))};
  }

  // Throws value_error unless the indices of every tensor ascend from at least 0 to below its size.
  void check_indices(context<device::cpu>& ctx, std::span<const std::byte> code) const {
    lists_.for_each(ctx, [&](std::size_t t, index_t begin, index_t end) {
      const std::int32_t* const index = indices_in(code, t).data();
      const index_t first = begin - lists_.first(t), last = end - lists_.first(t);
      index_t wrong = first > 0 ? 0 : index[0] < 0 ? 1 : 0;
      for (index_t i = std::max<index_t>(1, first); i < last; ++i) wrong += index[i - 1] < index[i] ? 0 : 1;
      if (wrong == 0 && index[last - 1] < tensors_[t].size) return;
      detail::throw_error<value_error>({"top_k_codec: indices of ", tensors_[t].name,
                                        " in a code are not ascending numbers from 0 to ",
                                        tensors_[t].size - 1});
    });
  }

  // Stores, adds or subtracts the entries whose positions are in the part, found by binary search.
  void put_part(std::span<const std::byte> code, decode_as as, const detail::tensor_part& part, T* to) const {
    const std::size_t t = part.tensor;
    const std::span<const std::int32_t> all = indices_in(code, t);
    const index_t offset = tensors_[t].offset;
    const auto begin = std::lower_bound(all.begin(), all.end(), part.begin - offset);
    const auto end = std::lower_bound(begin, all.end(), part.end - offset);
    std::size_t byte = value_byte(t, lists_.first(t) + (begin - all.begin()));
    for (auto index = begin; index != end; ++index, byte += sizeof(T)) {
      detail::put_decoded(as, detail::read_at<T>(code, byte), to[offset + *index]);
    }
  }

  top_k_options options_;
  std::vector<coded_tensor> tensors_;  // with scope `arena`: one for all tensors
  detail::entry_lists lists_;
  largest_selector<T> selector_;
  detail::tensor_chunks chunks_;
};

/// Makes a top-k compressor for the gradients of `store`: gathered_codes, two_hop_codes or summed_entries of
/// top_k_codec, depending on the route. Throws the errors of the codec's constructor; for the route `sparse`
/// also value_error for an arena of 2^31 elements or more.
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const top_k_options& options) {
  return make_coded_compressor<top_k_codec<T>>(store, options, options.memory, options.route);
}

PUFFERFISH_NAMESPACE_END
