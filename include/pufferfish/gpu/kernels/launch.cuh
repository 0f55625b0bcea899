// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Common parts of all kernels: launches, and accesses of 16 bytes. Also provides the declarations of
/// threads.cuh.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include <pufferfish/core/error.hpp>
#include <pufferfish/gpu/kernels/launchers.hpp>
#include <pufferfish/gpu/kernels/overlap.cuh>
#include <pufferfish/gpu/kernels/threads.cuh>

PUFFERFISH_KERNELS_BEGIN

// ---------------------------------------------------------------------------------------------------------
// Launch

/// Blocks and threads of a launch: `{blocks, threads}` or `{{columns, rows}, threads, shared_bytes}`.
/// gridDim.x is below 2^31; gridDim.y and gridDim.z are below 65536. A block has at most 1024 threads.
struct grid {
  dim3 blocks;
  dim3 threads;
  std::size_t shared_bytes = 0;  ///< dynamic shared memory of each block
};

/// The stream of a launch, and the name and position of the launcher's source, for error messages. A stream
/// converts to a launch_site, which then has the position of the conversion.
struct launch_site {
  launch_site(cudaStream_t stream_of_launch, const char* function_of_caller = __builtin_FUNCTION(),
              const char* file_of_caller = __builtin_FILE(), int line_of_caller = __builtin_LINE())
      : stream(stream_of_launch), function(function_of_caller), file(file_of_caller), line(line_of_caller) {}

  cudaStream_t stream;
  const char* function;
  const char* file;
  int line;
};

/// Throws backend_error with the launcher's name, blocks, threads, bytes of shared memory and CUDA's message.
[[noreturn]] inline void launch_failed(const launch_site& site, const grid& g, cudaError_t error) {
  const auto text = [](dim3 n) {
    return std::to_string(n.x) + " x " + std::to_string(n.y) + " x " + std::to_string(n.z);
  };
  PUFFERFISH_THROW(backend_error(
      std::string(site.function) + ": launch of " + text(g.blocks) + " blocks of " + text(g.threads) +
      " threads with " + std::to_string(g.shared_bytes) +
      " bytes of shared memory failed: " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")"));
}

#if !defined(PUFFERFISH_EMULATED_DEVICE)
/// Allows a kernel `bytes` bytes of dynamic shared memory. The limit belongs to the
/// function, for all threads and graphs of the process, so it is never lowered. If it is too
/// low, it is raised to the largest possible value.
inline cudaError_t allow_shared_memory(const void* function, std::size_t bytes) {
  cudaFuncAttributes of{};
  cudaError_t error = cudaFuncGetAttributes(&of, function);
  if (error != cudaSuccess || static_cast<std::size_t>(of.maxDynamicSharedSizeBytes) >= bytes) return error;
  int device = 0, most = 0;
  error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              most - static_cast<int>(of.sharedSizeBytes));
}

/// Starts a kernel on a stream and returns CUDA's error code. `waits`: the kernel's first parameter is a
/// grid_dependency, so the kernel may overlap the one before. `together`: all blocks run at once. Allows more
/// than 48 KB of shared memory where `g` asks for it.
inline cudaError_t start_kernel(const void* kernel, const grid& g, cudaStream_t stream, void** arguments,
                                bool waits, bool together) {
  if (g.shared_bytes > 48 * 1024) {
    const cudaError_t error = allow_shared_memory(kernel, g.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attribute{};
  if (together) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = g.blocks;
  config.blockDim = g.threads;
  config.dynamicSmemBytes = g.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = together || (waits && may_overlap(kernel)) ? 1 : 0;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}
#endif

/// Starts a kernel on a stream; does nothing if the grid is empty. The arguments are converted to the
/// kernel's parameters. A kernel whose first parameter is a grid_dependency may start before earlier work of
/// the stream has ended; that parameter is not among the arguments. A kernel that needs more than 48 KB of
/// shared memory gets a higher limit. Throws backend_error, which names the calling launcher.
///
/// A host that executes kernels itself, as the tests do to run kernels without a device, defines
/// PUFFERFISH_EMULATED_DEVICE and, in namespace emulated_device,
///   cudaError_t launch(cudaStream_t, const char* name, dim3 blocks, dim3 threads, std::size_t shared_bytes,
///                      bool together, body), where body() executes one thread,
///   void* dynamic_shared_memory(), void check_aligned16(const void*),
///   void wait_for_earlier_work(), called by grid_dependency::wait(), and void check_waited(), called at the
///                      end of each thread that must have called wait(),
/// and replacements of the PTX in gpu/kernels/gemm/async_copy.cuh and gpu/kernels/gemm/mma.cuh.
///
///     static __global__ void twice_kernel(float* x, index_t size) {
///       for (index_t i = grid_thread(); i < size; i += grid_threads()) x[i] *= 2.0F;
///     }
///     void twice(cudaStream_t stream, float* x, index_t size) {
///       launch(stream, {blocks_for(size, 256), 256}, twice_kernel, x, size);
///     }
template <bool Together = false, class... P>
void launch(launch_site site, grid g, void (*kernel)(P...), std::type_identity_t<P>... arguments) {
  if (g.blocks.x == 0 || g.blocks.y == 0 || g.blocks.z == 0) return;
#if defined(PUFFERFISH_EMULATED_DEVICE)
  const cudaError_t error =
      emulated_device::launch(site.stream, site.function, g.blocks, g.threads, g.shared_bytes, Together, [=] {
        kernel(arguments...);
        if constexpr (waits_itself<P...>) emulated_device::check_waited();
      });
#else
  void* pointers[sizeof...(P) + 1] = {static_cast<void*>(&arguments)..., nullptr};
  const cudaError_t error = start_kernel(reinterpret_cast<const void*>(kernel), g, site.stream, pointers,
                                         waits_itself<P...>, Together);
#endif
  if (error != cudaSuccess) {
    (void)cudaGetLastError();  // reported here, so not again by the next call
    launch_failed(site, g, error);
  }
}
/// Starts a kernel that waits for earlier work itself; see above.
template <class... P>
void launch(launch_site site, grid g, void (*kernel)(grid_dependency, P...),
            std::type_identity_t<P>... arguments) {
  launch<false, grid_dependency, P...>(site, g, kernel, grid_dependency(), arguments...);
}
/// A cooperative launch: all blocks run at once, so that they may wait for each other (grid_barrier.cuh). It
/// never overlaps earlier work. Throws backend_error, too, if the device has no room for all blocks.
template <class... P>
void launch_together(launch_site site, grid g, void (*kernel)(grid_dependency, P...),
                     std::type_identity_t<P>... arguments) {
  launch<true, grid_dependency, P...>(site, g, kernel, grid_dependency(), arguments...);
}

/// The block's dynamic shared memory, aligned to 16 bytes.
template <class T>
__device__ inline T* dynamic_shared() {
#if defined(PUFFERFISH_EMULATED_DEVICE)
  return static_cast<T*>(emulated_device::dynamic_shared_memory());
#else
  extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
  return reinterpret_cast<T*>(dynamic_shared_memory);
#endif
}

// ---------------------------------------------------------------------------------------------------------
// Numbers

/// The element types for which kernels are compiled. A program that needs fewer types, and a shorter
/// compilation, defines the macro before it includes the kernels.
#ifndef PUFFERFISH_DEVICE_TYPES
#define PUFFERFISH_DEVICE_TYPES(use) use(float) use(__nv_bfloat16) use(__half)
#endif

// ---------------------------------------------------------------------------------------------------------
// 16-byte accesses

/// Number of elements of type T in an access of 16 bytes.
template <class T>
inline constexpr int vector_width = static_cast<int>(16 / sizeof(T));

/// A run of vector_width elements, as it is stored in memory: 4 floats, or 8 numbers of 16 bits.
template <class T>
struct alignas(16) vector {
  T values[vector_width<T>];
  PUFFERFISH_HOST_DEVICE T& operator[](int i) { return values[i]; }
  PUFFERFISH_HOST_DEVICE const T& operator[](int i) const { return values[i]; }
};

/// Whether each of the addresses is a multiple of 16. Parameters are packed in arenas, so their addresses may
/// be others.
template <class... P>
PUFFERFISH_HOST_DEVICE inline bool aligned16(const P*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) | ... | std::uintptr_t{0}) & 15U) == 0;
}

/// Whether consecutive rows of `count` elements, the first of which are at these addresses, can all be read
/// and written in vectors.
template <class T, class... P>
PUFFERFISH_HOST_DEVICE inline bool whole_vectors(index_t count, const P*... pointers) {
  return count % vector_width<T> == 0 && aligned16(pointers...);
}

/// Calls f with the number of elements per access as an integral constant: vector_width<T> if `vectors` is
/// true, else 1.
template <class T, class F>
void with_width(bool vectors, F f) {
  if (vectors) {
    f(std::integral_constant<int, vector_width<T>>());
  } else {
    f(std::integral_constant<int, 1>());
  }
}

/// Reads 16 bytes of device or shared memory. The address must be a multiple of 16.
template <class T>
__device__ inline vector<T> load_vector(const T* from) {
#if defined(PUFFERFISH_EMULATED_DEVICE)
  emulated_device::check_aligned16(from);  // the host itself allows any address
#endif
  return *reinterpret_cast<const vector<T>*>(from);
}
/// Writes 16 bytes of device or shared memory. The address must be a multiple of 16.
template <class T>
__device__ inline void store_vector(T* to, const vector<T>& value) {
#if defined(PUFFERFISH_EMULATED_DEVICE)
  emulated_device::check_aligned16(to);
#endif
  *reinterpret_cast<vector<T>*>(to) = value;
}

/// Stores values in the device's memory if `inside` is true, by one store of 4, 8 or 16 bytes. The address
/// must be a multiple of the size of V. The store is written in PTX, because for values that were narrowed or
/// computed in loops the compiler makes one store per element and a branch for the condition.
template <class V>
__device__ inline void store_global(void* to, const V& values, bool inside = true) {
#if defined(PUFFERFISH_EMULATED_DEVICE)
  if (inside) *static_cast<V*>(to) = values;
#else
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
  std::uint32_t words[sizeof(V) / 4];
  memcpy(words, &values, sizeof(V));
  const auto address = __cvta_generic_to_global(to);
  const int stores = inside ? 1 : 0;
#define PUFFERFISH_STORE_IF(store) "{ .reg .pred inside; setp.ne.s32 inside, %0, 0; @inside " store "; }"
  if constexpr (sizeof(V) == 16) {
    asm volatile(PUFFERFISH_STORE_IF("st.global.v4.b32 [%1], {%2, %3, %4, %5}")::"r"(stores), "l"(address),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  } else if constexpr (sizeof(V) == 8) {
    asm volatile(PUFFERFISH_STORE_IF("st.global.v2.b32 [%1], {%2, %3}")::"r"(stores), "l"(address),
                 "r"(words[0]), "r"(words[1])
                 : "memory");
  } else {
    asm volatile(PUFFERFISH_STORE_IF("st.global.b32 [%1], %2")::"r"(stores), "l"(address), "r"(words[0])
                 : "memory");
  }
#undef PUFFERFISH_STORE_IF
#endif
}

/// Distributes the elements 0 .. size - 1 over a one-dimensional grid. Calls by_vector(i) for whole groups i
/// .. i + vector_width<T> - 1, and by_element(i) for each element after the last whole group, or for all
/// elements if `vectors` is false. Of N threads, thread t gets the groups that begin at t width, (t + N)
/// width, ..., and every N-th of the single elements. `vectors` requires arrays that are aligned to 16 bytes.
template <class T, class V, class E>
__device__ inline void for_each_vector(index_t size, bool vectors, V by_vector, E by_element) {
  constexpr index_t width = vector_width<T>;
  const index_t in_vectors = vectors ? size / width * width : 0;
  for (index_t i = grid_thread() * width; i < in_vectors; i += grid_threads() * width) by_vector(i);
  for (index_t i = in_vectors + grid_thread(); i < size; i += grid_threads()) by_element(i);
}

PUFFERFISH_KERNELS_END
