// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: mean and variance of columns, as a task of sum_columns.

#include <pufferfish/gpu/kernels/reduce/columns.cuh>
#include <pufferfish/gpu/kernels/reduce/moment_parts.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Moments of the columns of a part of x. A thread sums distances from the first row of each run in float, so
/// that neither a large mean nor one far value cancels digits of others; sums of all runs are of distances
/// from the part's first row, in double.
template <class T, int Width>
struct moment_task {
  static constexpr int width = Width;
  using state = column_sum_state<2, Width>;

  const T* x;
  index_t channels;

  __device__ void add(index_t column, index_t row, index_t end, index_t step, state& s) const {
    if (row >= end) return;
    const auto load = [&](index_t at) { return load_raw<Width>(x + at * channels + column); };
    const row_values<T, Width> shift = widen(load(row - static_cast<index_t>(threadIdx.y)));
    while (row < end) {
      const row_values<T, Width> near = widen(load(row));
      row_values<T, Width> sums{}, squares{};
      const double count = for_run(row, end, step, load, [&](const raw_row<T, Width>& raw) {
        const row_values<T, Width> values = widen(raw);
        for (int k = 0; k < Width; ++k) {
          const accumulate_t<T> distance = values[k] - near[k];
          sums[k] += distance;
          squares[k] += distance * distance;
        }
      });
      for (int k = 0; k < Width; ++k) {
        const double apart = static_cast<double>(near[k]) - static_cast<double>(shift[k]);
        const double sum = sums[k];
        s.sums[0][k] += sum + count * apart;
        s.sums[1][k] += static_cast<double>(squares[k]) + apart * (2.0 * sum + count * apart);
      }
    }
  }

  /// Mean and sum of squared deviations.
  __device__ void finish(index_t column, index_t first, index_t end, state& s) const {
    if (first >= end) return;
    const double share = 1.0 / static_cast<double>(end - first);
    const row_values<T, Width> shift = load_row<Width>(x + first * channels + column);
    for (int k = 0; k < Width; ++k) {
      const double sum = s.sums[0][k];
      s.sums[0][k] = static_cast<double>(shift[k]) + sum * share;
      s.sums[1][k] -= sum * sum * share;
    }
  }
};

PUFFERFISH_KERNELS_END
