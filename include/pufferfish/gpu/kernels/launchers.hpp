// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The base of the declarations of all launchers. A launcher is a host function that starts a kernel. Any
/// compiler reads its declaration; the one .cu file of a program (`<pufferfish/gpu/kernels.cuh>`) has its
/// definition. The two sides may be compiled by two compilers with different flags. So signatures have
/// built-in types, pointers, `cudaStream_t` and the plain structs of these headers, and the namespace depends
/// neither on the assertion level nor on the instruction set.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include <pufferfish/core/config.hpp>

/// Opens the namespace of launchers. Its visibility is hidden, so that each of two shared objects in a
/// process calls the kernels that it was linked with.
#define PUFFERFISH_KERNELS_BEGIN    \
  PUFFERFISH_STABLE_NAMESPACE_BEGIN \
  namespace gpu_kernels __attribute__((visibility("hidden"))) {
/// Opens the namespace of plain structs that occur in launchers' signatures and may be members of classes.
/// The namespace is not hidden, because a class must not be more visible than its members.
#define PUFFERFISH_KERNEL_TYPES_BEGIN \
  PUFFERFISH_STABLE_NAMESPACE_BEGIN   \
  namespace gpu_kernels {
#define PUFFERFISH_KERNELS_END \
  }                            \
  PUFFERFISH_STABLE_NAMESPACE_END
#define PUFFERFISH_KERNEL_TYPES_END PUFFERFISH_KERNELS_END

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Signed integer type of sizes and positions, the same as elsewhere in the library.
using index_t = std::ptrdiff_t;

/// Type in which kernels compute with numbers stored as T, and in which parameters and sums are stored:
/// double for double, else float.
template <class T>
struct accumulate {
  using type = float;
};
template <>
struct accumulate<double> {
  using type = double;
};
template <class T>
using accumulate_t = typename accumulate<T>::type;

/// Numbers that change from step to step, in device memory, so that a captured graph reads new values at
/// every replay. The host writes them before a step, in the order of the step's stream.
struct step_values {
  std::uint64_t seed;  ///< seed of all random streams of the run
  std::uint64_t
      /// substream(stream_id("layer"), step). Layer n has the stream substream(layer_stream, n)
      layer_stream;
  std::uint64_t step;  ///< number of steps done so far
};

PUFFERFISH_KERNEL_TYPES_END

// The alias pufferfish::gpu::kernels for the rest of the library. The namespaces differ, because `gpu`
// belongs to the namespace that depends on the flags.
PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace kernels = gpu_kernels;
}  // namespace gpu
PUFFERFISH_NAMESPACE_END
