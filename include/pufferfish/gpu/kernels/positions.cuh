// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of <pufferfish/gpu/kernels/positions.hpp>.

#include <pufferfish/gpu/kernels/positions.hpp>
#include <pufferfish/gpu/kernels/rows.cuh>

PUFFERFISH_KERNELS_BEGIN

template <class T, int Width>
static __global__ void add_positions_kernel(row_array<const T> table, index_t table_rows,
                                            const std::int32_t* places, index_t period,
                                            row_array<const T> x, row_array<T> y, index_t rows,
                                            index_t columns) {
  for_each_row<Width>(rows, columns, [&](index_t m, index_t c) {
    const index_t place = places == nullptr ? m % period : static_cast<index_t>(places[m]);
    const bool exists = place >= 0 && place < table_rows;
    const row_values<T, Width> added = exists ? load_row<Width>(table.row(place) + c) : no_row<T, Width>();
    row_values<T, Width> values = load_row<Width>(x.row(m) + c);
    for (int i = 0; i < Width; ++i) values[i] += added[i];
    store_row<Width>(y.row(m) + c, values);
  });
}

template <class T>
void start_add_positions(const launch_site& site, row_array<const T> table, index_t table_rows,
                         const std::int32_t* places, index_t period, row_array<const T> x, row_array<T> y,
                         index_t rows, index_t columns) {
  with_width<T>(rows_in_vectors<T>(columns, table, x, y), [&](auto width) {
    launch(site, row_grid(rows, columns, width), add_positions_kernel<T, width>, table, table_rows, places,
           period, x, y, rows, columns);
  });
}

template <class T>
void add_positions(cudaStream_t stream, row_array<const T> table, index_t table_rows,
                   const std::int32_t* places, row_array<T> x, index_t rows, index_t columns) {
  start_add_positions<T>({stream, "add_positions"}, table, table_rows, places, 1, x, x, rows, columns);
}

template <class T>
void add_repeated(cudaStream_t stream, row_array<const T> table, index_t period, row_array<const T> x,
                  row_array<T> y, index_t rows, index_t columns) {
  start_add_positions<T>({stream, "add_repeated"}, table, period, nullptr, period, x, y, rows, columns);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                           \
  template void add_positions<T>(cudaStream_t, row_array<const T>, index_t, const std::int32_t*,            \
                                 row_array<T>, index_t, index_t);                                           \
  template void add_repeated<T>(cudaStream_t, row_array<const T>, index_t, row_array<const T>,              \
                                row_array<T>, index_t, index_t);
PUFFERFISH_INSTANTIATE(float)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
