// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels that start while the previous kernel of the stream still runs, and wait for its end themselves.
/// CUDA's name is programmatic dependent launch (CUDA C++ Programming Guide).

#include <atomic>

#include <pufferfish/gpu/kernels/overlap.hpp>

PUFFERFISH_KERNELS_BEGIN

/// First parameter of a kernel that waits for earlier work of its stream itself; `launch` passes this
/// parameter. The kernel's first statement must be wait(): in every thread, before any access to global
/// memory, and before any return. All kernels of the library have this parameter.
///
///     static __global__ void twice_kernel(grid_dependency earlier, float* x, index_t size) {
///       earlier.wait();
///       for (index_t i = grid_thread(); i < size; i += grid_threads()) x[i] *= 2.0F;
///     }
///     launch(stream, {blocks_for(size, 256), 256}, twice_kernel, x, size);
///
/// - When all blocks of the previous kernel have called wait() or ended, blocks of this kernel may start on
///   free places of the multiprocessors, so that the latency of the launch is hidden. At this time no block
///   of the previous kernel needs such a place any more.
/// - wait() returns when the previous kernel has ended and its writes are visible. Because the previous
///   kernel has waited in the same way, all earlier work of the stream has ended, too.
/// - All other work in a stream (copies, events, host functions, graphs, kernels without the parameter)
///   starts after the end of the kernel before it, as without overlap, and this kernel starts after the end
///   of such work. Kernels of NVIDIA's libraries that overlap must wait in the same way.
/// - In a captured graph, wait() waits for all kernels on which this one depends, also for those of other
///   streams.
struct grid_dependency {
  /// Waits until all earlier work of the stream has ended. Before compute capability 9.0 this function does
  /// nothing, because the kernel has started after that work.
  __device__ void wait() const {
#if defined(PUFFERFISH_EMULATED_DEVICE)
    emulated_device::wait_for_earlier_work();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  }
};

/// Whether the first of a kernel's parameters P is a grid_dependency.
template <class... P>
inline constexpr bool waits_itself = false;
template <class... P>
inline constexpr bool waits_itself<grid_dependency, P...> = true;

#if !defined(PUFFERFISH_EMULATED_DEVICE)
/// Whether a kernel with a grid_dependency may overlap the previous kernel on the current device. Two
/// conditions must hold: overlap_launches() allows overlap, and the kernel's code was compiled for compute
/// capability 9.0 or later. Older code, which newer devices execute after compiling its PTX, does not wait.
/// The first kernel examined on a device decides for all kernels, so files with such kernels must be compiled
/// for the same architectures as the library's kernels.
inline bool may_overlap(const void* kernel) {
  enum : signed char { unknown, yes, no };
  static std::atomic<signed char> waits[64];  // state of each device
  int device = 0;
  if (!launches_overlap()) return false;
  if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return false;
  signed char now = waits[device].load(std::memory_order_relaxed);
  if (now == unknown) {
    cudaFuncAttributes of{};
    if (cudaFuncGetAttributes(&of, kernel) != cudaSuccess) return false;  // the launch fails, too
    now = of.ptxVersion >= 90 ? yes : no;
    waits[device].store(now, std::memory_order_relaxed);
  }
  return now == yes;
}
#endif

PUFFERFISH_KERNELS_END
