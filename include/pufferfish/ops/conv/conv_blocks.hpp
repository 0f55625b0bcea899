// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: how direct convolutions use the micro-kernels of linalg/gemm. A micro-kernel computes one block
/// of the output: the rows of the block are pixels, the columns are a panel of output channels, a few vectors
/// wide.

#include <algorithm>
#include <cstddef>

#include <pufferfish/core/context.hpp>
#include <pufferfish/linalg/gemm/micro_kernels.hpp>
#include <pufferfish/ops/conv/tap_axis.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

using pufferfish::detail::block_arguments;
using pufferfish::detail::block_tap;
using pufferfish::detail::kernel_list;
using pufferfish::detail::kernel_table;
using pufferfish::detail::moved;
using pufferfish::detail::product_result_t;
using pufferfish::detail::run_rows;

/// The table of micro-kernels for elements of T and the widest instruction set of this machine.
template <class T>
const kernel_table<T>& conv_kernels() {
  static const kernel_table<T>& chosen = pufferfish::detail::kernels_for<T>(widest_isa());
  return chosen;
}

/// The cut of a number of vectors (of output channels) into panels of at most `widest` vectors: as few panels
/// as possible, with widths as equal as possible.
struct panel_cut {
  index_t vectors, panels;  ///< number of vectors in all panels together, number of panels
  panel_cut(index_t count, index_t widest) : vectors(count), panels((count + widest - 1) / widest) {}
  /// The vectors of a panel.
  range operator[](index_t panel) const { return {vectors * panel / panels, vectors * (panel + 1) / panels}; }
};

/// Calls run(block, rows) to compute a block of `rows` rows, of which only the first `width` of `full`
/// columns belong to the result. If width < full, up to 24 rows at a time are computed into a temporary block
/// and their valid columns are copied to the result, so `run` must compute any contiguous part of the rows.
/// Modifies the same members of `whole` as run_rows.
template <class T, class Run>
void run_clipped(block_arguments<T>& whole, index_t width, index_t full, index_t rows, Run&& run) {
  if (width == full) return run(whole, rows);
  using result = product_result_t<T>;
  constexpr index_t size = static_cast<index_t>(sizeof(result));
  constexpr index_t most_rows = 24, most_columns = 4 * 64 / size;
  alignas(64) result beside[static_cast<std::size_t>(most_rows * most_columns)];
  block_arguments<T> block = whole;
  block.result_step = most_columns * size;
  for (index_t first = 0; first < rows; first += most_rows) {
    const index_t count = std::min(most_rows, rows - first);
    result* target = moved(whole.result, first * whole.result_step);
    for (index_t i = 0; i < count && block.accumulate != 0; ++i) {
      std::copy_n(moved(target, i * whole.result_step), width, beside + i * most_columns);
    }
    block.left_shift = whole.left_shift + first * block.row_step;
    block.result = beside;
    run(block, count);
    for (index_t i = 0; i < count; ++i) {
      std::copy_n(beside + i * most_columns, width, moved(target, i * whole.result_step));
    }
  }
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
