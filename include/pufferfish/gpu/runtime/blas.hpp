// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Matrix products on a device: `gpu::blas` owns the handles of cuBLAS. The products over a context are in
/// gpu/ops/products.hpp.

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>

#include <pufferfish/core/memory.hpp>
#include <pufferfish/core/scalar.hpp>
#include <pufferfish/gpu/runtime/error.hpp>
#include <pufferfish/gpu/runtime/memory.hpp>
#include <pufferfish/gpu/runtime/product_costs.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// How products of float matrices are computed: with all 24 bits of the factors, or on tensor cores with 11
/// of them (TF32; sums in float either way). Sums are in float for 16-bit matrices as well, and in double for
/// matrices of doubles, which the mode does not concern.
enum class math_mode { fp32, tf32 };

/// Throws backend_error with the call's name and cuBLAS's message unless `status` is success.
inline void check(cublasStatus_t status, std::string_view call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  pufferfish::detail::throw_error<backend_error>({call, ": ", cublasGetStatusString(status)});
}

namespace detail {

/// CUDA's constants for an element type: the type itself, and the type of sums.
template <class T>
struct element;
template <>
struct element<float> {
  static constexpr cudaDataType_t type = CUDA_R_32F;
  static constexpr cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  using scale = float;
};
template <>
struct element<double> {
  static constexpr cudaDataType_t type = CUDA_R_64F;
  static constexpr cublasComputeType_t compute = CUBLAS_COMPUTE_64F;
  using scale = double;
};
template <>
struct element<__half> {
  static constexpr cudaDataType_t type = CUDA_R_16F;
  static constexpr cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  using scale = float;
};
template <>
struct element<__nv_bfloat16> {
  static constexpr cudaDataType_t type = CUDA_R_16BF;
  static constexpr cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  using scale = float;
};

/// A column-major matrix whose columns begin `step` elements apart, used directly or transposed.
struct blas_matrix {
  const void* data = nullptr;
  index_t step = 1;
  bool transposed = false;
};

/// c (m x n) = a (m x k) b (k x n), or c += a b, column-major; `bias`: m elements, added to every column.
/// `type` is the element type of a, b and the bias, `c_type` that of c, `compute` the type of sums. c
/// overlaps neither a nor b. A row-major product C = A B is the column-major c = a b with a = B and b = A
/// (product_of in gpu/ops/products.hpp).
struct blas_product {
  index_t m = 0, n = 0, k = 0;
  blas_matrix a, b;
  void* c = nullptr;
  index_t c_step = 1;
  bool add = false;
  const void* bias = nullptr;
  cudaDataType_t type = CUDA_R_32F, c_type = CUDA_R_32F;
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
};

inline cublasOperation_t operation(const blas_matrix& matrix) {
  return matrix.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
}

/// Owner of a descriptor of cublasLt.
template <class Handle, cublasStatus_t (*Destroy)(Handle)>
class lt_handle {
 public:
  lt_handle() = default;
  lt_handle(const lt_handle&) = delete;
  lt_handle& operator=(const lt_handle&) = delete;
  ~lt_handle() {
    if (value != nullptr) static_cast<void>(Destroy(value));
  }
  Handle value = nullptr;
};
using lt_operation = lt_handle<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using lt_layout = lt_handle<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using lt_preference = lt_handle<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

}  // namespace detail

/// cuBLAS on one stream, with a workspace of its own. Products can be captured into graphs, and give the same
/// bits at every call, whatever other streams do (cuBLAS guarantees this for streams that share no workspace,
/// for one version on devices of one kind). One thread at a time uses an object. Operands are in memory of
/// the device that was current at construction, and stay valid until the stream has executed the product. The
/// stream must outlive the object. The workspace has 32 MB.
class blas {
 public:
  /// Throws backend_error. Without `deterministic` cuBLAS may add atomically if that is faster.
  explicit blas(cudaStream_t stream, bool deterministic = true)
      : stream_(stream), workspace_(device_memory(), workspace_bytes, uninitialized) {
    check(cublasCreate(&handle_), "cublasCreate");
    check(cublasSetStream(handle_, stream), "cublasSetStream");
    check(cublasSetWorkspace(handle_, workspace_.data(), static_cast<std::size_t>(workspace_.size())),
          "cublasSetWorkspace");
    check(cublasSetAtomicsMode(handle_, deterministic ? CUBLAS_ATOMICS_NOT_ALLOWED : CUBLAS_ATOMICS_ALLOWED),
          "cublasSetAtomicsMode");
    // Partial sums of 16-bit products would otherwise be rounded to 16 bits, and might overflow.
    check(cublasSetMathMode(handle_, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION), "cublasSetMathMode");
    check(cublasLtCreate(&lt_), "cublasLtCreate");
  }
  blas(const blas&) = delete;
  blas& operator=(const blas&) = delete;
  ~blas() {
    if (lt_ != nullptr) static_cast<void>(cublasLtDestroy(lt_));
    if (handle_ != nullptr) static_cast<void>(cublasDestroy(handle_));
  }

  /// cuBLAS's handle, for other calls in the same stream. It stays owned by this object; a caller must
  /// restore every setting that it changes.
  cublasHandle_t handle() const { return handle_; }

  /// Estimates from which the functions of gpu/ops/products.hpp decide whether to copy operands. May be
  /// changed for another device; a captured step keeps the decisions of its capture.
  product_costs& costs() { return costs_; }

  /// Computes a product; p.bias is ignored. Throws shape_error if an extent or a stride exceeds 2^31 - 1, and
  /// backend_error.
  void multiply(const detail::blas_product& p) const {
    const scales one(p.type, 1.0), beta(p.type, p.add ? 1.0 : 0.0);
    check(cublasGemmEx(handle_, operation(p.a), operation(p.b), narrow(p.m), narrow(p.n), narrow(p.k),
                       one.data(), p.a.data, p.type, narrow(p.a.step), p.b.data, p.type, narrow(p.b.step),
                       beta.data(), p.c, p.c_type, narrow(p.c_step), p.compute, CUBLAS_GEMM_DEFAULT),
          "cublasGemmEx");
  }

  /// Computes `count` products: operands of product i begin i a_stride, i b_stride and i c_stride elements
  /// after those of `p`. p.bias is ignored. The results must not overlap each other. A stride of 0 for a or b
  /// uses the same operand in all products. Throws the errors of multiply.
  void multiply_batch(const detail::blas_product& p, index_t count, index_t a_stride, index_t b_stride,
                      index_t c_stride) const {
    const scales one(p.type, 1.0), beta(p.type, p.add ? 1.0 : 0.0);
    check(
        cublasGemmStridedBatchedEx(handle_, operation(p.a), operation(p.b), narrow(p.m), narrow(p.n),
                                   narrow(p.k), one.data(), p.a.data, p.type, narrow(p.a.step), a_stride,
                                   p.b.data, p.type, narrow(p.b.step), b_stride, beta.data(), p.c, p.c_type,
                                   narrow(p.c_step), c_stride, narrow(count), p.compute, CUBLAS_GEMM_DEFAULT),
        "cublasGemmStridedBatchedEx");
  }

  /// Computes a product and adds the bias in its epilogue. Returns false, and has computed nothing, if
  /// cublasLt has no algorithm for it, or if the bias is not aligned to 16 bytes: cublasLt's algorithm may
  /// read it in vectors of that size. The choice of an algorithm for a new shape is a search on the host; it
  /// is cached by shape, types and alignments for the life of the object. Throws backend_error.
  bool multiply_with_bias(const detail::blas_product& p) {
    if (alignment_of(p.bias) < 16) return false;
    detail::lt_operation what;
    detail::lt_layout a, b, c;
    describe(p, what, a, b, c);
    const std::optional<cublasLtMatmulAlgo_t> algorithm = algorithm_for(p, what, a, b, c);
    if (!algorithm) return false;
    const scales one(p.type, 1.0), beta(p.type, p.add ? 1.0 : 0.0);
    check(cublasLtMatmul(lt_, what.value, one.data(), p.a.data, a.value, p.b.data, b.value, beta.data(), p.c,
                         c.value, p.c, c.value, &*algorithm, workspace_.data(),
                         static_cast<std::size_t>(workspace_.size()), stream_),
          "cublasLtMatmul");
    return true;
  }

 private:
  static constexpr index_t workspace_bytes = index_t{32}
                                             << 20;  // NVIDIA's recommendation for its largest devices

  // A factor of a product (alpha or beta), in the type of the sums.
  class scales {
   public:
    scales(cudaDataType_t type, double value)
        : is_double_(type == CUDA_R_64F), float_(static_cast<float>(value)), double_(value) {}
    const void* data() const {
      return is_double_ ? static_cast<const void*>(&double_) : static_cast<const void*>(&float_);
    }

   private:
    bool is_double_;
    float float_;
    double double_;
  };

  static int narrow(index_t extent) {
    if (extent > 2147483647) {
      pufferfish::detail::throw_error<shape_error>(
          {"gpu::blas: an extent of ", extent, " is more than cuBLAS takes"});
    }
    return static_cast<int>(extent);
  }

  template <class Value>
  static void set(const detail::lt_operation& what, cublasLtMatmulDescAttributes_t attribute,
                  const Value& value) {
    check(cublasLtMatmulDescSetAttribute(what.value, attribute, &value, sizeof(value)),
          "cublasLtMatmulDescSetAttribute");
  }
  // Creates the layout of a column-major matrix whose columns begin `step` elements apart.
  static void lay_out(detail::lt_layout& layout, cudaDataType_t type, index_t rows, index_t columns,
                      index_t step) {
    check(cublasLtMatrixLayoutCreate(&layout.value, type, static_cast<std::uint64_t>(rows),
                                     static_cast<std::uint64_t>(columns), step),
          "cublasLtMatrixLayoutCreate");
  }
  // Creates the descriptors of a product. Layouts of transposed operands are those of the matrices in memory.
  static void describe(const detail::blas_product& p, detail::lt_operation& what, detail::lt_layout& a,
                       detail::lt_layout& b, detail::lt_layout& c) {
    check(cublasLtMatmulDescCreate(&what.value, p.compute, p.type == CUDA_R_64F ? CUDA_R_64F : CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    set(what, CUBLASLT_MATMUL_DESC_TRANSA, operation(p.a));
    set(what, CUBLASLT_MATMUL_DESC_TRANSB, operation(p.b));
    if (p.bias != nullptr) {
      set(what, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(what, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    }
    p.a.transposed ? lay_out(a, p.type, p.k, p.m, p.a.step) : lay_out(a, p.type, p.m, p.k, p.a.step);
    p.b.transposed ? lay_out(b, p.type, p.n, p.k, p.b.step) : lay_out(b, p.type, p.k, p.n, p.b.step);
    lay_out(c, p.c_type, p.m, p.n, p.c_step);
  }

  // Largest power of two up to 256 that divides an address. Packed parameters may begin at any address.
  static std::uint32_t alignment_of(const void* data) {
    const auto address = reinterpret_cast<std::uintptr_t>(data) | 256U;
    return static_cast<std::uint32_t>(address & (~address + 1));
  }

  using key = std::array<index_t, 14>;
  // Returns all numbers that an algorithm's choice depends on: extents, strides, transpositions, types and
  // alignments. The type of c is not part of the key, because only products whose c has the type of a and b
  // have a bias.
  static key key_of(const detail::blas_product& p) {
    return {p.m,
            p.n,
            p.k,
            p.a.step,
            p.b.step,
            p.c_step,
            p.a.transposed,
            p.b.transposed,
            p.add,
            p.type,
            p.compute,
            alignment_of(p.a.data),
            alignment_of(p.b.data),
            alignment_of(p.c)};
  }

  // Returns the first choice of cublasLt's heuristic, which is asked once per shape. It is the same in every
  // run on one device.
  std::optional<cublasLtMatmulAlgo_t> algorithm_for(const detail::blas_product& p,
                                                    const detail::lt_operation& what,
                                                    const detail::lt_layout& a, const detail::lt_layout& b,
                                                    const detail::lt_layout& c) {
    const key wanted = key_of(p);
    if (const auto known = algorithms_.find(wanted); known != algorithms_.end()) return known->second;
    detail::lt_preference preference;
    check(cublasLtMatmulPreferenceCreate(&preference.value), "cublasLtMatmulPreferenceCreate");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      check(cublasLtMatmulPreferenceSetAttribute(preference.value, attribute, &value, sizeof(value)),
            "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::size_t>(workspace_.size()));
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.a.data));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.b.data));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(p.c));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.c));
    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        lt_, what.value, a.value, b.value, c.value, c.value, preference.value, 1, &found, &count);
    std::optional<cublasLtMatmulAlgo_t> result;
    if (status == CUBLAS_STATUS_SUCCESS && count > 0) result = found.algo;
    algorithms_.emplace(wanted, result);
    return result;
  }

  cudaStream_t stream_;
  product_costs costs_;
  memory_block<std::byte> workspace_;
  cublasHandle_t handle_ = nullptr;
  cublasLtHandle_t lt_ = nullptr;
  std::map<key, std::optional<cublasLtMatmulAlgo_t>> algorithms_;
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
