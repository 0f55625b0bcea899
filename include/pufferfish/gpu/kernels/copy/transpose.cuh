// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernel of <pufferfish/gpu/kernels/copy/transpose.hpp>.

#include <pufferfish/gpu/kernels/copy/transpose.hpp>
#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Transposes tiles of 32 x 32 through shared memory, by 32 x 8 threads, so that both matrices are accessed
/// along their rows.
template <class T, class To>
static __global__ void __launch_bounds__(256)
    transpose_kernel(grid_dependency earlier, const T* from, index_t rows, index_t columns, To* to,
                     bool add) {
  earlier.wait();
  constexpr int side = 32, lines = 8;
  __shared__ T tile[side][side + 1];  // padded: a column's elements are in different banks
  const index_t column_tiles = ceil_div(columns, side);
  const index_t first_row = blockIdx.x / column_tiles * side, first_column = blockIdx.x % column_tiles * side;
  const int x = static_cast<int>(threadIdx.x) % side, y = static_cast<int>(threadIdx.x) / side;
  for (int i = y; i < side; i += lines) {
    if (first_row + i < rows && first_column + x < columns) {
      tile[i][x] = from[(first_row + i) * columns + first_column + x];
    }
  }
  __syncthreads();
  for (int i = y; i < side; i += lines) {
    if (first_column + i >= columns || first_row + x >= rows) continue;
    To& target = to[(first_column + i) * rows + first_row + x];
    const To value = static_cast<To>(tile[x][i]);
    target = add ? target + value : value;
  }
}

/// x of the grid counts tiles of 32 x 32, columns fastest. Of the 256 threads, thread t has column t % 32 and
/// every 8th row from t / 32 on.
inline grid transpose_grid(index_t rows, index_t columns) {
  return {dim3(static_cast<unsigned>(ceil_div(rows, 32) * ceil_div(columns, 32))), dim3(256)};
}

template <class T>
void transpose(cudaStream_t stream, const T* from, index_t rows, index_t columns, T* to) {
  launch(stream, transpose_grid(rows, columns), transpose_kernel<T, T>, from, rows, columns, to, false);
}

template <class T>
void transpose_wide(cudaStream_t stream, const T* from, index_t rows, index_t columns, accumulate_t<T>* to,
                    bool add) {
  launch(stream, transpose_grid(rows, columns), transpose_kernel<T, accumulate_t<T>>, from, rows, columns, to,
         add);
}

#define PUFFERFISH_INSTANTIATE(T)                                           \
  template void transpose<T>(cudaStream_t, const T*, index_t, index_t, T*); \
  template void transpose_wide<T>(cudaStream_t, const T*, index_t, index_t, accumulate_t<T>*, bool);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
