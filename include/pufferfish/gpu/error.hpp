// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Failures of CUDA calls as exceptions that name the call; whether there is a device.

#include <cuda_runtime_api.h>

#include <string_view>

#include <pufferfish/core/message.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// Throws backend_error with the call's name and CUDA's words unless `status` is success.
inline void check(cudaError_t status, std::string_view call) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // the next call starts clean
  pufferfish::detail::throw_error<backend_error>(
      {call, ": ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")"});
}

/// How many devices the process can use; 0 where there is no driver, too.
inline int device_count() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  check(status, "cudaGetDeviceCount");
  return count;
}

/// Makes a device current in this thread: what it makes from now on, networks and memory too, lies there.
/// Throws backend_error where there is no such device.
inline void use_device(int number) { check(cudaSetDevice(number), "cudaSetDevice"); }

/// The device that memory lies on; -1: on none.
inline int device_of(const void* memory) {
  cudaPointerAttributes found{};
  check(cudaPointerGetAttributes(&found, memory), "cudaPointerGetAttributes");
  return found.type == cudaMemoryTypeDevice ? found.device : -1;
}

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
