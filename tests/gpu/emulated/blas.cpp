// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Matrix products, and the part of cuBLAS that the library uses, for the emulated device. Sums are in float
/// (double for double); where the compute type allows TF32, the factors are rounded to it, which is the worst
/// that a device may do.

#include <cublas_v2.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "device.hpp"
#include "product.hpp"

using namespace emulated_device;

struct cublasContext {
  cudaStream_t stream = nullptr;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_HOST;
  cublasAtomicsMode_t atomics = CUBLAS_ATOMICS_NOT_ALLOWED;
};

namespace {

// The nearest number with 10 bits of mantissa, ties away from zero as the device's conversion does.
float to_tf32(float x) {
  if (!std::isfinite(x)) return x;
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(x) + 0x1000U) & 0xffffe000U);
}

std::size_t size_of(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_64F:
      return 8;
    case CUDA_R_32F:
      return 4;
    case CUDA_R_16BF:
    case CUDA_R_16F:
      return 2;
    default:
      return 0;
  }
}

template <class T>
T get(const void* data, cudaDataType_t type, std::int64_t i) {
  switch (type) {
    case CUDA_R_64F:
      return static_cast<T>(static_cast<const double*>(data)[i]);
    case CUDA_R_32F:
      return static_cast<T>(static_cast<const float*>(data)[i]);
    case CUDA_R_16BF:
      return static_cast<T>(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]));
    default:
      return static_cast<T>(__half2float(static_cast<const __half*>(data)[i]));
  }
}

template <class T>
void put(void* data, cudaDataType_t type, std::int64_t i, T value) {
  switch (type) {
    case CUDA_R_64F:
      static_cast<double*>(data)[i] = static_cast<double>(value);
      break;
    case CUDA_R_32F:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      break;
    case CUDA_R_16BF:
      static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(static_cast<float>(value));
      break;
    default:
      static_cast<__half*>(data)[i] = __float2half(static_cast<float>(value));
      break;
  }
}

void* at(const matrix& x, std::int64_t batch) {
  return static_cast<char*>(x.data) + static_cast<std::size_t>(batch * x.stride) * size_of(x.type);
}

// rows x columns of op(x), dense, column-major.
template <class T>
std::vector<T> gathered(const matrix& x, std::int64_t batch, bool transposed, std::int64_t rows,
                        std::int64_t columns, bool tf32) {
  std::vector<T> result(static_cast<std::size_t>(rows * columns));
  const void* data = at(x, batch);
  std::size_t to = 0;
  for (std::int64_t j = 0; j < columns; ++j) {
    for (std::int64_t i = 0; i < rows; ++i) {
      const T value = get<T>(data, x.type, transposed ? i * x.leading + j : j * x.leading + i);
      result[to++] = tf32 ? static_cast<T>(to_tf32(static_cast<float>(value))) : value;
    }
  }
  return result;
}

template <class T>
void multiply(const product& p, T alpha, T beta) {
  const auto m = static_cast<std::size_t>(p.m), n = static_cast<std::size_t>(p.n),
             k = static_cast<std::size_t>(p.k);
  std::vector<T> sum(m), block(m);
  for (std::int64_t batch = 0; batch < p.batch; ++batch) {
    // Where alpha is 0, the factors are not read.
    const std::size_t depth = alpha == T(0) ? 0 : k;
    std::vector<T> a, b;
    if (depth != 0) {
      a = gathered<T>(p.a, batch, p.transpose_a, p.m, p.k, p.tf32);
      b = gathered<T>(p.b, batch, p.transpose_b, p.k, p.n, p.tf32);
    }
    for (std::size_t j = 0; j < n; ++j) {
      std::fill(sum.begin(), sum.end(), T(0));
      for (std::size_t from = 0; from < depth; from += 64) {  // blocks of sums, as a device has them
        std::fill(block.begin(), block.end(), T(0));
        for (std::size_t l = from; l < std::min(depth, from + 64); ++l) {
          const T factor = b[j * k + l];
          const T* column = a.data() + l * m;
          for (std::size_t i = 0; i < m; ++i) block[i] += column[i] * factor;
        }
        for (std::size_t i = 0; i < m; ++i) sum[i] += block[i];
      }
      for (std::size_t i = 0; i < m; ++i) {
        const auto row = static_cast<std::int64_t>(i), column = static_cast<std::int64_t>(j);
        T value = alpha * sum[i];
        if (beta != T(0)) value += beta * get<T>(at(p.c, batch), p.c.type, column * p.c.leading + row);
        if (p.after == fused::bias || p.after == fused::relu_bias) value += get<T>(p.bias, p.bias_type, row);
        if ((p.after == fused::relu || p.after == fused::relu_bias) && value < T(0)) value = T(0);
        put(at(p.d, batch), p.d.type, column * p.d.leading + row, value);
      }
    }
  }
}

bool on_device(const matrix& x, std::int64_t rows, std::int64_t columns, std::int64_t batch) {
  if (rows == 0 || columns == 0) return true;
  if (x.leading < rows) return false;
  const std::int64_t elements = (batch - 1) * x.stride + (columns - 1) * x.leading + rows;
  return emulated_device::kind_of(x.data, static_cast<std::size_t>(elements) * size_of(x.type)) ==
         emulated_device::kind::device;
}

bool valid(const product& p, bool reads_c) {
  for (const matrix* x : {&p.a, &p.b, &p.c, &p.d}) {
    if (size_of(x->type) == 0) return false;
  }
  if (p.m < 0 || p.n < 0 || p.k < 0 || p.batch < 0) return false;
  const emulated_device::access open;
  if (p.m == 0 || p.n == 0 || p.batch == 0) return true;
  return on_device(p.a, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.batch) &&
         on_device(p.b, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.batch) &&
         on_device(p.d, p.m, p.n, p.batch) && (!reads_c || on_device(p.c, p.m, p.n, p.batch));
}

// Whether every line of the matrix begins at a multiple of 16 bytes, in all products of a batch.
bool aligned(const matrix& x, std::int64_t batch) {
  const auto bits = reinterpret_cast<std::uintptr_t>(x.data) |
                    static_cast<std::uintptr_t>(x.leading | (batch > 1 ? x.stride : 0)) * size_of(x.type);
  return bits % 16 == 0;
}

std::size_t misaligned = 0;

}  // namespace

// Number of calls with factors of 16 bits and an operand whose lines begin at no multiple of 16 bytes, for
// which cuBLAS has no fast kernel.
extern "C" std::size_t emulated_device_misaligned_products() { return misaligned; }

cublasStatus_t emulated_device::submit(const product& p, const scalars& s, cudaStream_t stream) {
  const std::lock_guard<std::recursive_mutex> locked(emulated_device::device_lock());
  double alpha = 1, beta = 1;
  if (!s.from_device) {
    alpha = get<double>(s.alpha, s.type, 0);
    beta = get<double>(s.beta, s.type, 0);
  }
  if (!valid(p, beta != 0)) return CUBLAS_STATUS_INVALID_VALUE;
  if (p.m == 0 || p.n == 0 || p.batch == 0) return CUBLAS_STATUS_SUCCESS;
  if (size_of(p.a.type) == 2 && !(aligned(p.a, p.batch) && aligned(p.b, p.batch) && aligned(p.d, p.batch))) {
    ++misaligned;
  }
  const cudaError_t error = emulated_device::submit(stream, "product", [=] {
    const double first = s.from_device ? get<double>(s.alpha, s.type, 0) : alpha;
    const double second = s.from_device ? get<double>(s.beta, s.type, 0) : beta;
    if (p.in_double) {
      multiply<double>(p, first, second);
    } else {
      multiply<float>(p, static_cast<float>(first), static_cast<float>(second));
    }
  });
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

bool emulated_device::set_compute(product& p, cublasComputeType_t type) {
  switch (type) {
    case CUBLAS_COMPUTE_32F:
    case CUBLAS_COMPUTE_32F_PEDANTIC:
      return true;
    case CUBLAS_COMPUTE_32F_FAST_TF32:
      p.tf32 = p.a.type == CUDA_R_32F;
      return true;
    case CUBLAS_COMPUTE_64F:
    case CUBLAS_COMPUTE_64F_PEDANTIC:
      p.in_double = true;
      return true;
    default:
      return false;
  }
}

namespace {

bool transposes(cublasOperation_t operation) { return operation != CUBLAS_OP_N; }

cublasStatus_t multiply(cublasHandle_t handle, product p, cublasComputeType_t type, const void* alpha,
                        const void* beta) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (!set_compute(p, type)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if ((handle->math & CUBLAS_TF32_TENSOR_OP_MATH) != 0 && type == CUBLAS_COMPUTE_32F) {
    p.tf32 = p.a.type == CUDA_R_32F;
  }
  return submit(
      p, {alpha, beta, p.in_double ? CUDA_R_64F : CUDA_R_32F, handle->pointers == CUBLAS_POINTER_MODE_DEVICE},
      handle->stream);
}

matrix input(const void* data, cudaDataType_t type, std::int64_t leading, std::int64_t stride = 0) {
  return {const_cast<void*>(data), type, leading, stride};
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// cuBLAS

cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t* stream) {
  *stream = handle->stream;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  handle->math = mode;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = handle->math;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode(cublasHandle_t handle, cublasPointerMode_t mode) {
  handle->pointers = mode;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace(cublasHandle_t, void*, std::size_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetAtomicsMode(cublasHandle_t handle, cublasAtomicsMode_t mode) {
  handle->atomics = mode;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetAtomicsMode(cublasHandle_t handle, cublasAtomicsMode_t* mode) {
  *mode = handle->atomics;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetVersion(cublasHandle_t, int* version) {
  *version = CUBLAS_VERSION;
  return CUBLAS_STATUS_SUCCESS;
}

const char* cublasGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
  }
}
const char* cublasGetStatusString(cublasStatus_t status) { return cublasGetStatusName(status); }

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t op_a,
                                          cublasOperation_t op_b, int m, int n, int k, const void* alpha,
                                          const void* a, cudaDataType a_type, int lda, long long stride_a,
                                          const void* b, cudaDataType b_type, int ldb, long long stride_b,
                                          const void* beta, void* c, cudaDataType c_type, int ldc,
                                          long long stride_c, int batch, cublasComputeType_t compute,
                                          cublasGemmAlgo_t) {
  const matrix to{c, c_type, ldc, stride_c};
  return multiply(handle,
                  {transposes(op_a), transposes(op_b), m, n, k, batch, input(a, a_type, lda, stride_a),
                   input(b, b_type, ldb, stride_b), to, to},
                  compute, alpha, beta);
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                            int n, int k, const void* alpha, const void* a, cudaDataType a_type, int lda,
                            const void* b, cudaDataType b_type, int ldb, const void* beta, void* c,
                            cudaDataType c_type, int ldc, cublasComputeType_t compute,
                            cublasGemmAlgo_t algorithm) {
  return cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0,
                                    beta, c, c_type, ldc, 0, 1, compute, algorithm);
}

cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t op_a,
                                         cublasOperation_t op_b, int m, int n, int k, const float* alpha,
                                         const float* a, int lda, long long stride_a, const float* b, int ldb,
                                         long long stride_b, const float* beta, float* c, int ldc,
                                         long long stride_c, int batch) {
  return cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, alpha, a, CUDA_R_32F, lda, stride_a, b,
                                    CUDA_R_32F, ldb, stride_b, beta, c, CUDA_R_32F, ldc, stride_c, batch,
                                    CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                           int n, int k, const float* alpha, const float* a, int lda, const float* b, int ldb,
                           const float* beta, float* c, int ldc) {
  return cublasSgemmStridedBatched(handle, op_a, op_b, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0,
                                   1);
}

cublasStatus_t cublasDgemmStridedBatched(cublasHandle_t handle, cublasOperation_t op_a,
                                         cublasOperation_t op_b, int m, int n, int k, const double* alpha,
                                         const double* a, int lda, long long stride_a, const double* b,
                                         int ldb, long long stride_b, const double* beta, double* c, int ldc,
                                         long long stride_c, int batch) {
  return cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, alpha, a, CUDA_R_64F, lda, stride_a, b,
                                    CUDA_R_64F, ldb, stride_b, beta, c, CUDA_R_64F, ldc, stride_c, batch,
                                    CUBLAS_COMPUTE_64F, CUBLAS_GEMM_DEFAULT);
}

cublasStatus_t cublasDgemm(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                           int n, int k, const double* alpha, const double* a, int lda, const double* b,
                           int ldb, const double* beta, double* c, int ldc) {
  return cublasDgemmStridedBatched(handle, op_a, op_b, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0,
                                   1);
}
