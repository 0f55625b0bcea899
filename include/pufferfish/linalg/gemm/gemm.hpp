// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gemm_engine`: the concept of a back end for general matrix products (GEMM), and a simple reference
/// implementation.

#include <concepts>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A back end for C = A B and C += A B: `multiply(a, b, c, accumulate)` with a: M x K, b: K x N, c: M x N,
/// any strides. c must not overlap a or b. For K = 0 the product is zero. multiply throws shape_error unless
/// the shapes fit.
///
/// \code
/// tensor<float, 2> a({32, 64}), b({64, 16}), c({32, 16});
/// stack_arena scratch;
/// native_gemm(scratch).multiply<float>(a.view(), b.view(), c.view());        // c = a b
/// native_gemm(scratch).multiply<float>(a.view(), b.view(), c.view(), true);  // c += a b
/// \endcode
template <class G, class T>
concept gemm_engine = requires(const G& engine, tensor_view<const T, 2> a, tensor_view<const T, 2> b,
                               tensor_view<T, 2> c, bool accumulate) {
  { engine.multiply(a, b, c, accumulate) } -> std::same_as<void>;
};

namespace detail {

/// Throws shape_error unless the product a b has the shape of c.
template <class A, class B, class C>
void check_product(const tensor_view<A, 2>& a, const tensor_view<B, 2>& b, const tensor_view<C, 2>& c) {
  if (a.extent(1) != b.extent(0) || a.extent(0) != c.extent(0) || b.extent(1) != c.extent(1)) {
    throw_error<shape_error>(
        {"gemm: ", a.shape(), " times ", b.shape(), " does not fit the result ", c.shape()});
  }
}

}  // namespace detail

/// A gemm_engine that computes the definition c_ij = sum_k a_ik b_kj directly, each sum in double. Other back
/// ends are tested against it. The cost is 2 M N K operations without any blocking, so this class is meant
/// for tests and tiny products.
struct reference_gemm {
  /// c = a b, or c += a b with `accumulate`. c must not overlap a or b. Throws shape_error if the shapes do
  /// not fit.
  template <class T>
  void multiply(const tensor_view<const T, 2>& a, const tensor_view<const T, 2>& b,
                const tensor_view<T, 2>& c, bool accumulate = false) const {
    detail::check_product(a, b, c);
    for (index_t i = 0; i < c.extent(0); ++i) {
      for (index_t j = 0; j < c.extent(1); ++j) {
        double sum = accumulate ? static_cast<double>(c(i, j)) : 0.0;
        for (index_t k = 0; k < a.extent(1); ++k) {
          sum += static_cast<double>(a(i, k)) * static_cast<double>(b(k, j));
        }
        c(i, j) = static_cast<T>(sum);
      }
    }
  }
};

PUFFERFISH_NAMESPACE_END
