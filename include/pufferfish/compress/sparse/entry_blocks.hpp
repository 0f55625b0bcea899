// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `entry_blocks`, gathered blocks of entries whose length is the same on all ranks.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/compress/codes/tensor_chunks.hpp>
#include <pufferfish/compress/sparse/entry_lists.hpp>
#include <pufferfish/distributed/collectives/block_exchange.hpp>
#include <pufferfish/distributed/collectives/sparse_stream.hpp>
#include <pufferfish/distributed/collectives/wire.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Converts the entries of all lists, one list per tensor, to a sparse vector over all tensors. Fillers
/// (entries whose index is the number of elements of their tensor) are left out. Throws the errors of
/// sparse_stream.
template <class T>
sparse_stream<T> stream_of_lists(const std::vector<coded_tensor>& tensors, const entry_lists& lists,
                                 std::span<const std::int32_t> indices, std::span<const T> values) {
  std::vector<std::int32_t> all_indices;
  std::vector<T> all_values;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const auto first = static_cast<std::size_t>(lists.first(t));
    for (std::size_t i = first; i < first + static_cast<std::size_t>(lists.count(t)); ++i) {
      if (indices[i] >= tensors[t].size) break;
      all_indices.push_back(static_cast<std::int32_t>(tensors[t].offset) + indices[i]);
      all_values.push_back(values[i]);
    }
  }
  return {coded_size(tensors), all_indices, all_values};
}

/// The lists of entries of every rank. A rank's block holds the values of all lists, as T or as float16, and
/// then all indices, as 32-bit integers: ascending in each list, and local to its tensor. Blocks have no
/// alignment. With `filled_lists` the last entries of a list may be fillers: their index is the number of
/// elements of the tensor, and they are ignored.
template <class T>
class entry_blocks {
 public:
  /// `half_values`: values are sent as float16. `filled_lists`: lists may end with fillers.
  explicit entry_blocks(bool half_values, bool filled_lists = false)
      : half_(half_values), filled_(filled_lists) {}

  /// Sets the number of entries of each list. The blocks get their new length in the next call of blocks().
  void resize(const entry_lists& lists) { lists_ = lists; }
  /// The lists set by resize().
  const entry_lists& lists() const { return lists_; }

  /// Number of bytes of the values of a block.
  std::size_t value_bytes() const { return count() * (half_ ? sizeof(float16) : sizeof(T)); }
  /// Number of bytes of a whole block.
  std::size_t block_bytes() const { return value_bytes() + count() * sizeof(std::int32_t); }

  /// The blocks of all ranks, each of block_bytes() bytes. Their bytes are kept if neither the number of
  /// ranks nor the length has changed since the last call; else they are undefined.
  rank_blocks& blocks(std::size_t ranks) {
    if (blocks_.count() != ranks || blocks_.size(0) != block_bytes()) {
      blocks_.resize(std::vector<std::size_t>(ranks, block_bytes()));
    }
    return blocks_;
  }

  /// Writes the block of a rank, after a call of blocks(). `values` and `indices` have lists().size()
  /// elements. Returns the values that the block represents: `values` itself, or a span into this object. As
  /// float16, finite values beyond the range become the largest float16 of their sign, others are rounded.
  std::span<const T> write(std::size_t rank, std::span<const T> values,
                           std::span<const std::int32_t> indices) {
    const std::span<std::byte> block = blocks_[rank];
    if (count() == 0) return values;
    std::memcpy(block.data() + value_bytes(), indices.data(), count() * sizeof(std::int32_t));
    if (!half_) {
      std::memcpy(block.data(), values.data(), value_bytes());
      return values;
    }
    const T largest = T(65504);
    const auto bounded = [largest](T x) { return std::isfinite(x) ? std::clamp(x, -largest, largest) : x; };
    sent_.resize(count());
    std::transform(values.begin(), values.end(), sent_.begin(), bounded);
    const std::span<float16> halves(reinterpret_cast<float16*>(block.data()), count());
    to_wire<float16, T>(sent_, halves);
    from_wire<float16, T>(halves, sent_, T(1));
    return sent_;
  }

  /// Reads the entries of all blocks. Throws value_error, naming `user`, the tensor and the rank, for indices
  /// that are not ascending or not in their tensor.
  void read(context<device::cpu>& ctx, const char* user, const std::vector<coded_tensor>& tensors) {
    received_.resize(blocks_.count());
    for (std::size_t rank = 0; rank < blocks_.count() && count() > 0; ++rank) {
      const std::span<const std::byte> block = std::as_const(blocks_)[rank];
      entries& to = received_[rank];
      to.values.resize(count());
      to.indices.resize(count());
      std::memcpy(to.indices.data(), block.data() + value_bytes(), count() * sizeof(std::int32_t));
      check(ctx, user, tensors, rank);
      if (half_) {
        from_wire<float16, T>({reinterpret_cast<const float16*>(block.data()), count()}, to.values, T(1));
      } else {
        std::memcpy(to.values.data(), block.data(), value_bytes());
      }
    }
  }

  /// Adds the entries that read() has found in list `list`, with indices from `begin` to `end` - 1, to its
  /// tensor, which begins at to[0]. Entries are added in the order of the ranks. Calls for disjoint ranges
  /// may run on different threads.
  void add(std::size_t list, index_t begin, index_t end, T* to) const {
    for (const entries& from : received_) {
      const auto first = from.indices.begin() + lists_.first(list), last = first + lists_.count(list);
      auto index = std::lower_bound(first, last, begin);
      auto value = from.values.begin() + (index - from.indices.begin());
      for (; index != last && *index < end; ++index) to[*index] += *value++;
    }
  }

 private:
  // The entries of one rank, in the order of the lists.
  struct entries {
    std::vector<T> values;
    std::vector<std::int32_t> indices;
  };

  // Number of entries of a block.
  std::size_t count() const { return static_cast<std::size_t>(lists_.size()); }

  // Throws value_error unless the received indices of `rank` ascend in every list and are in their tensor;
  // fillers, if allowed, are at the end of a list.
  void check(context<device::cpu>& ctx, const char* user, const std::vector<coded_tensor>& tensors,
             std::size_t rank) const {
    const std::int32_t* const index = received_[rank].indices.data();
    lists_.for_each(ctx, [&](std::size_t t, index_t begin, index_t end) {
      index_t before = begin == lists_.first(t) ? -1 : index[begin - 1], wrong = 0;
      // The index of fillers; without fillers, an index that does not occur.
      const index_t filler = filled_ ? tensors[t].size : std::numeric_limits<index_t>::max();
      for (index_t i = begin; i < end; before = index[i++]) {
        wrong += before < index[i] || (before == filler && index[i] == filler) ? 0 : 1;
      }
      if (wrong == 0 && before < tensors[t].size + (filled_ ? 1 : 0)) return;
      throw_error<value_error>({user, ": indices of ", tensors[t].name, " from rank ", rank,
                                " are not ascending numbers from 0 to ", tensors[t].size - 1});
    });
  }

  bool half_, filled_;
  entry_lists lists_;
  rank_blocks blocks_;
  std::vector<T> sent_;
  std::vector<entries> received_;  // entries received from each rank
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
