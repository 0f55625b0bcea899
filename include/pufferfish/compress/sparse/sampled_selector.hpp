// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `sampled_selector`: selects approximately the entries of largest magnitude, by a threshold from a sample.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <pufferfish/compress/sparse/select_largest.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Selects approximately the k entries of largest magnitude of each tensor, as the published program of deep
/// gradient compression does (Lin et al., ICLR 2018). For k of the n entries of a tensor, with rho = k / n:
///
///     sample:      every s-th magnitude, the first one included, with
///                  s = ceil(n / max(ceil(n / 100), ceil(2 / rho)))
///     threshold:   the sampled magnitude of rank ceil(rho m) of m
///     candidates:  the entries with magnitudes of at least the threshold
///
/// While there are fewer than 0.8 k candidates, the threshold is multiplied by 0.8, at most ten times. Of
/// more than k candidates the k largest are selected; of equal ones, those with the lower index. A list of
/// fewer than k is filled up with entries of value 0 and index n. NaN counts as the largest magnitude. The
/// exact selection is largest_selector.
///
/// Deterministic: the sample's positions are fixed. select uses workspaces of the object, so calls must not
/// overlap.
template <class T>
class sampled_selector {
 public:
  /// Throws value_error, naming `user` and the tensor, if a tensor has 2^31 elements or more.
  sampled_selector(const char* user, const std::vector<coded_tensor>& tensors) : tensors_(tensors) {
    for (const coded_tensor& tensor : tensors) detail::check_entry_indices(user, tensor.name, tensor.size);
  }

  /// Selects up to lists.count(t) <= n_t entries of each tensor t. `values` holds all tensors, each one at
  /// its offset, and is not changed. Tensors are selected in parallel, one thread each.
  void select(context<device::cpu>& ctx, const detail::entry_lists& lists, std::span<const T> values) {
    selected_.resize(static_cast<std::size_t>(lists.size()));
    indices_.resize(selected_.size());
    ctx.parallel_for(static_cast<index_t>(tensors_.size()), [&](index_t task, int) {
      const auto t = static_cast<std::size_t>(task);
      select_one(tensors_[t], lists.count(t), values.data() + tensors_[t].offset, lists.first(t));
    });
  }

  /// The indices of the last selection, list after list as in its `lists`: local to each tensor, ascending
  /// except for the entries that fill a list. The span is valid until the next call of select.
  std::span<const std::int32_t> indices() const { return indices_; }
  /// The values that belong to indices(). The span is valid until the next call of select.
  std::span<const T> values() const { return selected_; }

 private:
  using entry = detail::large_entry<T>;

  // The threshold of a tensor, from the sample.
  static T sampled_threshold(const T* values, index_t size, index_t k) {
    const double share = static_cast<double>(k) / static_cast<double>(size);
    const double wanted = std::max(std::ceil(0.01 * static_cast<double>(size)), std::ceil(2.0 / share));
    const auto stride = static_cast<index_t>(std::ceil(static_cast<double>(size) / wanted));
    std::vector<T> sample;
    for (index_t i = 0; i < size; i += stride) sample.push_back(std::abs(values[i]));
    const auto rank = static_cast<index_t>(std::ceil(share * static_cast<double>(sample.size())));
    const auto place = sample.begin() + std::clamp<index_t>(rank, 1, static_cast<index_t>(sample.size())) - 1;
    std::nth_element(sample.begin(), place, sample.end(),
                     [](T a, T b) { return detail::magnitude_key(a) > detail::magnitude_key(b); });
    return *place;
  }

  // The entries whose magnitude is at least the threshold, in order.
  static std::vector<entry> reaching(T threshold, const T* values, index_t size) {
    constexpr index_t block = 2048;
    const auto filter = PUFFERFISH_KERNEL(widest_isa(), detail::largest_passes, find_at_least<T>);
    std::vector<entry> result;
    entry found[block];
    for (index_t begin = 0; begin < size; begin += block) {
      const index_t count = filter(values + begin, std::min(block, size - begin),
                                   detail::magnitude_key(threshold), static_cast<std::int32_t>(begin), found);
      result.insert(result.end(), found, found + count);
    }
    return result;
  }

  // The candidates of a tensor, after at most ten reductions of the threshold.
  static std::vector<entry> candidates(const T* values, index_t size, index_t k) {
    T threshold = sampled_threshold(values, size, k);
    std::vector<entry> found = reaching(threshold, values, size);
    for (int correction = 0; correction < 10; ++correction) {
      if (static_cast<double>(found.size()) >= 0.8 * static_cast<double>(k)) break;
      threshold *= T(0.8);
      found = reaching(threshold, values, size);
    }
    return found;
  }

  // Writes the list of a tensor: k entries from position `to` on.
  void select_one(const coded_tensor& tensor, index_t k, const T* values, index_t to) {
    if (k == 0) return;
    std::vector<entry> found = candidates(values, tensor.size, k);
    const auto most = static_cast<std::size_t>(k);
    if (found.size() > most) {
      std::nth_element(found.begin(), found.begin() + k, found.end(), [](const entry& a, const entry& b) {
        return a.key() != b.key() ? a.key() > b.key() : a.index < b.index;
      });
      found.resize(most);
      std::sort(found.begin(), found.end(), [](const entry& a, const entry& b) { return a.index < b.index; });
    }
    found.resize(most, {T(0), static_cast<std::int32_t>(tensor.size)});
    for (std::size_t i = 0; i < most; ++i) {
      selected_[static_cast<std::size_t>(to) + i] = found[i].value;
      indices_[static_cast<std::size_t>(to) + i] = found[i].index;
    }
  }

  std::vector<coded_tensor> tensors_;
  std::vector<T> selected_;
  std::vector<std::int32_t> indices_;
};

PUFFERFISH_NAMESPACE_END
