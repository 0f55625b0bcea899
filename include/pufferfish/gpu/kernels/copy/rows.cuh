// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of rows.hpp, with 16-byte accesses if the layout allows them.
///
/// A block works on whole rows: row m, then m + gridDim.x, and so on. Its threads, 32 to 256, have
/// neighbouring accesses of the row.

#include <cmath>

#include <pufferfish/gpu/kernels/copy/rows.hpp>
#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/reduce/columns.cuh>

PUFFERFISH_KERNELS_BEGIN

/// NaN: the value of elements that a table does not have. A kernel cannot throw an exception; the NaN makes
/// the caller's loss NaN instead.
template <class T>
__device__ inline T not_a_number() {
  return static_cast<T>(NAN);
}
/// A run of NaN.
template <class T, int Width>
__device__ inline row_values<T, Width> no_row() {
  row_values<T, Width> result;
  for (int i = 0; i < Width; ++i) result[i] = not_a_number<accumulate_t<T>>();
  return result;
}

/// Whether all rows of the matrices can be read and written in vectors: every row is aligned to 16 bytes and
/// has whole vectors. Null matrices are ignored.
template <class T, class... Rows>
bool rows_in_vectors(index_t columns, const Rows&... rows) {
  const auto fits = [](const auto& matrix) {
    return matrix.data == nullptr || (aligned16(matrix.data) && matrix.stride % vector_width<T> == 0);
  };
  return columns % vector_width<T> == 0 && (fits(rows) && ...);
}

/// Number of threads for a row of `columns` columns, `width` per access: whole warps, up to `most`.
inline unsigned row_threads(index_t columns, int width, int most = 256) {
  const index_t warps = ceil_div(columns, static_cast<index_t>(width * warp_threads));
  const index_t threads = (warps < 1 ? 1 : warps) * warp_threads;
  return static_cast<unsigned>(threads < most ? threads : most);
}
/// A grid with one block per row, up to a limit from which on blocks loop. `width`: elements of an access.
inline grid row_grid(index_t rows, index_t columns, int width) {
  return {dim3(columns == 0 ? 0U : blocks_for(rows, 1)), dim3(row_threads(columns, width))};
}

/// Calls f(column) for the first of each `Width` columns of a row, distributed over the threads of a block.
template <int Width, class F>
__device__ inline void for_each_column(index_t columns, F f) {
  for (index_t c = static_cast<index_t>(threadIdx.x) * Width; c < columns;
       c += static_cast<index_t>(blockDim.x) * Width) {
    f(c);
  }
}

/// Calls f(row, column) for each row, one block per row, and for each column that for_each_column selects.
template <int Width, class F>
__device__ inline void for_each_row(index_t rows, index_t columns, F f) {
  for (index_t m = static_cast<index_t>(blockIdx.x); m < rows; m += static_cast<index_t>(gridDim.x)) {
    for_each_column<Width>(columns, [&](index_t c) { f(m, c); });
  }
}

/// Grid: row_grid, a block per row; a thread has every blockDim.x-th access of Width columns.
template <class T, int Width>
static __global__ void scale_rows_kernel(grid_dependency earlier, accumulate_t<T> factor,
                                         row_array<const T> from, index_t rows, index_t columns,
                                         row_array<T> to) {
  earlier.wait();
  for_each_row<Width>(rows, columns, [&](index_t m, index_t c) {
    row_values<T, Width> values = load_row<Width>(from.row(m) + c);
    for (int i = 0; i < Width; ++i) values[i] *= factor;
    store_row<Width>(to.row(m) + c, values);
  });
}

/// The row number places[m], or m if `places` is nullptr.
__device__ inline index_t place_of(const index_t* places, index_t m) {
  return places == nullptr ? m : places[m];
}

/// Grid: row_grid. Row from_places[m] of `from` is copied to row to_places[m] of `to`, for m < rows.
template <class T, int Width>
static __global__ void move_rows_kernel(grid_dependency earlier, row_array<const T> from,
                                        const index_t* from_places, row_array<T> to, const index_t* to_places,
                                        index_t rows, index_t columns) {
  earlier.wait();
  for_each_row<Width>(rows, columns, [&](index_t m, index_t c) {
    store_row<Width>(to.row(place_of(to_places, m)) + c,
                     load_row<Width>(from.row(place_of(from_places, m)) + c));
  });
}

/// The whole number nearest to columns[j], or -1 if it is not in 0 .. width - 1.
template <class P>
__device__ inline index_t column_number(const P* columns, index_t j, index_t width) {
  const P number = columns[j] + P(0.5);
  return number >= P(0) && number < static_cast<P>(width) ? static_cast<index_t>(number) : index_t{-1};
}

/// Grid: row_grid over the columns of `to`.
template <class T>
static __global__ void gather_columns_kernel(grid_dependency earlier, row_array<const T> from, index_t width,
                                             const accumulate_t<T>* columns, index_t count, index_t rows,
                                             row_array<T> to) {
  earlier.wait();
  for_each_row<1>(rows, count, [&](index_t m, index_t j) {
    const index_t c = column_number(columns, j, width);
    store_row<1>(to.row(m) + j, c < 0 ? no_row<T, 1>() : load_row<1>(from.row(m) + c));
  });
}

/// Grid: row_grid over the columns of `to`. A block clears its row before it scatters to the row.
template <class T>
static __global__ void scatter_columns_kernel(grid_dependency earlier, row_array<const T> from,
                                              const accumulate_t<T>* columns, index_t count, index_t rows,
                                              index_t width, row_array<T> to, bool add) {
  earlier.wait();
  for (index_t m = static_cast<index_t>(blockIdx.x); m < rows; m += static_cast<index_t>(gridDim.x)) {
    if (!add) {
      for_each_column<1>(width, [&](index_t c) { store_row<1>(to.row(m) + c, row_values<T, 1>{}); });
      __syncthreads();
    }
    for_each_column<1>(count, [&](index_t j) {
      const index_t c = column_number(columns, j, width);
      if (c < 0) return;
      row_values<T, 1> value = load_row<1>(from.row(m) + j);
      if (add) value[0] += load_row<1>(static_cast<const T*>(to.row(m)) + c)[0];
      store_row<1>(to.row(m) + c, value);
    });
  }
}

/// Grid: row_grid. The threads of a block compare its row with all runs, then clear it together if it is in
/// none.
template <class T, int Width>
static __global__ void clear_rows_outside_kernel(grid_dependency earlier, run_arrays runs, row_array<T> x,
                                                 index_t rows, index_t columns) {
  earlier.wait();
  for (index_t m = static_cast<index_t>(blockIdx.x); m < rows; m += static_cast<index_t>(gridDim.x)) {
    int inside = 0;
    for (index_t s = static_cast<index_t>(threadIdx.x); s < runs.sequences;
         s += static_cast<index_t>(blockDim.x)) {
      if (m >= runs.first[s] && m < runs.first[s] + runs.count[s]) inside = 1;
    }
    if (block_max(inside, 0) != 0) continue;
    for_each_column<Width>(columns,
                           [&](index_t c) { store_row<Width>(x.row(m) + c, row_values<T, Width>{}); });
  }
}

template <class T>
void scale_rows(cudaStream_t stream, accumulate_t<T> factor, row_array<const T> from, index_t rows,
                index_t columns, row_array<T> to) {
  const launch_site site(stream, "scale_rows");
  with_width<T>(rows_in_vectors<T>(columns, from, to), [&](auto width) {
    launch(site, row_grid(rows, columns, width), scale_rows_kernel<T, width>, factor, from, rows, columns,
           to);
  });
}

/// The common part of gather_rows and scatter_rows. Places that are nullptr stand for row m itself.
template <class T>
void move_rows(const launch_site& site, row_array<const T> from, const index_t* from_places, row_array<T> to,
               const index_t* to_places, index_t rows, index_t columns) {
  with_width<T>(rows_in_vectors<T>(columns, from, to), [&](auto width) {
    launch(site, row_grid(rows, columns, width), move_rows_kernel<T, width>, from, from_places, to, to_places,
           rows, columns);
  });
}

template <class T>
void gather_rows(cudaStream_t stream, row_array<const T> from, const index_t* places, index_t rows,
                 index_t columns, row_array<T> to) {
  move_rows<T>({stream, "gather_rows"}, from, places, to, nullptr, rows, columns);
}
template <class T>
void scatter_rows(cudaStream_t stream, row_array<const T> from, const index_t* places, index_t rows,
                  index_t columns, row_array<T> to) {
  move_rows<T>({stream, "scatter_rows"}, from, nullptr, to, places, rows, columns);
}

template <class T>
void gather_columns(cudaStream_t stream, row_array<const T> from, index_t width,
                    const accumulate_t<T>* columns, index_t count, index_t rows, row_array<T> to) {
  launch(stream, row_grid(rows, count, 1), gather_columns_kernel<T>, from, width, columns, count, rows, to);
}
template <class T>
void scatter_columns(cudaStream_t stream, row_array<const T> from, const accumulate_t<T>* columns,
                     index_t count, index_t rows, index_t width, row_array<T> to, bool add) {
  launch(stream, row_grid(rows, width, 1), scatter_columns_kernel<T>, from, columns, count, rows, width, to,
         add);
}

template <class T>
void clear_rows_outside(cudaStream_t stream, const run_arrays& runs, row_array<T> x, index_t rows,
                        index_t columns) {
  const launch_site site(stream, "clear_rows_outside");
  with_width<T>(rows_in_vectors<T>(columns, x), [&](auto width) {
    launch(site, row_grid(rows, columns, width), clear_rows_outside_kernel<T, width>, runs, x, rows, columns);
  });
}

/// Grid: one thread per sequence, 128 a block.
static __global__ void make_runs_kernel(grid_dependency earlier, index_t sequences, index_t length,
                                        const index_t* lengths, index_t* first, index_t* count) {
  earlier.wait();
  for (index_t s = grid_thread(); s < sequences; s += grid_threads()) {
    first[s] = s * length;
    count[s] = lengths == nullptr ? length : lengths[s];
  }
}

void make_runs(cudaStream_t stream, index_t sequences, index_t length, const index_t* lengths, index_t* first,
               index_t* count) {
  launch(stream, {dim3(blocks_for(sequences, 128)), dim3(128)}, make_runs_kernel, sequences, length, lengths,
         first, count);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                     \
  template void scale_rows<T>(cudaStream_t, accumulate_t<T>, row_array<const T>, index_t, index_t,    \
                              row_array<T>);                                                          \
  template void gather_rows<T>(cudaStream_t, row_array<const T>, const index_t*, index_t, index_t,    \
                               row_array<T>);                                                         \
  template void scatter_rows<T>(cudaStream_t, row_array<const T>, const index_t*, index_t, index_t,   \
                                row_array<T>);                                                        \
  template void gather_columns<T>(cudaStream_t, row_array<const T>, index_t, const accumulate_t<T>*,  \
                                  index_t, index_t, row_array<T>);                                    \
  template void scatter_columns<T>(cudaStream_t, row_array<const T>, const accumulate_t<T>*, index_t, \
                                   index_t, index_t, row_array<T>, bool);                             \
  template void clear_rows_outside<T>(cudaStream_t, const run_arrays&, row_array<T>, index_t, index_t);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
