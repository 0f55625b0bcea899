// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The part of cuBLAS and cuBLASLt that the library uses, for the emulated device: matrix products,
/// column-major as there. Sums are in float (double for double); where the compute type allows TF32, the
/// factors are rounded to it, which is the worst that a device may do.

#include <cublasLt.h>
#include <cublas_v2.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "device.hpp"

struct cublasContext {
  cudaStream_t stream = nullptr;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_HOST;
};

namespace {

// A matrix in memory, column-major.
struct matrix {
  void* data;
  cudaDataType_t type;
  std::int64_t leading;
  std::int64_t stride = 0;  // from one product of a batch to the next
};

enum class fused { nothing, bias, relu, relu_bias };

struct product {
  bool transpose_a, transpose_b;
  std::int64_t m, n, k, batch = 1;
  matrix a, b, c, d;
  bool tf32 = false, in_double = false;
  fused after = fused::nothing;
  const void* bias = nullptr;
  cudaDataType_t bias_type = CUDA_R_32F;
};

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

// Scalars are read now where they are the host's, and when the product is computed where they are the
// device's.
struct scalars {
  const void *alpha, *beta;
  cudaDataType_t type;
  bool from_device;
};

cublasStatus_t submit(const product& p, const scalars& s, cudaStream_t stream) {
  const std::lock_guard<std::recursive_mutex> locked(emulated_device::device_lock());
  double alpha = 1, beta = 1;
  if (!s.from_device) {
    alpha = get<double>(s.alpha, s.type, 0);
    beta = get<double>(s.beta, s.type, 0);
  }
  if (!valid(p, beta != 0)) return CUBLAS_STATUS_INVALID_VALUE;
  if (p.m == 0 || p.n == 0 || p.batch == 0) return CUBLAS_STATUS_SUCCESS;
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

bool transposes(cublasOperation_t operation) { return operation != CUBLAS_OP_N; }

// False for a compute type that is not here.
bool set_compute(product& p, cublasComputeType_t type) {
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
cublasStatus_t cublasSetAtomicsMode(cublasHandle_t, cublasAtomicsMode_t) { return CUBLAS_STATUS_SUCCESS; }
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

// ---------------------------------------------------------------------------------------------------------
// cuBLASLt: its descriptors are structs with room for whatever the library keeps in them.

namespace {

struct lt_operation {
  cublasComputeType_t compute;
  cudaDataType_t scale_type;
  std::int32_t transpose_a, transpose_b;
  std::uint32_t epilogue;
  std::int32_t pointers, bias_type;
  const void* bias;
};
struct lt_layout {
  cudaDataType_t type;
  std::int32_t batch;
  std::int64_t rows, columns, leading, stride;
};
static_assert(sizeof(lt_operation) <= sizeof(cublasLtMatmulDescOpaque_t));
static_assert(sizeof(lt_layout) <= sizeof(cublasLtMatrixLayoutOpaque_t));

template <class T, class Opaque>
T contents(const Opaque* from) {
  T value;
  std::memcpy(&value, from->data, sizeof(T));
  return value;
}
template <class T, class Opaque>
void set_contents(Opaque* to, const T& value) {
  std::memcpy(to->data, &value, sizeof(T));
}

template <class T>
bool set_field(T& field, const void* value, std::size_t bytes) {
  if (bytes != sizeof(T)) return false;
  std::memcpy(&field, value, bytes);
  return true;
}

// The product that descriptors and matrices describe; false where they do not fit each other.
bool lt_product(const lt_operation& o, const lt_layout& a, const lt_layout& b, const lt_layout& c,
                const lt_layout& d, product& p) {
  p.transpose_a = o.transpose_a != CUBLAS_OP_N;
  p.transpose_b = o.transpose_b != CUBLAS_OP_N;
  p.m = d.rows;
  p.n = d.columns;
  p.k = p.transpose_a ? a.rows : a.columns;
  p.batch = d.batch;
  p.a = {nullptr, a.type, a.leading, a.stride};
  p.b = {nullptr, b.type, b.leading, b.stride};
  p.c = {nullptr, c.type, c.leading, c.stride};
  p.d = {nullptr, d.type, d.leading, d.stride};
  p.bias = o.bias;
  p.bias_type = o.bias_type < 0 ? d.type : static_cast<cudaDataType_t>(o.bias_type);
  switch (o.epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
      p.after = fused::nothing;
      break;
    case CUBLASLT_EPILOGUE_RELU:
      p.after = fused::relu;
      break;
    case CUBLASLT_EPILOGUE_BIAS:
      p.after = fused::bias;
      break;
    case CUBLASLT_EPILOGUE_RELU_BIAS:
      p.after = fused::relu_bias;
      break;
    default:
      return false;
  }
  if ((p.after == fused::bias || p.after == fused::relu_bias) && p.bias == nullptr) return false;
  const std::int64_t b_rows = p.transpose_b ? b.columns : b.rows,
                     b_columns = p.transpose_b ? b.rows : b.columns;
  return (p.transpose_a ? a.columns : a.rows) == p.m && b_rows == p.k && b_columns == p.n && c.rows == p.m &&
         c.columns == p.n && a.batch == d.batch && b.batch == d.batch && c.batch == d.batch &&
         set_compute(p, o.compute);
}

}  // namespace

struct cublasLtContext {};

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new cublasLtContext;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation, cublasComputeType_t compute,
                                        cudaDataType_t scale_type) {
  *operation = new cublasLtMatmulDescOpaque_t{};
  set_contents(*operation, lt_operation{compute, scale_type, CUBLAS_OP_N, CUBLAS_OP_N,
                                        CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_POINTER_MODE_HOST, -1, nullptr});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
  delete operation;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              std::size_t bytes) {
  auto o = contents<lt_operation>(operation);
  bool set = false;
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      set = set_field(o.transpose_a, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_TRANSB:
      set = set_field(o.transpose_b, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      set = set_field(o.epilogue, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      set = set_field(o.bias, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      set = set_field(o.bias_type, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
      set = set_field(o.pointers, value, bytes);
      break;
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  set_contents(operation, o);
  return set ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          std::uint64_t rows, std::uint64_t columns, std::int64_t leading) {
  *layout = new cublasLtMatrixLayoutOpaque_t{};
  set_contents(*layout, lt_layout{type, 1, static_cast<std::int64_t>(rows),
                                  static_cast<std::int64_t>(columns), leading, 0});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                std::size_t bytes) {
  auto l = contents<lt_layout>(layout);
  bool set = false;
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
      set = set_field(l.batch, value, bytes);
      break;
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
      set = set_field(l.stride, value, bytes);
      break;
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  set_contents(layout, l);
  return set ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque_t{};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t, const void* value,
                                                    std::size_t) {
  return value == nullptr ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t, int asked,
                                              cublasLtMatmulHeuristicResult_t* results, int* found) {
  product p{};
  *found = 0;
  if (asked < 1 || !lt_product(contents<lt_operation>(operation), contents<lt_layout>(a),
                               contents<lt_layout>(b), contents<lt_layout>(c), contents<lt_layout>(d), p)) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  results[0] = {};
  results[0].state = CUBLAS_STATUS_SUCCESS;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t operation, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t*, void*, std::size_t, cudaStream_t stream) {
  const auto o = contents<lt_operation>(operation);
  product p{};
  if (!lt_product(o, contents<lt_layout>(a_layout), contents<lt_layout>(b_layout),
                  contents<lt_layout>(c_layout), contents<lt_layout>(d_layout), p)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  p.a.data = const_cast<void*>(a);
  p.b.data = const_cast<void*>(b);
  p.c.data = const_cast<void*>(c);
  p.d.data = d;
  return submit(p, {alpha, beta, o.scale_type, o.pointers == CUBLASLT_POINTER_MODE_DEVICE}, stream);
}
