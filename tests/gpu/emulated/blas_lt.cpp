// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The part of cuBLASLt that the library uses, for the emulated device: products with what cuBLAS does not
/// fuse. Its descriptors are structs with room for whatever a library keeps in them.

#include <cublasLt.h>

#include <cstring>

#include "product.hpp"

using namespace emulated_device;

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
