// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Numbers of threads and blocks, and reductions over a warp and a block in a fixed order.

#include <type_traits>

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNELS_BEGIN

// ---------------------------------------------------------------------------------------------------------
// Shares of work

/// a / b, rounded up. a >= 0, b > 0.
template <class I>
PUFFERFISH_HOST_DEVICE constexpr I ceil_div(I a, std::type_identity_t<I> b) {
  return static_cast<I>((a + b - 1) / b);
}

/// Number of blocks for `size` items, `per_block` a block, at most `most`: kernels have a grid-stride loop. 0
/// for size 0, which launch() takes as nothing to do.
inline unsigned blocks_for(index_t size, index_t per_block, unsigned most = 1U << 16) {
  const index_t blocks = ceil_div(size, per_block);
  return blocks < static_cast<index_t>(most) ? static_cast<unsigned>(blocks) : most;
}

/// The calling thread's number in a one-dimensional grid, and the number of threads: a grid-stride loop is
///   for (index_t i = grid_thread(); i < size; i += grid_threads())
__device__ inline index_t grid_thread() {
  return static_cast<index_t>(blockIdx.x) * static_cast<index_t>(blockDim.x) +
         static_cast<index_t>(threadIdx.x);
}
__device__ inline index_t grid_threads() {
  return static_cast<index_t>(gridDim.x) * static_cast<index_t>(blockDim.x);
}

/// The calling thread's number in its block, x fastest; the number of threads of a block.
__device__ inline int block_thread() {
  return static_cast<int>((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x);
}
__device__ inline int block_threads() { return static_cast<int>(blockDim.x * blockDim.y * blockDim.z); }

// ---------------------------------------------------------------------------------------------------------
// Reductions

inline constexpr unsigned all_lanes = 0xffffffffU;
inline constexpr int warp_threads = 32;

struct plus {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
/// The larger number; NaN if either is NaN.
struct maximum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b || a != a ? a : b;
  }
};

/// Combines the values of all 32 lanes; every lane receives the same bits. `combine` must be commutative.
template <class T, class F>
__device__ inline T warp_reduce(T value, F combine) {
  for (int distance = warp_threads / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(all_lanes, value, distance));
  }
  return value;
}

/// Combines the values of all threads of a block, in an order that depends on their number alone; every
/// thread receives the result. Whole warps only. `neutral` has no effect when combined. All threads of the
/// block must call it; it ends with a barrier.
template <class T, class F>
__device__ inline T block_reduce(T value, T neutral, F combine) {
  __shared__ T partial[warp_threads];
  const int thread = block_thread(), warps = block_threads() / warp_threads;
  value = warp_reduce(value, combine);
  if (warps == 1) return value;
  if (thread % warp_threads == 0) partial[thread / warp_threads] = value;
  __syncthreads();
  value = thread % warp_threads < warps ? partial[thread % warp_threads] : neutral;
  value = warp_reduce(value, combine);
  __syncthreads();  // before another call writes `partial`
  return value;
}

/// The sum or maximum over a warp or a block, in every thread; see warp_reduce and block_reduce.
template <class T>
__device__ inline T warp_sum(T value) {
  return warp_reduce(value, plus());
}
template <class T>
__device__ inline T block_sum(T value) {
  return block_reduce(value, T(0), plus());
}
template <class T>
__device__ inline T warp_max(T value) {
  return warp_reduce(value, maximum());
}
/// `lowest`: no greater than any value.
template <class T>
__device__ inline T block_max(T value, T lowest) {
  return block_reduce(value, lowest, maximum());
}

PUFFERFISH_KERNELS_END
