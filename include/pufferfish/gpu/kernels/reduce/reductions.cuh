// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of reductions.hpp.

#include <pufferfish/gpu/kernels/elementwise/elementwise_functors.hpp>
#include <pufferfish/gpu/kernels/reduce/columns.cuh>
#include <pufferfish/gpu/kernels/reduce/reductions.hpp>

PUFFERFISH_KERNELS_BEGIN

/// The last step of column_sums: stores one sum, or adds it to the old value, rounded once.
template <class T>
struct column_sum_finish {
  accumulate_t<T>* sums;
  bool add;
  __device__ void operator()(index_t column, const column_sum_state<1, 1>& s) const {
    store_sum(s.sums[0][0], add, sums[column]);
  }
};

template <class T>
void column_sums(cudaStream_t stream, const T* x, index_t row_stride, index_t rows, index_t columns, bool add,
                 const column_workspace& work, accumulate_t<T>* sums) {
  const launch_site site(stream, "column_sums");
  with_width<T>(whole_vectors<T>(columns, x) && whole_vectors<T>(row_stride), [&](auto width) {
    sum_columns<column_sum_state<1, 1>>(site, column_sum_task<T, width>{x, row_stride}, rows, columns, work,
                                        column_sum_finish<T>{sums, add});
  });
}

/// A task of sum_columns: stores dz and sums its columns. Every element is read and written by one thread.
template <class T, int Width>
struct relu_sum_task {
  static constexpr int width = Width;
  using state = column_sum_state<1, Width>;

  const T *y, *dy;
  T* dz;
  index_t row_stride;

  struct loaded {
    raw_row<T, Width> y, dy;
    index_t place;
  };
  __device__ void add(index_t column, index_t row, index_t end, index_t step, state& s) const {
    add_runs<T>(
        row, end, step, s,
        [&](index_t at) {
          const index_t place = at * row_stride + column;
          return loaded{load_raw<Width>(y + place), load_raw<Width>(dy + place), place};
        },
        [&](const loaded& raw, auto& run) {
          const row_values<T, Width> kept = widen(raw.y);
          row_values<T, Width> values = widen(raw.dy);
          for (int k = 0; k < Width; ++k) {
            values[k] = relu_gradient_of()(kept[k], values[k]);
            run[0][k] += values[k];
          }
          store_row<Width>(dz + raw.place, values);
        });
  }
};

template <class T>
void relu_column_sums(cudaStream_t stream, const T* y, const T* dy, T* dz, index_t rows, index_t columns,
                      bool add, const column_workspace& work, accumulate_t<T>* sums) {
  const launch_site site(stream, "relu_column_sums");
  with_width<T>(whole_vectors<T>(columns, y) && aligned16(dy, dz), [&](auto width) {
    sum_columns<column_sum_state<1, 1>>(site, relu_sum_task<T, width>{y, dy, dz, columns}, rows, columns,
                                        work, column_sum_finish<T>{sums, add});
  });
}

#define PUFFERFISH_INSTANTIATE(T)                                                                 \
  template void column_sums<T>(cudaStream_t, const T*, index_t, index_t, index_t, bool,           \
                               const column_workspace&, accumulate_t<T>*);                        \
  template void relu_column_sums<T>(cudaStream_t, const T*, const T*, T*, index_t, index_t, bool, \
                                    const column_workspace&, accumulate_t<T>*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
