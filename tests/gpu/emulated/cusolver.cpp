// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The part of cuSOLVER's C interface that the library uses, for the emulated device: symmetric eigensolvers,
/// by the library's for the host.

#include <cusolverDn.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <vector>

#include <pufferfish/linalg/svd/symmetric_eigen.hpp>

#include "device.hpp"

struct cusolverDnContext {
  cudaStream_t stream = nullptr;
};

namespace {

using pufferfish::index_t;

// LAPACK's order: eigenvalues ascend, column i is the eigenvector of the i-th.
void decompose(index_t n, double* a, index_t step, double* values, int* info, bool upper) {
  std::vector<double> matrix(static_cast<std::size_t>(n * n));
  for (index_t i = 0; i < n; ++i) {
    for (index_t j = 0; j <= i; ++j) {
      const double value =
          upper ? a[i * step + j] : a[j * step + i];  // element (j, i), or (i, j), of columns
      matrix[static_cast<std::size_t>(i * n + j)] = value;
    }
  }
  const pufferfish::symmetric_eigen eigen(pufferfish::tensor_view<const double, 2>(matrix.data(), {n, n}));
  const auto vectors = eigen.vectors(n);
  for (index_t i = 0; i < n; ++i) {
    values[i] = eigen.values()[static_cast<std::size_t>(n - 1 - i)];
    for (index_t k = 0; k < n; ++k) a[i * step + k] = vectors(n - 1 - i, k);
  }
  *info = 0;
}

bool on_device(const void* memory, std::size_t bytes) {
  return emulated_device::kind_of(memory, bytes) == emulated_device::kind::device;
}

cusolverStatus_t submit(cusolverDnHandle_t handle, cusolverEigMode_t mode, cublasFillMode_t side, int n,
                        double* a, int step, double* values, double* work, int work_size, int* info) {
  const std::lock_guard<std::recursive_mutex> locked(emulated_device::device_lock());
  if (handle == nullptr) return CUSOLVER_STATUS_NOT_INITIALIZED;
  if (mode != CUSOLVER_EIG_MODE_VECTOR || n < 0 || step < std::max(1, n) || work_size < 3 * n) {
    return CUSOLVER_STATUS_INVALID_VALUE;
  }
  if (n == 0) return CUSOLVER_STATUS_SUCCESS;
  const auto count = static_cast<std::size_t>(n);
  if (!on_device(a, ((count - 1) * static_cast<std::size_t>(step) + count) * sizeof(double)) ||
      !on_device(values, count * sizeof(double)) || !on_device(info, sizeof(int)) ||
      !on_device(work, static_cast<std::size_t>(work_size) * sizeof(double))) {
    return CUSOLVER_STATUS_INVALID_VALUE;
  }
  const bool upper = side == CUBLAS_FILL_MODE_UPPER;
  const cudaError_t error =
      emulated_device::submit(handle->stream, "syevd", [=] { decompose(n, a, step, values, info, upper); });
  return error == cudaSuccess ? CUSOLVER_STATUS_SUCCESS : CUSOLVER_STATUS_EXECUTION_FAILED;
}

cusolverStatus_t size_of_work(int n, int* size) {
  *size = 3 * n;
  return n < 0 ? CUSOLVER_STATUS_INVALID_VALUE : CUSOLVER_STATUS_SUCCESS;
}

}  // namespace

cusolverStatus_t cusolverDnCreate(cusolverDnHandle_t* handle) {
  *handle = new cusolverDnContext;
  return CUSOLVER_STATUS_SUCCESS;
}
cusolverStatus_t cusolverDnDestroy(cusolverDnHandle_t handle) {
  delete handle;
  return CUSOLVER_STATUS_SUCCESS;
}
cusolverStatus_t cusolverDnSetStream(cusolverDnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUSOLVER_STATUS_SUCCESS;
}

cusolverStatus_t cusolverDnSetDeterministicMode(cusolverDnHandle_t, cusolverDeterministicMode_t) {
  return CUSOLVER_STATUS_SUCCESS;
}

cusolverStatus_t cusolverDnDsyevd_bufferSize(cusolverDnHandle_t, cusolverEigMode_t, cublasFillMode_t, int n,
                                             const double*, int, const double*, int* size) {
  return size_of_work(n, size);
}
cusolverStatus_t cusolverDnDsyevd(cusolverDnHandle_t handle, cusolverEigMode_t mode, cublasFillMode_t side,
                                  int n, double* a, int step, double* values, double* work, int work_size,
                                  int* info) {
  return submit(handle, mode, side, n, a, step, values, work, work_size, info);
}
