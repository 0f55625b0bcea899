// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: edge tiles, the blocks of a result whose last vector exceeds the columns of the result. All
/// products and convolutions by micro-kernels use this one implementation.

#include <algorithm>

#include <pufferfish/linalg/gemm/micro_kernels.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Calls run(block, rows) to compute a block of `rows` rows, of which only the first `width` of `full`
/// columns belong to the result. If width < full, up to 24 rows at a time are computed into a temporary
/// block, whose valid columns are then copied or added to the result. `run` must therefore compute any
/// contiguous part of the rows, and overwrite the result if block.accumulate is 0. Modifies at most the
/// members of `whole` that run_rows modifies.
template <class T, class Run>
void run_clipped(block_arguments<T>& whole, index_t width, index_t full, index_t rows, Run&& run) {
  if (width == full) return run(whole, rows);
  using result = product_result_t<T>;
  constexpr index_t size = static_cast<index_t>(sizeof(result));
  constexpr index_t most_rows = 24, most_columns = 4 * 64 / size;
  alignas(64) result beside[static_cast<std::size_t>(most_rows * most_columns)];
  block_arguments<T> block = whole;
  block.result_step = most_columns * size;
  block.accumulate = 0;
  for (index_t first = 0; first < rows; first += most_rows) {
    const index_t count = std::min(most_rows, rows - first);
    block.left_shift = whole.left_shift + first * block.row_step;
    block.result = beside;
    run(block, count);
    for (index_t i = 0; i < count; ++i) {
      result* const to = moved(whole.result, (first + i) * whole.result_step);
      const result* const from = beside + i * most_columns;
      if (whole.accumulate == 0) {
        std::copy_n(from, width, to);
        continue;
      }
      for (index_t j = 0; j < width; ++j) to[j] += from[j];
    }
  }
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
