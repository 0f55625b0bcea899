// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Exceptions for failed CUDA calls, with the name of the call; number and choice of devices.
///
/// A check also clears the error that CUDA keeps for the thread, so that the next call does not report the
/// same failure again. (An error that has destroyed the CUDA context of the process, such as an access to an
/// invalid address in a kernel, is returned by all later calls as well.)

#include <cuda_runtime_api.h>

#include <string_view>

#include <pufferfish/core/message.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// Throws backend_error with the call's name and CUDA's message unless `status` is success.
inline void check(cudaError_t status, std::string_view call) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // the next call starts clean
  pufferfish::detail::throw_error<backend_error>(
      {call, ": ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")"});
}

/// Number of devices that the process can use; 0 also if there is no driver. Throws backend_error for every
/// other failure of CUDA.
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

/// Makes a device current in this thread: memory and networks that the thread makes from now on are on this
/// device. Throws backend_error if there is no such device.
inline void use_device(int number) { check(cudaSetDevice(number), "cudaSetDevice"); }

/// Number of the device to which the memory at this address belongs; -1 for memory of the host, pinned or
/// not. Throws backend_error if CUDA fails.
inline int device_of(const void* memory) {
  cudaPointerAttributes found{};
  check(cudaPointerGetAttributes(&found, memory), "cudaPointerGetAttributes");
  return found.type == cudaMemoryTypeDevice ? found.device : -1;
}

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
