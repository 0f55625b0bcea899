// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of <pufferfish/gpu/kernels/step.hpp>.

#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/step.hpp>

PUFFERFISH_KERNELS_BEGIN

/// Grid: one thread.
static __global__ void store_step_values_kernel(grid_dependency earlier, step_values* to,
                                                step_values values) {
  earlier.wait();
  *to = values;
}

/// Grid: one thread per element, 256 threads a block; threads loop if there are more elements.
template <class T>
static __global__ void fill_rows_kernel(grid_dependency earlier, const T* row, T* y, index_t size,
                                        index_t columns, index_t step, bool add) {
  earlier.wait();
  using A = accumulate_t<T>;
  for (index_t i = grid_thread(); i < size; i += grid_threads()) {
    const index_t m = i / columns, n = i % columns;
    const T value = row == nullptr ? T(0) : row[n];
    T& to = y[m * step + n];
    to = add ? static_cast<T>(static_cast<A>(to) + static_cast<A>(value)) : value;
  }
}

void store_step_values(cudaStream_t stream, step_values* to, const step_values& values) {
  launch(stream, {1, 1}, store_step_values_kernel, to, values);
}

template <class T>
void fill_rows(cudaStream_t stream, const T* row, T* y, index_t rows, index_t columns, index_t step,
               bool add) {
  const index_t size = rows * columns;
  if (size > 0)
    launch(stream, {blocks_for(size, 256), 256}, fill_rows_kernel<T>, row, y, size, columns, step, add);
}

#define PUFFERFISH_INSTANTIATE(T) \
  template void fill_rows<T>(cudaStream_t, const T*, T*, index_t, index_t, index_t, bool);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE
template void fill_rows<double>(cudaStream_t, const double*, double*, index_t, index_t, index_t, bool);

PUFFERFISH_KERNELS_END
