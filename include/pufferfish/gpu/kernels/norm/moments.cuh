// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: mean and variance of columns, as a task of sum_columns.

#include <pufferfish/gpu/kernels/reduce/columns.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Number, mean and sum of squared deviations of values in `Width` columns; merged without cancellation
/// (Chan, Golub, LeVeque, 1979).
template <int Width>
struct moment_state {
  double count;
  lanes<double, Width> mean, squares;

  __device__ void clear() {
    count = 0.0;
    mean = squares = {};
  }
  __device__ void merge(const moment_state& other) {
    if (other.count == 0.0) return;
    const double total = count + other.count, share = other.count / total;
    for (int k = 0; k < Width; ++k) {
      const double distance = other.mean[k] - mean[k];
      mean[k] += distance * share;
      squares[k] += other.squares[k] + distance * distance * (count * share);
    }
    count = total;
  }
  __device__ void save(int k, double* values, index_t stride) const {
    values[0] = mean[k];
    values[stride] = squares[k];
  }
  __device__ void load(const double* values, index_t stride, index_t rows) {
    count = static_cast<double>(rows);
    mean[0] = values[0];
    squares[0] = values[stride];
  }
};

/// Moments of the columns of x: of runs of rows in float, relative to the run's first row, then merged.
template <class T, int Width>
struct moment_task {
  static constexpr int width = Width;
  using state = moment_state<Width>;

  const T* x;
  index_t channels;

  /// Each run of up to run_rows rows has moments relative to its first row, so that large means do not cancel
  /// digits.
  __device__ void add(index_t column, index_t row, index_t end, index_t step, state& s) const {
    using A = accumulate_t<T>;
    const auto load = [&](index_t at) { return load_raw<Width>(x + at * channels + column); };
    while (row < end) {
      const row_values<T, Width> shift = widen(load(row));
      row_values<T, Width> sums{}, squares{};
      const int count = for_run(row, end, step, load, [&](const raw_row<T, Width>& raw) {
        const row_values<T, Width> values = widen(raw);
        for (int k = 0; k < Width; ++k) {
          const A distance = values[k] - shift[k];
          sums[k] += distance;
          squares[k] += distance * distance;
        }
      });
      state run;
      run.count = count;
      for (int k = 0; k < Width; ++k) {
        const double mean = static_cast<double>(sums[k]) / run.count;
        run.mean[k] = static_cast<double>(shift[k]) + mean;
        run.squares[k] = static_cast<double>(squares[k]) - mean * static_cast<double>(sums[k]);
      }
      s.merge(run);
    }
  }
};

PUFFERFISH_KERNELS_END
