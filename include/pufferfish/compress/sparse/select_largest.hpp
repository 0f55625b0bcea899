// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `select_largest`: selects the entries of largest magnitude of a vector, exactly, in linear time.
/// `largest_selector`: selects them in each of many tensors and reuses its workspace.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <type_traits>
#include <vector>

#include <pufferfish/compress/codes/tensor_chunks.hpp>
#include <pufferfish/compress/sparse/entry_lists.hpp>
#include <pufferfish/compress/sparse/kth_largest.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace reference {

/// Returns the indices, ascending, of the k values of largest magnitude, 0 <= k <= values.size(); of equal
/// magnitudes the lower index is taken. No value may be NaN. Reference implementation of
/// pufferfish::select_largest by a stable sort.
template <class T>
std::vector<std::int32_t> select_largest(std::span<const T> values, index_t k) {
  std::vector<std::int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return std::abs(values[static_cast<std::size_t>(a)]) > std::abs(values[static_cast<std::size_t>(b)]);
  });
  order.resize(static_cast<std::size_t>(k));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace reference

namespace detail {

/// An entry that may be among the largest: its value and its index in the tensor.
template <class T>
struct large_entry {
  T value;
  std::int32_t index;
  /// The key by which entries are compared.
  bits_like<T> key() const { return magnitude_key(value); }
};

/// find_at_least(x, count, least, first, to) of select_largest.inc writes the entries of x with a key of at
/// least `least` to `to`, in order, which has room for `count`; entry i gets the index first + i. Returns
/// their number.
#define PUFFERFISH_KERNELS largest_passes
#define PUFFERFISH_KERNEL_FILE <pufferfish/compress/sparse/select_largest.inc>
#include <pufferfish/linalg/for_each_target.inc>

}  // namespace detail

/// Selects, in each of several tensors, the k_t entries of largest magnitude |x|; of equal magnitudes the
/// lower index is taken, +0 = -0, and NaN counts as largest. The result is that of a stable sort
/// (reference::select_largest).
///
/// A sample of each large tensor serves to estimate a bound that slightly more than k entries should reach.
/// One pass over the values keeps the entries that reach the bound, and radix histograms of these give the
/// k-th largest. If fewer than k reach the bound, a second pass keeps all entries other than zero, and if
/// these are fewer than k, a third one adds zeros. Time is linear in the number of values for all inputs.
/// Memory is proportional to the entries that are kept.
///
/// \code
/// std::vector<std::int32_t> indices;
/// select_largest<float>(ctx, values, 100, indices);  // the 100 entries of largest magnitude
/// \endcode
template <class T>
class largest_selector {
 public:
  /// Throws value_error, naming `user` and the tensor, if a tensor has 2^31 elements or more.
  largest_selector(const char* user, const std::vector<coded_tensor>& tensors)
      : tensors_(checked(user, tensors)), chunks_(tensors_), found_(chunks_.parts().size()) {
    std::size_t part = 0;
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      first_parts_.push_back(part);
      while (part < found_.size() && chunks_.parts()[part].tensor == t) ++part;
    }
    first_parts_.push_back(part);
  }

  /// Selects lists.count(t) <= n_t entries of each tensor t. `values` has the length of all tensors together
  /// and is not changed. There must be one list for each tensor.
  void select(context<device::cpu>& ctx, const detail::entry_lists& lists, std::span<const T> values) {
    select(ctx, lists, nullptr, nullptr, values.data());
  }
  /// Computes values += added and selects among the sums, in a single pass, with the arguments and the result
  /// of `select`. The spans have the length of all tensors together and must not overlap.
  void select_sums(context<device::cpu>& ctx, const detail::entry_lists& lists, std::span<const T> added,
                   std::span<T> values) {
    select(ctx, lists, added.data(), values.data(), values.data());
  }

  /// The indices of the last selection, list after list as in its `lists`: local to each tensor, ascending.
  /// The span is valid until the next selection.
  std::span<const std::int32_t> indices() const { return indices_; }
  /// The values that belong to indices(). The span is valid until the next selection.
  std::span<const T> values() const { return selected_; }

 private:
  using word = detail::bits_like<T>;
  using entries = std::vector<detail::large_entry<T>>;

  // Returns the tensors. Throws value_error, naming `user` and the tensor, for a tensor of 2^31 elements or
  // more.
  static const std::vector<coded_tensor>& checked(const char* user,
                                                  const std::vector<coded_tensor>& tensors) {
    for (const coded_tensor& tensor : tensors) {
      detail::check_entry_indices(user, tensor.name, tensor.size);
    }
    return tensors;
  }

  // `sums` is nullptr, or equal to `values` to compute values += added.
  void select(context<device::cpu>& ctx, const detail::entry_lists& lists, const T* added, T* sums,
              const T* values) {
    PUFFERFISH_ASSERT(lists.tensors() == tensors_.size(), "largest_selector: one list for each tensor");
    selected_.resize(static_cast<std::size_t>(lists.size()));
    indices_.resize(selected_.size());
    bounds_.assign(tensors_.size(), 0);
    const auto count = static_cast<index_t>(tensors_.size());
    ctx.parallel_for(count, [&](index_t task, int) {
      const auto t = static_cast<std::size_t>(task);
      bounds_[t] = guessed_bound(tensors_[t], lists.count(t), added, values);
    });
    for (std::size_t part = 0; part < found_.size(); ++part) found_[part].clear();
    ctx.parallel_for(static_cast<index_t>(found_.size()),
                     [&](index_t task, int) { find(static_cast<std::size_t>(task), added, sums, values); });
    ctx.parallel_for(count, [&](index_t task, int) {
      const auto t = static_cast<std::size_t>(task);
      settle(t, lists.count(t), values, lists.first(t));
    });
  }

  // Estimates a key that slightly more than k entries most likely reach. The sample has one entry of each of
  // `count` equal stretches of the tensor. About `expected` of the k largest are in the sample; the key
  // returned has a rank four standard deviations above. It is at least 1, so that zeros are not kept.
  static word guessed_bound(const coded_tensor& tensor, index_t k, const T* added, const T* values) {
    constexpr index_t most = 4096, share = 64, least_size = 4096;
    if (k == 0) return ~word{0} >> 1;
    if (tensor.size < least_size) return 1;
    const index_t count = std::min(most, tensor.size / share), stretch = tensor.size / count;
    const double expected =
        static_cast<double>(count) * static_cast<double>(k) / static_cast<double>(tensor.size);
    auto rank = static_cast<index_t>(expected + 4.0 * std::sqrt(expected) + 4.0);
    if (rank >= count) return 1;
    std::vector<word> keys;
    for (index_t i = 0; i < count; ++i) {
      const auto within = substream(0, static_cast<std::uint64_t>(i)) % static_cast<std::uint64_t>(stretch);
      const index_t at = tensor.offset + i * stretch + static_cast<index_t>(within);
      keys.push_back(detail::magnitude_key(added == nullptr ? values[at] : values[at] + added[at]));
    }
    return std::max<word>(1, detail::kth_largest(keys, rank));
  }

  // Appends the entries of a part that reach the bound of its tensor to the part's list. With `sums`, first
  // adds `added` to the part's values. find_again replaces the list by that of another bound.
  void find(std::size_t part, const T* added, T* sums, const T* values) {
    constexpr index_t block = 2048;
    const detail::tensor_part& range = chunks_.parts()[part];
    const word bound = bounds_[range.tensor];
    const auto add = PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, add<T>);
    const auto filter = PUFFERFISH_KERNEL(widest_isa(), detail::largest_passes, find_at_least<T>);
    detail::large_entry<T> found[block];
    for (index_t begin = range.begin; begin < range.end; begin += block) {
      const index_t size = std::min(block, range.end - begin);
      if (sums != nullptr) add(added + begin, sums + begin, size);
      const auto first = static_cast<std::int32_t>(begin - tensors_[range.tensor].offset);
      const index_t count = filter(values + begin, size, bound, first, found);
      found_[part].insert(found_[part].end(), found, found + count);
    }
  }
  void find_again(std::size_t part, word bound, const T* values) {
    bounds_[chunks_.parts()[part].tensor] = bound;
    found_[part].clear();
    find(part, nullptr, nullptr, values);
  }

  // Calls f(entry) for all entries that were kept of a tensor, in order.
  template <class F>
  void for_found(std::size_t tensor, F&& f) const {
    for (std::size_t part = first_parts_[tensor]; part < first_parts_[tensor + 1]; ++part) {
      for (const detail::large_entry<T>& entry : found_[part]) f(entry);
    }
  }
  // Number of entries kept in parts [begin_part, end_part).
  index_t found_in(std::size_t begin_part, std::size_t end_part) const {
    std::size_t count = 0;
    for (std::size_t part = begin_part; part < end_part; ++part) count += found_[part].size();
    return static_cast<index_t>(count);
  }

  // Writes the list of a tensor: k entries from position `to` on.
  void settle(std::size_t tensor, index_t k, const T* values, index_t to) {
    if (k == 0) return;
    PUFFERFISH_ASSERT(k <= tensors_[tensor].size, "largest_selector: more entries than the tensor has");
    const std::size_t begin = first_parts_[tensor], end = first_parts_[tensor + 1];
    if (bounds_[tensor] > 1 && found_in(begin, end) < k) {
      for (std::size_t part = begin; part < end; ++part) find_again(part, 1, values);
    }
    // The k-th largest key, and the number of entries with this key in the list. With fewer than k entries
    // other than zero the key is 0, and zeros are needed.
    word kth = 0;
    index_t ties = k - found_in(begin, end), missing = ties;
    if (missing <= 0) kth = kth_key(tensor, ties = k);
    for (std::size_t part = begin; missing > 0; ++part) {
      const index_t before = found_in(part, part + 1);
      find_again(part, 0, values);
      missing -= found_in(part, part + 1) - before;
    }
    for_found(tensor, [&](const detail::large_entry<T>& entry) {
      if (entry.key() < kth || (entry.key() == kth && ties-- <= 0)) return;
      selected_[static_cast<std::size_t>(to)] = entry.value;
      indices_[static_cast<std::size_t>(to++)] = entry.index;
    });
  }

  // Finds the k-th largest key. On return k is the number of entries with this key among the k largest.
  word kth_key(std::size_t tensor, index_t& k) const {
    detail::digit_histogram<word> counts(detail::digit_histogram<word>::highest_shift);
    for_found(tensor, [&](const detail::large_entry<T>& entry) { counts.add(entry.key()); });
    const word digit = counts.digit_of(k);
    std::vector<word> keys;
    keys.reserve(static_cast<std::size_t>(counts.count(digit)));
    for_found(tensor, [&](const detail::large_entry<T>& entry) {
      if (counts.digit(entry.key()) == digit) keys.push_back(entry.key());
    });
    return detail::kth_largest(keys, k);
  }

  std::vector<coded_tensor> tensors_;
  detail::tensor_chunks chunks_;
  std::vector<std::size_t> first_parts_;  // number of each tensor's first part
  std::vector<word> bounds_;              // bound of each tensor
  std::vector<entries> found_;            // entries found in each part
  std::vector<T> selected_;
  std::vector<std::int32_t> indices_;
};

/// Writes the indices, ascending, of the k values of largest magnitude, 0 <= k <= values.size(), to
/// `indices`, whose contents are replaced: see largest_selector. Throws value_error for 2^31 values or more.
/// For repeated selections a largest_selector keeps its workspaces.
template <class T>
void select_largest(context<device::cpu>& ctx, std::span<const T> values, index_t k,
                    std::vector<std::int32_t>& indices) {
  const auto size = static_cast<index_t>(values.size());
  std::vector<coded_tensor> tensors;
  if (size > 0) tensors.push_back({"a list of values", logical_layout::vector(size), 0, size});
  largest_selector<T> selector("select_largest", tensors);
  const std::vector<index_t> counts(tensors.size(), k);
  selector.select(ctx, detail::entry_lists(counts), values);
  indices.assign(selector.indices().begin(), selector.indices().end());
}

PUFFERFISH_NAMESPACE_END
