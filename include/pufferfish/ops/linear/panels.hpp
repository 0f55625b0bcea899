// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: products of matrices that have been packed into panels. A panel of the right operand is a few
/// vectors wide; a panel of the left operand is a few rows high. A kernel reads both from beginning to end
/// and can prefetch the data of the next block meanwhile.
///
/// A panel of the right operand is stored as [K][width()]: row k of the panel holds elements k of width()
/// consecutive columns. A panel of the left operand is stored as [K][rows()]: row k of the panel holds
/// elements k of rows() consecutive rows. Columns and rows beyond the end of the operand are zeros.

#include <algorithm>
#include <cstddef>
#include <utility>

#include <pufferfish/core/view.hpp>
#include <pufferfish/linalg/gemm/micro_kernels.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

#define PUFFERFISH_KERNELS panels
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/linear/panels.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// Prefetches a block of a result (rows x columns, row stride c_step in elements) for writing. Has no effect
/// for compilers without __builtin_prefetch.
template <class T>
void prefetch_block(const T* c, index_t c_step, index_t rows, index_t columns) {
#if defined(__GNUC__) || defined(__clang__)
  constexpr index_t line = 64 / static_cast<index_t>(sizeof(T));
  for (index_t i = 0; i < rows; ++i) {
    for (index_t j = 0; j < columns + line - 1; j += line) {
      __builtin_prefetch(c + i * c_step + std::min(j, columns - 1), 1, 3);
    }
  }
#endif
}

/// The sizes of panels for an instruction set, and the kernels that work on panels. The object is small and
/// immutable, so any number of threads may use it. No member checks its arguments.
///
/// \code
/// const panel_kernels<T> kernels;
/// T* const right = frame.take<T>(kernels.width() * depth);
/// kernels.copy_right(b, column, right);  // columns column .. column + width() - 1 of b
/// kernels.multiply(a.data(), a.stride(0), 1, a.extent(0), right, kernels.width(), depth,
///                  c.data() + column, c.stride(0), columns, false);
/// \endcode
template <class T>
class panel_kernels {
 public:
  using result_type = pufferfish::detail::product_result_t<T>;
  static_assert(sizeof(T) == sizeof(result_type), "both operands and the result have steps in elements");

  /// `target`: an instruction set for which isa_available() is true. For pairs of bfloat16, has_pairs() must
  /// be true, too.
  explicit panel_kernels(isa target = widest_isa())
      : table_(&pufferfish::detail::kernels_for<T>(target)),
        copy_(PUFFERFISH_KERNEL(target, panels, copy_panel<T>)),
        vectors_(table_->widest_adjacent),
        rows_(table_->adjacent[vectors_ - 1].by_rows[0].rows) {}

  /// Number of columns of a panel of the right operand.
  index_t width() const { return vectors_ * table_->lanes; }
  /// Number of rows of a panel of the left operand.
  index_t rows() const { return rows_; }
  /// Number of elements of a vector.
  index_t lanes() const { return table_->lanes; }

  /// Number of panels of a right operand with `columns` columns.
  index_t right_panels(index_t columns) const { return (columns + width() - 1) / width(); }
  /// Number of panels of a left operand with `rows` rows.
  index_t left_panels(index_t rows) const { return (rows + rows_ - 1) / rows_; }

  /// Packs columns first .. first + width() - 1 of b (K x N, any strides) into the panel `to`, [K][width()];
  /// zeros after the last column of b.
  void copy_right(const tensor_view<const T, 2>& b, index_t first, T* to) const {
    copy_(b.data() + first * b.stride(1), b.stride(0), b.stride(1), b.extent(0),
          std::min(width(), b.extent(1) - first), to, width());
  }
  /// Packs rows first .. first + rows() - 1 of a (M x K, any strides) into the panel `to`, [K][rows()]; zeros
  /// after the last row of a.
  void copy_left(const tensor_view<const T, 2>& a, index_t first, T* to) const {
    copy_(a.data() + first * a.stride(0), a.stride(1), a.stride(0), a.extent(1),
          std::min(rows_, a.extent(0) - first), to, rows_);
  }

  /// Memory that multiply() prefetches: while its first kernel computes, one address for each step of the
  /// depth, beginning at `from` and increasing by `step` bytes. `from` = nullptr: no prefetch.
  struct prefetch {
    const void* from = nullptr;
    index_t step = 0;
  };

  /// c = a b, or with `accumulate` c += a b, for one panel b, in the calling thread. a: `count` x `depth`,
  /// strides row_step and depth_step; b: `depth` rows, row stride right_step; c: `count` x `columns`, row
  /// stride c_step, 1 <= columns <= width(), overlaps no operand. depth >= 1. Strides are in elements.
  void multiply(const T* a, index_t row_step, index_t depth_step, index_t count, const T* b,
                index_t right_step, index_t depth, result_type* c, index_t c_step, index_t columns,
                bool accumulate, const prefetch& soon = {}) const {
    constexpr index_t size = static_cast<index_t>(sizeof(T));
    const index_t lanes = table_->lanes, vectors = (columns + lanes - 1) / lanes;
    const auto& list = row_step == 1 ? table_->adjacent[vectors - 1] : table_->strided[vectors - 1];
    const pufferfish::detail::block_tap<T> tap{a, b};
    pufferfish::detail::block_arguments<T> block{
        &tap, &tap + 1, depth,         row_step * size,   depth_step * size, right_step * size,
        0,    c,        c_step * size, accumulate ? 1 : 0};
    block.prefetch = soon.from;
    block.prefetch_step = soon.step;
    if (columns % lanes == 0) return pufferfish::detail::run_rows(list, block, count);
    // If the last vector exceeds the result's columns, the block is computed in a temporary array. Its valid
    // part is then copied or added to the result.
    constexpr index_t most_rows = 24, most_columns = 4 * 64 / size;
    alignas(64) result_type beside[static_cast<std::size_t>(most_rows * most_columns)];
    block.result_step = most_columns * size;
    block.accumulate = 0;
    for (index_t row = 0; row < count; row += most_rows) {
      const index_t here = std::min(most_rows, count - row);
      block.left_shift = row * block.row_step;
      block.result = beside;
      pufferfish::detail::run_rows(list, block, here);
      for (index_t i = 0; i < here; ++i) {
        result_type* const to = c + (row + i) * c_step;
        const result_type* const from = beside + i * most_columns;
        for (index_t j = 0; j < columns; ++j) to[j] = accumulate ? to[j] + from[j] : from[j];
      }
    }
  }

  /// The same as multiply(), for many rows: while rows() rows are computed, the next rows() rows of c are
  /// prefetched.
  void multiply_rows(const T* a, index_t row_step, index_t depth_step, index_t count, const T* b,
                     index_t right_step, index_t depth, result_type* c, index_t c_step, index_t columns,
                     bool accumulate) const {
    for (index_t row = 0; row < count; row += rows_) {
      if (row + rows_ < count) {
        prefetch_block(c + (row + rows_) * c_step, c_step, std::min(rows_, count - row - rows_), columns);
      }
      multiply(a + row * row_step, row_step, depth_step, std::min(rows_, count - row), b, right_step, depth,
               c + row * c_step, c_step, columns, accumulate);
    }
  }

 private:
  const pufferfish::detail::kernel_table<T>* table_;
  void (*copy_)(const T*, index_t, index_t, index_t, index_t, T*, index_t);
  index_t vectors_, rows_;
};

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
