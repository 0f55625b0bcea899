// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Numbers of threads and blocks, and reductions over a warp and a block in a fixed order.

#include <type_traits>

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNELS_BEGIN

// ---------------------------------------------------------------------------------------------------------
// Shares of work

/// a / b, rounded up, for a >= 0 and b > 0.
template <class I>
PUFFERFISH_HOST_DEVICE constexpr I ceil_div(I a, std::type_identity_t<I> b) {
  return static_cast<I>((a + b - 1) / b);
}

/// Number of blocks for `size` items, `per_block` items a block, at most `most` blocks. If there are more
/// items, the threads of a kernel loop (grid-stride loop). The result is 0 for size 0; launch() then does
/// nothing.
inline unsigned blocks_for(index_t size, index_t per_block, unsigned most = 1U << 16) {
  const index_t blocks = ceil_div(size, per_block);
  return blocks < static_cast<index_t>(most) ? static_cast<unsigned>(blocks) : most;
}

/// The calling thread's number in a one-dimensional grid. A grid-stride loop over all items is
///   for (index_t i = grid_thread(); i < size; i += grid_threads())
__device__ inline index_t grid_thread() {
  return static_cast<index_t>(blockIdx.x) * static_cast<index_t>(blockDim.x) +
         static_cast<index_t>(threadIdx.x);
}
/// The number of threads of a one-dimensional grid.
__device__ inline index_t grid_threads() {
  return static_cast<index_t>(gridDim.x) * static_cast<index_t>(blockDim.x);
}

/// The calling thread's number in its block; x varies fastest.
__device__ inline int block_thread() {
  return static_cast<int>((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x);
}
/// The number of threads of the calling thread's block.
__device__ inline int block_threads() { return static_cast<int>(blockDim.x * blockDim.y * blockDim.z); }

// ---------------------------------------------------------------------------------------------------------
// Reductions

/// Mask of all lanes of a warp.
inline constexpr unsigned all_lanes = 0xffffffffU;
inline constexpr int warp_threads = 32;

/// The sum of two values.
struct plus {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
/// The larger of two numbers; NaN if either is NaN.
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

/// Combines the values of all threads of a block, in an order that depends on the number of threads alone.
/// Every thread receives the result. `neutral` is a value that has no effect when combined. All threads of
/// the block, which must be whole warps, must call this function. It ends with a barrier.
///
///     const float largest = block_reduce(value, -HUGE_VALF, maximum());
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

/// The sum over a warp, in every lane; see warp_reduce.
template <class T>
__device__ inline T warp_sum(T value) {
  return warp_reduce(value, plus());
}
/// The sum over a block, in every thread; see block_reduce.
template <class T>
__device__ inline T block_sum(T value) {
  return block_reduce(value, T(0), plus());
}
/// The maximum over a block, in every thread; NaN if one value is NaN. `lowest`: a number that is not greater
/// than any value.
template <class T>
__device__ inline T block_max(T value, T lowest) {
  return block_reduce(value, lowest, maximum());
}

PUFFERFISH_KERNELS_END
