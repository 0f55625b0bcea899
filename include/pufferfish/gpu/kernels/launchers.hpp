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

/// Around launchers. Their visibility is hidden: each of two shared objects in a process calls the kernels
/// that it was linked with.
#define PUFFERFISH_KERNELS_BEGIN    \
  PUFFERFISH_STABLE_NAMESPACE_BEGIN \
  namespace gpu_kernels __attribute__((visibility("hidden"))) {
/// Around plain structs of launchers' signatures that classes may have as members: not hidden, since a
/// class must not be more visible than its members.
#define PUFFERFISH_KERNEL_TYPES_BEGIN \
  PUFFERFISH_STABLE_NAMESPACE_BEGIN   \
  namespace gpu_kernels {
#define PUFFERFISH_KERNELS_END \
  }                            \
  PUFFERFISH_STABLE_NAMESPACE_END
#define PUFFERFISH_KERNEL_TYPES_END PUFFERFISH_KERNELS_END

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Signed, as everywhere in the library.
using index_t = std::ptrdiff_t;

/// Type of computation, parameters and sums for numbers stored as T: float; double for double.
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
      layer_stream;    ///< substream(stream_id("layer"), step); a layer's is substream(this, its number)
  std::uint64_t step;  ///< steps done so far
};

PUFFERFISH_KERNEL_TYPES_END

// The alias pufferfish::gpu::kernels for the rest of the library. The namespaces differ, because `gpu`
// belongs to the namespace that depends on the flags.
PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace kernels = gpu_kernels;
}  // namespace gpu
PUFFERFISH_NAMESPACE_END
