// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: a copy of a matrix of pixels x channels, cut into slabs of columns, so that a micro-kernel reads
/// each slab from its beginning to its end.

#include <algorithm>
#include <cstddef>
#include <cstring>

#include <pufferfish/core/scalar.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/linalg/gemm/loops.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

using pufferfish::detail::bf16_pair;

/// Type of the elements of the matrix that is copied to slabs with elements of T. A bf16_pair in a slab holds
/// the same channel of two pixels.
template <class T>
using slab_element_t = std::conditional_t<std::is_same_v<T, bf16_pair>, bfloat16, T>;
/// Number of pixels that an element of a slab holds.
template <class T>
inline constexpr index_t slab_pixels = std::is_same_v<T, bf16_pair> ? 2 : 1;

/// A matrix of `rows` pixels x channels, cut into slabs of `width` columns. Slabs are stored one after
/// another, each [rows][width]. Pixels are grouped in lines of `line` pixels; a kernel uses every `reach`-th
/// pixel of a line (`reach`: the stride of the convolution for its input, 1 for its output).
///
/// With pairs (bf16_pair), row p of a slab holds pixels p and p + reach, or zeros in place of the second
/// pixel if it is not in the same line. A kernel that starts at any row and advances by 2 * reach rows thus
/// reads every pixel of its line that it uses once.
template <class T>
struct slabs {
  T* data;
  index_t rows, width;  ///< pixels; columns of a slab
  index_t line, reach;  ///< pixels of a line; pixels from one pixel that a kernel uses to the next

  /// Number of elements of storage for a matrix of rows x columns.
  static index_t size(index_t rows, index_t columns, index_t width) {
    // Rounded up to whole cache lines, so that data stored after the slabs begins at a cache line.
    constexpr index_t line = 64 / static_cast<index_t>(sizeof(T));
    return (rows * ((columns + width - 1) / width) * width + line - 1) / line * line;
  }
  /// Elements from one slab to the next.
  index_t slab_size() const { return rows * width; }

  /// Copies `count` rows of `columns` elements, which begin at `from` with row stride `step`, to rows first,
  /// first + 1, ... of the slabs. Missing columns of the last slab are set to zero. With pairs, the rows must
  /// be whole lines.
  void fill(index_t first, index_t count, const slab_element_t<T>* from, index_t step,
            index_t columns) const {
    T* to = data + first * width;
    if constexpr (slab_pixels<T> == 2) {
      pair_rows(to, count, from, step, columns);
    } else if (width == 24) {  // copies of 24, 32 or 48 elements have a constant size and are inlined
      copy_rows<24>(to, count, from, step, columns);
    } else if (width == 32) {
      copy_rows<32>(to, count, from, step, columns);
    } else if (width == 48) {
      copy_rows<48>(to, count, from, step, columns);
    } else {
      copy_rows<0>(to, count, from, step, columns);
    }
  }

 private:
  // Elements from a row that is copied to the row that is prefetched meanwhile: about 8 KiB, in whole rows of
  // `step` > 0 elements. That row may belong to the next call, or begin after the last image: any address may
  // be prefetched. The function divides and is too slow for loops over short rows.
  static index_t prefetch_distance(index_t step) {
    constexpr index_t elements = 8192 / static_cast<index_t>(sizeof(slab_element_t<T>));
    return std::max<index_t>(1, elements / step) * step;
  }

  // fill() for pairs: interleaves each row with the row `reach` rows later in the same line, or with zeros.
  void pair_rows(T* to, index_t count, const slab_element_t<T>* from, index_t step, index_t columns) const {
    const auto kernel = pufferfish::detail::interleave_kernel<slab_element_t<T>>();
    const index_t distance = prefetch_distance(step);
    for (index_t i = 0; i < count; ++i, from += step, to += width) {
      pufferfish::detail::prefetch_block(from + distance, step, 1, columns);
      const bool alone = i % line + reach >= line;
      T* target = to;
      for (index_t column = 0; column < columns; column += width, target += slab_size()) {
        const index_t here = std::min(width, columns - column);
        kernel(from + column, alone ? nullptr : from + reach * step + column, target, here);
        std::fill(target + here, target + width, T{});
      }
    }
  }

  // Copies `count` columns of a row, and zeros up to column `wide`. Blocks of a constant size are inlined.
  static void copy_rest(T* to, const T* from, index_t count, index_t wide) {
    constexpr index_t block = 32 / static_cast<index_t>(sizeof(T));
    index_t done = 0;
    for (; done + block <= count; done += block) std::memcpy(to + done, from + done, block * sizeof(T));
    for (; done < count; ++done) to[done] = from[done];
    std::fill(to + done, to + wide, T{});
  }

  // fill() without pairs, for slabs of Width columns, a compile-time constant, or of `width` columns if Width
  // is 0.
  template <index_t Width>
  void copy_rows(T* to, index_t count, const T* from, index_t step, index_t columns) const {
    const index_t wide = Width > 0 ? Width : width, whole = columns / wide,
                  distance = prefetch_distance(step);
    for (index_t i = 0; i < count; ++i, from += step, to += wide) {
      pufferfish::detail::prefetch_block(from + distance, step, 1, columns);
      const T* source = from;
      T* target = to;
      for (index_t slab = 0; slab < whole; ++slab, source += wide, target += slab_size()) {
        std::memcpy(target, source, static_cast<std::size_t>(wide) * sizeof(T));
      }
      if (whole * wide < columns) copy_rest(target, source, columns - whole * wide, wide);
    }
  }
};

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
