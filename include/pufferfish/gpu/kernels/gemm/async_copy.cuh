// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Copies from device memory to shared memory in the background (cp.async, from compute capability 8.0 on). A
/// thread starts copies, closes a group of them, computes, and waits until all but its last groups have
/// arrived. A barrier then makes them visible to the other threads of the block.
///
/// Order of use: copy_async (any number of times), commit_copies, ... , wait_for_copies, then __syncthreads.

#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Starts a copy of 4, 8 or 16 bytes to shared memory if `inside` is true, else writes zeros without reading
/// `from`. Both addresses must be multiples of Bytes. Copies of 16 bytes bypass the L1 cache, unless `Again`
/// says that the same bytes are read again soon.
template <int Bytes, bool Again = false>
__device__ inline void copy_async(void* to, const void* from, bool inside = true) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16);
#if defined(PUFFERFISH_EMULATED_DEVICE)
  emulated_device::copy_async(to, from, Bytes, inside);
#else
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int read = inside ? Bytes : 0;
  if constexpr (Bytes == 16 && !Again) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(read)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(Bytes),
                 "r"(read)
                 : "memory");
  }
#endif
}

/// Closes the calling thread's group of copies, which may be empty.
__device__ inline void commit_copies() {
#if defined(PUFFERFISH_EMULATED_DEVICE)
  emulated_device::commit_copies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// Waits until all of the calling thread's groups except the last `Under` ones have arrived.
template <int Under>
__device__ inline void wait_for_copies() {
#if defined(PUFFERFISH_EMULATED_DEVICE)
  emulated_device::wait_for_copies(Under);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(Under) : "memory");
#endif
}

PUFFERFISH_KERNELS_END
