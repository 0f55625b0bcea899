// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of launch_kernels.hpp.

#include <pufferfish/gpu/kernels/gemm/async_copy.cuh>
#include <pufferfish/gpu/kernels/gemm/mma.cuh>
#include <pufferfish/gpu/kernels/launch.cuh>

#include "launch_kernels.hpp"

PUFFERFISH_KERNELS_BEGIN

static __global__ void test_scale_kernel(const float* x, float* y, index_t size, float factor) {
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
  launch(stream, {blocks_for(size, 4 * 64, 20), 64}, test_scale_kernel, x, y, size, factor);
}

static __global__ void test_add_scalar_kernel(const float* x, float* y) { *y += *x; }

void test_add_scalar(cudaStream_t stream, const float* x, float* y) {
  launch(stream, {1, 1}, test_add_scalar_kernel, x, y);
}

__device__ inline void rotate(const float* x, float* y, index_t size, index_t by) {
#if defined(__CUDA_ARCH__)
  if (blockIdx.x % 5 == 0) __nanosleep(5000);  // so that a next kernel that does not wait reads old values
#endif
  const index_t i = grid_thread();
  if (i < size) y[i] = x[(i + by) % size] + 1.0F;
}
static __global__ void test_rotate_kernel(const float* x, float* y, index_t size, index_t by) {
  rotate(x, y, size, by);
}
static __global__ void test_rotate_itself_kernel(grid_dependency earlier, const float* x, float* y,
                                                 index_t size, index_t by) {
  earlier.wait();
  rotate(x, y, size, by);
}

void test_rotate(cudaStream_t stream, start_order order, const float* x, float* y, index_t size, index_t by) {
  const grid g{blocks_for(size, rotate_threads), rotate_threads, 100 * 1024};
  if (order == start_order::by_stream) {
    launch(stream, g, test_rotate_kernel, x, y, size, by);
  } else {
    launch(stream, g, test_rotate_itself_kernel, x, y, size, by);
  }
}

static __global__ void test_mean_kernel(grid_dependency earlier, const float* a, const float* b, float* y,
                                        index_t size) {
  earlier.wait();
  for (index_t i = grid_thread(); i < size; i += grid_threads()) y[i] = 0.5F * (a[i] + b[i]);
}

void test_mean(cudaStream_t stream, const float* a, const float* b, float* y, index_t size) {
  launch(stream, {blocks_for(size, 256), 256}, test_mean_kernel, a, b, y, size);
}

template <class T>
static __global__ void test_row_sums_kernel(const T* x, T* sums, T* maxima, index_t columns) {
  const T* row = x + static_cast<index_t>(blockIdx.x) * columns;
  T sum = 0, most = row[0];
  for (index_t i = threadIdx.x; i < columns; i += blockDim.x) {
    sum += row[i];
    most = maximum()(most, row[i]);
  }
  sum = block_sum(sum);
  most = block_max(most, row[0]);
  if (threadIdx.x != 0) return;
  sums[blockIdx.x] = sum;
  maxima[blockIdx.x] = most;
}

template <class T>
void test_row_sums(cudaStream_t stream, const T* x, T* sums, T* maxima, index_t rows, index_t columns,
                   int threads) {
  launch(stream, {static_cast<unsigned>(rows), static_cast<unsigned>(threads)}, test_row_sums_kernel<T>, x,
         sums, maxima, columns);
}
template void test_row_sums<float>(cudaStream_t, const float*, float*, float*, index_t, index_t, int);
template void test_row_sums<double>(cudaStream_t, const double*, double*, double*, index_t, index_t, int);

static __global__ void test_reverse_kernel(const float* x, float* y, index_t at) {
  auto* values = dynamic_shared<float>() + at;
  const unsigned t = threadIdx.x, base = blockIdx.x * blockDim.x;
  values[t] = x[base + t];
  __syncthreads();
  y[base + t] = values[blockDim.x - 1 - t];
}

// Uses the end of the shared memory.
void test_reverse(cudaStream_t stream, const float* x, float* y, int blocks, int threads,
                  index_t shared_bytes) {
  launch(
      stream,
      {static_cast<unsigned>(blocks), static_cast<unsigned>(threads), static_cast<std::size_t>(shared_bytes)},
      test_reverse_kernel, x, y, shared_bytes / 4 - threads);
}

static __global__ void test_warp_kernel(int* y) {
  const int lane = block_thread();
  y[lane] = __shfl_sync(all_lanes, lane, 5);
  y[32 + lane] = __shfl_sync(all_lanes, lane, lane + 3, 8);
  y[2 * 32 + lane] = __shfl_xor_sync(all_lanes, lane, 9);
  y[3 * 32 + lane] = __shfl_down_sync(all_lanes, lane, 6, 16);
  y[4 * 32 + lane] = __shfl_up_sync(all_lanes, lane, 6, 16);
  y[5 * 32 + lane] = static_cast<int>(__ballot_sync(all_lanes, lane % 3 == 0));
  y[6 * 32 + lane] = __any_sync(all_lanes, lane == 7) * 2 + __all_sync(all_lanes, lane < 31);
  if (lane < 16) {
    y[7 * 32 + lane] = __shfl_xor_sync(0xffffU, lane, 1);
  } else {
    __syncwarp(0xffff0000U);
    y[7 * 32 + lane] = __shfl_sync(0xffff0000U, lane, 16);
  }
}

void test_warp(cudaStream_t stream, int* y) { launch(stream, {1, 32}, test_warp_kernel, y); }

static __global__ void test_counts_kernel(int* counts) {
  atomicAdd(counts, 1);
  const int thread = block_thread(), threads = block_threads();
  const int odd = __syncthreads_count(thread % 2), any = __syncthreads_or(thread == threads - 1),
            all = __syncthreads_and(thread > 0), every = __syncthreads_and(thread >= 0);
  if (blockIdx.x == 0 && thread == threads / 2) {
    counts[1] = odd;
    counts[2] = any != 0;
    counts[3] = all != 0;
    counts[4] = every != 0;
  }
}

void test_counts(cudaStream_t stream, int* counts, int blocks, int threads) {
  launch(stream, {static_cast<unsigned>(blocks), static_cast<unsigned>(threads)}, test_counts_kernel, counts);
}

static __global__ void test_indices_kernel(int* y) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int i = static_cast<int>(block) * block_threads() + block_thread();
  y[i] = i;
}

void test_indices(cudaStream_t stream, int* y) {
  launch(stream, {{2, 3, 4}, {4, 3, 2}}, test_indices_kernel, y);
}

static __global__ void test_async_copies_kernel(const float* x, const int* mask, float* y, int tiles) {
  constexpr int slots = 3, tile = 4 * 64;
  __shared__ __align__(16) float ring[slots][tile];
  const int t = static_cast<int>(threadIdx.x);
  const auto start = [&](int n) {
    if (n < tiles) copy_async<16>(ring[n % slots] + 4 * t, x + n * tile + 4 * t, mask[n] != 0);
    commit_copies();
  };
  for (int n = 0; n < slots - 1; ++n) start(n);
  for (int n = 0; n < tiles; ++n) {
    wait_for_copies<slots - 2>();
    __syncthreads();
    start(n + slots - 1);
    // What another thread has copied.
    for (int i = 0; i < 4; ++i) y[n * tile + i * 64 + 63 - t] = ring[n % slots][i * 64 + 63 - t];
  }
}

void test_async_copies(cudaStream_t stream, const float* x, const int* mask, float* y, int tiles) {
  launch(stream, {1, 64}, test_async_copies_kernel, x, mask, y, tiles);
}

template <class T>
static __global__ void test_mma_kernel(const void* a, const void* b, float* c, bool by_load_matrices) {
  // Rows of a and columns of b are 8 words each.
  __shared__ __align__(16) std::uint32_t a_words[16][8], b_words[8][8];
  const int lane = block_thread(), g = lane / 4, t = lane % 4;
  for (int i = lane; i < 16 * 8; i += warp_threads)
    a_words[i / 8][i % 8] = static_cast<const std::uint32_t*>(a)[i];
  for (int i = lane; i < 8 * 8; i += warp_threads)
    b_words[i / 8][i % 8] = static_cast<const std::uint32_t*>(b)[i];
  __syncwarp();
  std::uint32_t left[4], right[4];
  if (by_load_matrices) {
    load_matrices(left, &a_words[lane % 16][lane / 16 * 4]);
    load_matrices(right, &b_words[lane % 8][lane / 8 % 2 * 4]);  // its second half says the same again
  } else {
    left[0] = a_words[g][t];
    left[1] = a_words[g + 8][t];
    left[2] = a_words[g][t + 4];
    left[3] = a_words[g + 8][t + 4];
    right[0] = b_words[g][t];
    right[1] = b_words[g][t + 4];
  }
  if constexpr (std::is_same_v<T, float>) {
    for (std::uint32_t& word : left) word = to_tf32(word);
    for (int i = 0; i < 2; ++i) right[i] = to_tf32(right[i]);
  }
  const std::uint32_t pair[2] = {right[0], right[1]};
  float sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = c[(g + i / 2 * 8) * 8 + t * 2 + i % 2];
  mma<T>(sum, left, pair);
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = sum[i];
}

void test_mma(cudaStream_t stream, int kind, bool by_load_matrices, const void* a, const void* b, float* c) {
  const auto kernel = kind == 0   ? test_mma_kernel<float>
                      : kind == 1 ? test_mma_kernel<__nv_bfloat16>
                                  : test_mma_kernel<__half>;
  launch(stream, {1, 32}, kernel, a, b, c, by_load_matrices);
}

static __global__ void test_transposed_kernel(const std::uint16_t* x, std::uint32_t* y) {
  __shared__ __align__(16) std::uint16_t rows[32][8];
  const int lane = block_thread();
  for (int i = 0; i < 8; ++i) rows[lane][i] = x[lane * 8 + i];
  __syncwarp();
  std::uint32_t words[4];
  load_matrices<true>(words, rows[lane]);
  for (int i = 0; i < 4; ++i) y[lane * 4 + i] = words[i];
}

void test_transposed(cudaStream_t stream, const std::uint16_t* x, std::uint32_t* y) {
  launch(stream, {1, 32}, test_transposed_kernel, x, y);
}

PUFFERFISH_KERNELS_END
