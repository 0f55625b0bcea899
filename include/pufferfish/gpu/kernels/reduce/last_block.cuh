// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the last of several blocks continues with the results of all of them, without another launch.

#include <pufferfish/gpu/kernels/threads.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Returns true in all threads of the last of `blocks` blocks that call this function with the same counter,
/// false in the others. What the blocks have written to device memory before is then visible to the last one.
/// *counter must be 0 before the first call, and is 0 after the last one. All threads of a block must call
/// this function. Which block is the last one differs from run to run: its result must not depend on it.
__device__ inline bool is_last_block(unsigned* counter, unsigned blocks) {
  __syncthreads();
  bool last = false;
  if (block_thread() == 0) {
    __threadfence();  // orders the results of all threads of the block before the count
    last = atomicAdd(counter, 1U) + 1U == blocks;
    if (last) {
      *counter = 0;
      __threadfence();  // orders the counts of all blocks before the loads of their results
    }
  }
  return __syncthreads_or(last ? 1 : 0) != 0;
}

PUFFERFISH_KERNELS_END
