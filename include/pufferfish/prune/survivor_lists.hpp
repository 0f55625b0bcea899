// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `survivor_lists`, which copies the elements that a mask keeps from the arena
/// to a dense array and back.

#include <algorithm>
#include <cstdint>
#include <vector>

#include <pufferfish/compress/sparse/entry_lists.hpp>
#include <pufferfish/prune/mask.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Lists of the survivors (elements that a mask keeps) among the elements [begin, end) of the arena, in arena
/// order. A tensor without pruned elements is copied as a whole; every other tensor has a 32-bit index for
/// each survivor. For masks that prune 50 to 90 % of single weights, index lists gather 8 to 2 times as fast
/// as lists of runs, and as fast as vectors of 8 elements that are permuted by the bits of the mask.
///
///     const survivor_lists kept(mask, 0, store.size());
///     std::vector<float> sent(static_cast<std::size_t>(kept.survivors()));
///     kept.gather(ctx, store.gradients().data(), sent.data());
///     ...                                    // sum of `sent` over the ranks
///     kept.scatter(ctx, sent.data(), 1.0F / ranks, store.gradients().data());  // means, and zeros elsewhere
class survivor_lists {
 public:
  /// Builds the lists for elements begin .. end - 1. Throws value_error unless `begin` and `end` are
  /// boundaries of tensors, and for a tensor of 2^31 elements or more, which the text names.
  survivor_lists(const weight_mask& mask, index_t begin, index_t end) : size_(end - begin) {
    const auto [first, last] = mask.tensor_range(begin, end);
    std::vector<index_t> counts;
    for (std::size_t t = first; t < last; ++t) {
      const masked_tensor& tensor = mask.tensors()[t];
      check_entry_indices("compact_sum", tensor.name, tensor.size);
      counts.push_back(tensor.kept);
      places_.push_back({tensor.offset - begin, tensor.size, indices_.size(), tensor.kept == tensor.size});
      if (places_.back().whole) continue;
      mask.for_each_kept(
          t, t + 1, [this](std::size_t, index_t i) { indices_.push_back(static_cast<std::int32_t>(i)); });
    }
    lists_ = entry_lists(counts);
  }

  index_t size() const { return size_; }  ///< number of elements of the range of the arena
  /// Number of elements of the range that the mask keeps.
  index_t survivors() const { return lists_.size(); }
  const entry_lists& lists() const { return lists_; }  ///< one list for each tensor of the range

  /// Positions of all survivors in the range, ascending. Throws value_error for a range of 2^31 elements or
  /// more.
  std::vector<std::int32_t> positions() const {
    check_entry_indices("compact_sum", "a bucket", size_);
    std::vector<std::int32_t> result;
    result.reserve(static_cast<std::size_t>(survivors()));
    for (std::size_t t = 0; t < places_.size(); ++t) {
      for (index_t i = 0; i < lists_.count(t); ++i) {
        const index_t at = places_[t].whole ? i : indices_of(t, lists_.first(t))[i];
        result.push_back(static_cast<std::int32_t>(places_[t].offset + at));
      }
    }
    return result;
  }

  /// Copies the survivors: to[i] = survivor i of the range. `arena`: the first element of the range; `to` has
  /// survivors() elements elsewhere.
  template <class T>
  void gather(context<device::cpu>& ctx, const T* arena, T* to) const {
    lists_.for_each(ctx, [&](std::size_t t, index_t begin, index_t end) {
      const T* const from = arena + places_[t].offset;
      if (places_[t].whole) {
        std::copy(from + (begin - lists_.first(t)), from + (end - lists_.first(t)), to + begin);
        return;
      }
      const std::int32_t* const index = indices_of(t, begin);
      for (index_t i = 0; i < end - begin; ++i) to[begin + i] = from[index[i]];
    });
  }

  /// Sets surviving elements of the arena to factor x survivor, and all other elements of the range to 0.
  /// Every element of the range is written once or twice; `from` has survivors() elements and does not
  /// overlap the arena.
  template <class T>
  void scatter(context<device::cpu>& ctx, const T* from, T factor, T* arena) const {
    lists_.for_each(ctx, [&](std::size_t t, index_t begin, index_t end) {
      T* const to = arena + places_[t].offset;
      if (places_[t].whole) {
        T* const copy = to + (begin - lists_.first(t));
        for (index_t i = 0; i < end - begin; ++i) copy[i] = from[begin + i] * factor;
        return;
      }
      for (index_t at = begin; at < end; at += block) {
        scatter_block(t, at, std::min(end, at + block), from, factor, to);
      }
    });
    for (std::size_t t = 0; t < places_.size(); ++t) {
      if (lists_.count(t) == 0)
        ops::fill(ctx, {arena + places_[t].offset, static_cast<std::size_t>(places_[t].size)}, T(0));
    }
  }

 private:
  // Number of survivors per block. A block is zeroed and then written, so that its cache lines are still in a
  // cache.
  static constexpr index_t block = 1024;

  // A tensor of the range.
  struct place {
    index_t offset, size;     // elements of the tensor, relative to the range
    std::size_t first_index;  // position of its indices in indices_, unless whole
    bool whole;
  };

  // The indices, within tensor t, of the survivors from number `survivor` of the range on.
  const std::int32_t* indices_of(std::size_t t, index_t survivor) const {
    return indices_.data() + places_[t].first_index + (survivor - lists_.first(t));
  }

  // Writes the survivors [begin, end) and the zeros from the first of them up to the next survivor or the end
  // of the tensor. Zeros before a survivor are written only if it is the first one of the tensor.
  template <class T>
  void scatter_block(std::size_t t, index_t begin, index_t end, const T* from, T factor, T* to) const {
    const std::int32_t* const index = indices_of(t, begin);
    const bool is_last = end == lists_.first(t) + lists_.count(t);
    const index_t first = begin == lists_.first(t) ? 0 : index[0];
    const index_t last = is_last ? places_[t].size : index[end - begin];
    std::fill(to + first, to + last, T(0));
    for (index_t i = 0; i < end - begin; ++i) to[index[i]] = from[begin + i] * factor;
  }

  index_t size_;
  std::vector<place> places_;  // one for each tensor
  std::vector<std::int32_t> indices_;
  entry_lists lists_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
