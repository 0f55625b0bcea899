// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of <pufferfish/gpu/kernels/embedding/positions.hpp>.

#include <pufferfish/gpu/kernels/copy/rows.cuh>
#include <pufferfish/gpu/kernels/embedding/positions.hpp>

PUFFERFISH_KERNELS_BEGIN

/// A thread computes one column of several rows, and the wavelength of the column once. Grid (columns /
/// threads, rows up to 256): thread x of block (bx, by) has column bx threads + x of the rows by, by +
/// gridDim.y, ...
template <class T>
static __global__ void add_positions_kernel(grid_dependency earlier, const std::int32_t* places,
                                            index_t length, row_array<const T> x, row_array<T> y,
                                            index_t rows, index_t columns) {
  earlier.wait();
  const index_t j = static_cast<index_t>(blockIdx.x) * static_cast<index_t>(blockDim.x) + threadIdx.x;
  if (j >= columns) return;
  const index_t even = j - j % 2;
  const double wave = pow(10000.0, static_cast<double>(even) / static_cast<double>(columns));
  for (index_t m = static_cast<index_t>(blockIdx.y); m < rows; m += static_cast<index_t>(gridDim.y)) {
    const double angle = static_cast<double>(places == nullptr ? m % length : places[m]) / wave;
    const auto added = static_cast<accumulate_t<T>>(j % 2 == 0 ? sin(angle) : cos(angle));
    y.row(m)[j] = static_cast<T>(static_cast<accumulate_t<T>>(x.row(m)[j]) + added);
  }
}

template <class T>
void add_positions(cudaStream_t stream, const std::int32_t* places, index_t length, row_array<const T> x,
                   row_array<T> y, index_t rows, index_t columns) {
  constexpr index_t most = 256;  // most blocks along the rows
  const unsigned threads = row_threads(columns, 1, 128);
  launch(stream,
         {dim3(static_cast<unsigned>(ceil_div(columns, static_cast<index_t>(threads))),
               static_cast<unsigned>(rows < most ? rows : most)),
          dim3(threads)},
         add_positions_kernel<T>, places, length, x, y, rows, columns);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                \
  template void add_positions<T>(cudaStream_t, const std::int32_t*, index_t, row_array<const T>, \
                                 row_array<T>, index_t, index_t);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
