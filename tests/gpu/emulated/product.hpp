// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Matrix products on the emulated device, column-major as cuBLAS has them: what blas.cpp and blas_lt.cpp,
/// the two interfaces, make of their arguments.

#include <cublas_v2.h>

#include <cstdint>

namespace emulated_device {

/// A matrix in memory.
struct matrix {
  void* data = nullptr;
  cudaDataType_t type = CUDA_R_32F;
  std::int64_t leading = 0;
  std::int64_t stride = 0;  ///< from one product of a batch to the next
};

enum class fused { nothing, bias, relu, relu_bias };

/// d = after(alpha op(a) op(b) + beta c).
struct product {
  bool transpose_a = false, transpose_b = false;
  std::int64_t m = 0, n = 0, k = 0, batch = 1;
  matrix a, b, c, d;
  bool tf32 = false, in_double = false;
  fused after = fused::nothing;
  const void* bias = nullptr;
  cudaDataType_t bias_type = CUDA_R_32F;
};

/// alpha and beta: read at once where they are the host's, with the product where they are the device's.
struct scalars {
  const void *alpha, *beta;
  cudaDataType_t type;
  bool from_device;
};

/// Puts a product into a stream. Checks that its operands are in device memory.
cublasStatus_t submit(const product& p, const scalars& s, cudaStream_t stream);

/// False for a compute type that is not here.
bool set_compute(product& p, cublasComputeType_t type);

}  // namespace emulated_device
