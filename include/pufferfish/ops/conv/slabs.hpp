// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: a copy of a matrix in slabs, each of which a micro-kernel reads from its beginning to its end.

#include <algorithm>
#include <cstddef>
#include <cstring>

#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// A matrix cut into slabs of `width` columns, which are stored one after another, each [rows][width].
template <class T>
struct slabs {
  T* data;
  index_t rows, width;

  /// Elements of storage for a matrix of rows x columns.
  static index_t size(index_t rows, index_t columns, index_t width) {
    // A whole number of cache lines, so that data stored after the slabs begin at a cache line.
    constexpr index_t line = 64 / static_cast<index_t>(sizeof(T));
    return (rows * ((columns + width - 1) / width) * width + line - 1) / line * line;
  }
  index_t slab_size() const { return rows * width; }

  /// Copies `count` rows of `columns` elements, row stride `step`, to rows
  /// first, first + 1, ... Missing columns of the last slab are set to zero.
  void fill(index_t first, index_t count, const T* from, index_t step, index_t columns) const {
    T* to = data + first * width;
    // For these widths the copies have a constant size and are inlined.
    if (width == 24) return copy_rows<24>(to, count, from, step, columns);
    if (width == 32) return copy_rows<32>(to, count, from, step, columns);
    if (width == 48) return copy_rows<48>(to, count, from, step, columns);
    copy_rows<0>(to, count, from, step, columns);
  }

 private:
  // fill() for slabs of Width columns, a compile-time constant, or of `width` columns if Width is 0.
  template <index_t Width>
  void copy_rows(T* to, index_t count, const T* from, index_t step, index_t columns) const {
    const index_t wide = Width > 0 ? Width : width, whole = columns / wide;
    for (index_t i = 0; i < count; ++i, from += step, to += wide) {
      const T* source = from;
      T* target = to;
      for (index_t slab = 0; slab < whole; ++slab, source += wide, target += slab_size()) {
        std::memcpy(target, source, static_cast<std::size_t>(wide) * sizeof(T));
      }
      if (whole * wide < columns) {
        std::fill(std::copy(source, from + columns, target), target + wide, T{});
      }
    }
  }
};

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
