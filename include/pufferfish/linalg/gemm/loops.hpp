// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the loops of a matrix product around the micro-kernels. The right operand is a packed_b: in
/// place, packed, or packed by an earlier call. The left operand is read in place (multiply_rows) or packed
/// (multiply_panels).
///
/// Source: Goto, van de Geijn: "Anatomy of high-performance matrix multiplication", ACM TOMS 2008.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include <pufferfish/linalg/gemm/edge_tile.hpp>
#include <pufferfish/linalg/gemm/pack.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Prefetches a block of a matrix (rows x columns, row stride c_step in elements): for reading if T is const,
/// else for writing. Has no effect for compilers without __builtin_prefetch.
template <class T>
void prefetch_block(T* c, index_t c_step, index_t rows, index_t columns) {
#if defined(__GNUC__) || defined(__clang__)
  constexpr index_t line = 64 / static_cast<index_t>(sizeof(T));
  constexpr int for_writing = std::is_const_v<T> ? 0 : 1;
  asm volatile("");  // g++ removes calls of a function that does nothing but prefetch
  for (index_t i = 0; i < rows; ++i, c += c_step) {
    for (index_t j = 0; j < columns; j += line) __builtin_prefetch(c + j, for_writing, 3);
    if (reinterpret_cast<std::uintptr_t>(c) % 64 != 0) __builtin_prefetch(c + columns - 1, for_writing, 3);
  }
#endif
}

/// A panel_shape with the innermost loops, over the rows of one panel of the right operand.
///
/// \code
/// const panel_kernels<T> kernels;
/// T* const right = frame.take<T>(kernels.width() * depth);
/// kernels.copy_right(b, column, right);  // columns column .. column + width() - 1 of b
/// kernels.multiply(a.data(), a.stride(0), 1, a.extent(0), right, kernels.width(), depth,
///                  c.data() + column, c.stride(0), columns, false);
/// \endcode
template <class T>
class panel_kernels : public panel_shape<T> {
 public:
  using result_type = product_result_t<T>;
  static_assert(sizeof(T) == sizeof(result_type), "both operands and the result have steps in elements");
  using panel_shape<T>::panel_shape;
  using panel_shape<T>::lanes;
  using panel_shape<T>::rows;
  explicit panel_kernels(const panel_shape<T>& shape) : panel_shape<T>(shape) {}

  /// Memory that is prefetched while a kernel computes: one address for each step of the depth, beginning at
  /// `from` and increasing by `step` bytes. `from` = nullptr: no prefetch. In multiply_rows(), `from`
  /// increases by `advance` bytes from one group of rows to the next, and only the first `groups` groups
  /// prefetch.
  struct prefetch {
    const void* from = nullptr;
    index_t step = 0;
    index_t advance = 0;
    index_t groups = std::numeric_limits<index_t>::max();
  };

  /// c = a b, or with `accumulate` c += a b, for one panel b, in the calling thread. a: `count` x `depth`,
  /// strides row_step and depth_step; b: `depth` rows, row stride right_step; c: `count` x `columns`, row
  /// stride c_step, 1 <= columns <= width(), overlaps no operand. depth >= 1. Strides are in elements. Only
  /// the first kernel prefetches.
  void multiply(const T* a, index_t row_step, index_t depth_step, index_t count, const T* b,
                index_t right_step, index_t depth, result_type* c, index_t c_step, index_t columns,
                bool accumulate, const prefetch& soon = {}) const {
    const block_tap<T> tap{a, b};
    auto block = arguments(tap, row_step, depth_step, right_step, depth, c, c_step, accumulate);
    block.prefetch = soon.from;
    block.prefetch_step = soon.step;
    run(block, row_step == 1, columns, count);
  }

  /// Number of rows of the largest kernel for `columns` columns; `adjacent`: for a left operand whose rows
  /// are one element apart.
  index_t group(index_t columns, bool adjacent) const { return list(columns, adjacent).by_rows[0].rows; }

  /// The same as multiply(), for many rows, in groups of `group` rows (0: rows()): while a group is computed,
  /// the rows of c for the next group are prefetched. `group_step`: elements from the first row of one group
  /// of a to that of the next one; 0: group * row_step.
  void multiply_rows(const T* a, index_t row_step, index_t depth_step, index_t count, const T* b,
                     index_t right_step, index_t depth, result_type* c, index_t c_step, index_t columns,
                     bool accumulate, prefetch soon = {}, index_t group = 0, index_t group_step = 0) const {
    if (group == 0) group = rows();
    const block_tap<T> tap{a, b};
    auto block = arguments(tap, row_step, depth_step, right_step, depth, c, c_step, accumulate);
    const index_t advance = (group_step == 0 ? group * row_step : group_step) * size;
    index_t shift = 0;
    for (index_t row = 0; row < count; row += group, c += group * c_step, shift += advance) {
      const index_t here = std::min(group, count - row);
      if (row + here < count) {
        prefetch_block(c + here * c_step, c_step, std::min(group, count - row - here), columns);
      }
      block.left_shift = shift;
      block.result = c;
      if (soon.groups-- > 0) {
        block.prefetch = soon.from;
        block.prefetch_step = soon.step;
        soon.from = static_cast<const std::byte*>(soon.from) + soon.advance;
      }
      run(block, row_step == 1, columns, here);
    }
  }

 private:
  static constexpr index_t size = static_cast<index_t>(sizeof(T));

  static block_arguments<T> arguments(const block_tap<T>& tap, index_t row_step, index_t depth_step,
                                      index_t right_step, index_t depth, result_type* c, index_t c_step,
                                      bool accumulate) {
    return {&tap, &tap + 1, depth,         row_step * size,   depth_step * size, right_step * size,
            0,    c,        c_step * size, accumulate ? 1 : 0};
  }

  const kernel_list<T>& list(index_t columns, bool adjacent) const {
    // In one expression, g++ 12 with -fsanitize=undefined computes the index in one of the two cases only.
    const index_t vectors = (columns + lanes() - 1) / lanes();
    const kernel_list<T>* const lists = adjacent ? this->kernels().adjacent : this->kernels().strided;
    return lists[vectors - 1];
  }

  // Computes `count` rows of a block, of which `columns` columns are valid.
  void run(block_arguments<T>& block, bool adjacent, index_t columns, index_t count) const {
    const auto& kernels = list(columns, adjacent);
    run_clipped(block, columns, (columns + lanes() - 1) / lanes() * lanes(), count,
                [&](block_arguments<T>& own, index_t n) { run_rows(kernels, own, n); });
  }
};

/// Products of a depth below this number do not prefetch.
inline constexpr index_t shallow_depth = 64;

/// Number of elements that take 384 KiB of the second-level cache.
template <class T>
inline constexpr index_t cached_elements = index_t{384} * 1024 / static_cast<index_t>(sizeof(T));

/// Number of rows whose operands and results, `elements` elements a row, take at most cached_elements. The
/// number is a multiple of 24, unless it is limited to 4096; it is at least 24.
template <class T>
index_t cached_rows(index_t elements) {
  return std::clamp<index_t>(cached_elements<T> / std::max<index_t>(1, elements) / 24 * 24, 24, 4096);
}

/// Number of steps of the depth that are multiplied before the next ones if the left operand is read in place
/// by rows. It is the whole depth, unless a tile of whole rows would be so thin, and the right operand is so
/// large, that reading the right operand from memory for each tile would take longer than the product.
template <class T>
index_t row_depth(index_t depth, index_t columns) {
  constexpr index_t long_rows = 1024, far = (index_t{8} << 20) / static_cast<index_t>(sizeof(T));
  return depth >= long_rows && depth * columns >= far ? depth_blocks(depth, long_rows / 2).step() : depth;
}

/// Number of rows of a left operand that are read in place and multiplied by all panels before the next rows:
/// at most 65536 elements of row_depth() steps, if these are at most 2730. A product of a shallow depth takes
/// about as long as writing its result, and many small tiles cost more than they save.
template <class T>
index_t row_tile(index_t depth, index_t columns) {
  return depth < shallow_depth ? cached_rows<T>(depth + columns)
                               : std::clamp<index_t>(65536 / row_depth<T>(depth, columns) / 24 * 24, 24, 384);
}

/// multiply_rows() for one tile. For each panel, the loop is over blocks of the depth, then over groups of
/// rows. Unless the depth is shallow, cache lines are prefetched while a group is computed: during the first
/// panel those of a that follow in memory, later those of the next panel of b.
template <class T>
void multiply_tile_of_rows(const packed_b<T>& b, const tensor_view<const T, 2>& a, index_t first,
                           index_t last, const tensor_view<product_result_t<T>, 2>& c, bool add) {
  constexpr index_t size = static_cast<index_t>(sizeof(T)), line = 64, few_rows = 8;
  const panel_kernels<T> kernels(b.shape);
  const depth_blocks blocks(b.depth, 1024);
  const index_t rows = c.extent(0);
  const bool adjacent = a.stride(0) == 1, dense_rows = a.stride(1) == 1 && a.stride(0) == a.extent(1);
  for (index_t panel = first; panel < last; ++panel) {
    const index_t column = b.first_column(panel) - b.first_column(first);
    const index_t columns = std::min(kernels.width(), c.extent(1) - column);
    for (index_t block = 0; block < blocks.count(); ++block) {
      const index_t begin = blocks.begin(block), steps = blocks.size(block);
      const T *const own = a.data() + begin * a.stride(1), *const right = b.at(panel, begin);
      if (b.depth < shallow_depth && !adjacent) {
        kernels.multiply(own, a.stride(0), a.stride(1), rows, right, b.row_step, steps, c.data() + column,
                         c.stride(0), columns, add);
        continue;
      }
      index_t group = kernels.group(columns, adjacent);
      typename panel_kernels<T>::prefetch soon;
      if (panel == first && adjacent && a.stride(1) > line / size) {
        group = std::min(group, line / size);  // a step prefetches one line
        soon = {own + steps * a.stride(1), a.stride(1) * size, group * size};
      } else if (panel == first && dense_rows) {
        // A step prefetches one line, which covers a block of the depth of few rows only.
        if (blocks.count() > 1) group = std::min(group, few_rows);
        soon = {own + group * a.stride(0), line, group * a.stride(0) * size};
      } else if (b.dense() && panel + 1 < b.panels()) {
        soon = {right + steps * b.row_step, line, steps * line, (kernels.width() * size + line - 1) / line};
      }
      kernels.multiply_rows(own, a.stride(0), a.stride(1), rows, right, b.row_step, steps, c.data() + column,
                            c.stride(0), columns, add || block > 0, soon, group);
    }
  }
}

/// c = a b, or with `add` c += a b, for the panels first .. last - 1 of b, in the calling thread. a: M x K,
/// any strides, read in place (fast if one stride is 1); c: M x (the columns of these panels), contiguous
/// rows, overlaps no operand. K = 0 is an empty sum. Nothing is checked.
///
/// The part of a that is read for one panel after the other fits into the second-level cache: a tile of rows,
/// of which row_depth() steps are multiplied at a time, or, if the columns of a are contiguous, a block of
/// the depth.
template <class T>
void multiply_rows(const packed_b<T>& b, const tensor_view<const T, 2>& a, index_t first, index_t last,
                   const tensor_view<product_result_t<T>, 2>& c, bool add) {
  constexpr index_t block = 384;
  const index_t rows = c.extent(0), depth = b.depth;
  for (index_t i = 0; i < rows && depth == 0 && !add; ++i) {
    std::fill_n(c.data() + i * c.stride(0), c.extent(1), product_result_t<T>{});
  }
  const bool by_depth = a.stride(0) == 1;
  const index_t tile = by_depth ? rows : row_tile<T>(depth, b.columns),
                deep = by_depth ? std::min(block, depth) : row_depth<T>(depth, b.columns);
  for (index_t k = 0; k < depth; k += deep) {
    const index_t steps = std::min(deep, depth - k);
    for (index_t row = 0; row < rows; row += tile) {
      const index_t count = std::min(tile, rows - row);
      multiply_tile_of_rows(b.rows(k, steps), a.slice(0, row, count).slice(1, k, steps), first, last,
                            c.slice(0, row, count), add || k > 0);
    }
  }
}
/// The same for all panels.
template <class T>
void multiply_rows(const packed_b<T>& b, const tensor_view<const T, 2>& a,
                   const tensor_view<product_result_t<T>, 2>& c, bool add) {
  multiply_rows(b, a, 0, b.panels(), c, add);
}

/// c = a b, or with `accumulate` c += a b, for one block of the depth: panels first .. last - 1 of the packed
/// left operand times one panel of the right operand, in the calling thread. right: the first step of the
/// block in that panel, row stride `right_step`; c: all rows of the result, the columns of the right panel;
/// only the rows of these left panels are written. While a panel of a is multiplied, the next one is
/// prefetched.
template <class T>
void multiply_panels(const packed_a<T>& a, index_t block, index_t first, index_t last, const T* right,
                     index_t right_step, const tensor_view<T, 2>& c, bool accumulate) {
  constexpr index_t size = static_cast<index_t>(sizeof(T));
  const panel_kernels<T> kernels(a.shape);
  const index_t steps = a.blocks.size(block), height = kernels.rows(), row = first * height;
  const T* const own = a.at(block, first);
  kernels.multiply_rows(own, 1, height, std::min(a.rows, last * height) - row, right, right_step, steps,
                        c.data() + row * c.stride(0), c.stride(0), c.extent(1), accumulate,
                        {own + height * steps, height * size, height * steps * size}, height, height * steps);
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
