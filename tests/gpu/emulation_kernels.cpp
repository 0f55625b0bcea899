// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Kernels that test the emulated device and what kernels share (launch.cuh).

#include <pufferfish/gpu/kernels/launch.cuh>

#include "emulation_kernels.hpp"

PUFFERFISH_KERNELS_BEGIN

static __global__ void scale_kernel(const float* x, float* y, index_t size, float factor) {
  for_each_vector<float>(
      size, aligned16(x, y),
      [=](index_t i) {
        vector<float> values = load_vector(x + i);
        for (int l = 0; l < vector_width<float>; ++l) values[l] *= factor;
        store_vector(y + i, values);
      },
      [=](index_t i) { y[i] = x[i] * factor; });
}

void test_scale(cudaStream_t stream, const float* x, float* y, index_t size, float factor) {
  launch(stream, {blocks_for(size, 4 * 128), 128}, scale_kernel, x, y, size, factor);
}

template <class T>
static __global__ void row_sum_kernel(const T* x, T* sums, index_t columns) {
  const T* row = x + static_cast<index_t>(blockIdx.x) * columns;
  T sum = 0;
  for (index_t i = threadIdx.x; i < columns; i += blockDim.x) sum += row[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

template <class T>
void test_row_sums(cudaStream_t stream, const T* x, T* sums, index_t rows, index_t columns, unsigned threads) {
  launch(stream, {static_cast<unsigned>(rows), threads}, row_sum_kernel<T>, x, sums, columns);
}
template void test_row_sums<float>(cudaStream_t, const float*, float*, index_t, index_t, unsigned);
template void test_row_sums<double>(cudaStream_t, const double*, double*, index_t, index_t, unsigned);

// Reverses a block's values through dynamic shared memory.
static __global__ void reverse_kernel(const float* x, float* y) {
  auto* values = dynamic_shared<float>();
  const unsigned t = threadIdx.x, base = blockIdx.x * blockDim.x;
  values[t] = x[base + t];
  __syncthreads();
  y[base + t] = values[blockDim.x - 1 - t];
}

void test_reverse(cudaStream_t stream, const float* x, float* y, int blocks, int threads, index_t shared_bytes) {
  launch(stream, {static_cast<unsigned>(blocks), static_cast<unsigned>(threads), static_cast<std::size_t>(shared_bytes)},
         reverse_kernel, x, y);
}

PUFFERFISH_KERNELS_END
