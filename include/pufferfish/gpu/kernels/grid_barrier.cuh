// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// A barrier of all blocks of a cooperative launch.

#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// A barrier that all threads of all blocks of a grid reach. What a thread wrote to device memory before
/// wait() can be read by all threads after it, by loads that do not use the L1 cache (__ldcg). The grid must
/// be started by launch_together(), and its kernel must have no static shared memory (the emulated device has
/// one for all blocks).
///
///     grid_barrier barrier(counters);
///     ...                       // writes
///     barrier.wait();
///     ...                       // reads of what other blocks wrote
///     barrier.finish();         // at the end of the kernel
class grid_barrier {
 public:
  /// `counters`: two counters in device memory, which are zero before and after the kernel.
  __device__ explicit grid_barrier(unsigned* counters) : counters_(counters) {}

  /// Waits for all threads of the grid.
  __device__ void wait() {
#if defined(PUFFERFISH_EMULATED_DEVICE)
    emulated_device::grid_barrier();
#else
    passed_ += gridDim.x;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(counters_, 1U);
      while (arrived() < passed_) {
      }
      __threadfence();
    }
    __syncthreads();
#endif
  }

  /// Sets the counters to zero when all blocks have called it. No wait() may follow.
  __device__ void finish() {
#if !defined(PUFFERFISH_EMULATED_DEVICE)
    if (threadIdx.x == 0 && atomicAdd(counters_ + 1, 1U) == gridDim.x - 1) {
      counters_[0] = 0;
      counters_[1] = 0;
    }
#endif
  }

 private:
#if !defined(PUFFERFISH_EMULATED_DEVICE)
  __device__ unsigned arrived() const {
    unsigned count;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counters_) : "memory");
    return count;
  }
#endif

  unsigned* counters_;
  unsigned passed_ = 0;
};

PUFFERFISH_KERNELS_END
