// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: lists of entries, one list per tensor, for compressors that send some entries of each tensor.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include <pufferfish/compress/codec.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Number of entries that a share of a tensor of `size` elements has: max(1, floor(share size)), computed in
/// double, at most `size`.
inline index_t entries_of_share(double share, index_t size) {
  const double entries = std::floor(share * static_cast<double>(size));
  if (!(entries < static_cast<double>(size))) return size;
  return std::min(size, std::max<index_t>(1, static_cast<index_t>(entries)));
}

/// Throws value_error, naming option and value, unless 0 < ratio <= 1.
inline void check_entry_ratio(const char* compressor, double ratio) {
  if (!(ratio > 0.0 && ratio <= 1.0)) {
    throw_error<value_error>({compressor, ": ratio ", ratio, " is outside 0 .. 1; it must be above 0"});
  }
}

/// Throws value_error, naming the tensor, if 32 bits cannot index its elements.
inline void check_entry_indices(const char* compressor, std::string_view tensor, index_t size) {
  if (size <= std::numeric_limits<std::int32_t>::max()) return;
  throw_error<value_error>({compressor, ": ", tensor, " has ", size,
                            " elements; indices of 32 bits allow at most ",
                            std::numeric_limits<std::int32_t>::max()});
}

/// The positions of lists that are stored one after the other: list t has the
/// entries first(t) to first(t) + count(t) - 1.
class entry_lists {
 public:
  entry_lists() = default;
  /// Makes one list per element of `counts`; counts[t] >= 0 is the length of list t.
  explicit entry_lists(const std::vector<index_t>& counts) {
    for (const index_t count : counts) firsts_.push_back(firsts_.back() + count);
  }

  /// Number of lists.
  std::size_t tensors() const { return firsts_.size() - 1; }
  /// Number of the first entry of list `tensor` among the entries of all lists.
  index_t first(std::size_t tensor) const { return firsts_[tensor]; }
  /// Number of entries of list `tensor`.
  index_t count(std::size_t tensor) const { return firsts_[tensor + 1] - firsts_[tensor]; }
  /// Number of entries of all lists together.
  index_t size() const { return firsts_.back(); }

  /// Cuts all entries into runs within one list, and calls f(tensor, begin, end) for every run, on all
  /// threads. The cuts do not depend on the number of threads.
  template <class F>
  void for_each(context<device::cpu>& ctx, F&& f) const {
    ops::for_chunks(ctx, size(), [&](index_t begin, index_t end) {
      auto last = std::upper_bound(firsts_.begin(), firsts_.end(), begin);
      for (; begin < end; ++last) {
        const index_t next = std::min(end, *last);
        if (begin < next) f(static_cast<std::size_t>(last - firsts_.begin()) - 1, begin, next);
        begin = next;
      }
    });
  }

 private:
  std::vector<index_t> firsts_{0};
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
