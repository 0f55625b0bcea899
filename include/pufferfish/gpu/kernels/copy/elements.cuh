// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of elements.hpp. Memory bandwidth limits their speed. Grids have one dimension and 256 threads a
/// block. A thread has one element per step, and loops if there are more elements. No kernel uses shared
/// memory.

#include <pufferfish/gpu/kernels/copy/elements.hpp>
#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// The grid of these kernels for `size` elements.
inline grid single_elements(index_t size) { return {blocks_for(size, 256), 256}; }

template <class T>
static __global__ void keep_marked_kernel(grid_dependency earlier, const std::uint64_t* words, index_t first,
                                          T* x, index_t size) {
  earlier.wait();
  for (index_t i = grid_thread(); i < size; i += grid_threads()) {
    const index_t bit = first + i;
    if ((words[bit / 64] >> static_cast<unsigned>(bit % 64) & 1U) == 0) x[i] = T(0);
  }
}
template <class T>
void keep_marked(cudaStream_t stream, const std::uint64_t* words, index_t first, T* x, index_t size) {
  launch(stream, single_elements(size), keep_marked_kernel<T>, words, first, x, size);
}

template <class T>
static __global__ void gather_elements_kernel(grid_dependency earlier, const T* from,
                                              const std::int32_t* places, T* to, index_t size) {
  earlier.wait();
  for (index_t i = grid_thread(); i < size; i += grid_threads()) to[i] = from[places[i]];
}
template <class T>
void gather_elements(cudaStream_t stream, const T* from, const std::int32_t* places, T* to, index_t size) {
  launch(stream, single_elements(size), gather_elements_kernel<T>, from, places, to, size);
}

template <class T>
static __global__ void scatter_elements_kernel(grid_dependency earlier, const T* from,
                                               const std::int32_t* places, T* to, index_t size) {
  earlier.wait();
  for (index_t i = grid_thread(); i < size; i += grid_threads()) to[places[i]] = from[i];
}
template <class T>
void scatter_elements(cudaStream_t stream, const T* from, const std::int32_t* places, T* to, index_t size) {
  launch(stream, single_elements(size), scatter_elements_kernel<T>, from, places, to, size);
}

template void keep_marked<float>(cudaStream_t, const std::uint64_t*, index_t, float*, index_t);
template void keep_marked<double>(cudaStream_t, const std::uint64_t*, index_t, double*, index_t);
template void gather_elements<float>(cudaStream_t, const float*, const std::int32_t*, float*, index_t);
template void gather_elements<double>(cudaStream_t, const double*, const std::int32_t*, double*, index_t);
template void scatter_elements<float>(cudaStream_t, const float*, const std::int32_t*, float*, index_t);
template void scatter_elements<double>(cudaStream_t, const double*, const std::int32_t*, double*, index_t);

PUFFERFISH_KERNELS_END
