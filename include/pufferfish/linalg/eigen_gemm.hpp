// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The matrix product by Eigen (3.4 or 5): an opt-in back end, and a reference for tests and benchmarks.
/// Layers use native_gemm (linalg/gemm/native_gemm.hpp) instead. It needs no Eigen, and objects compiled with
/// different -march flags can be linked, which Eigen's templates do not allow.

#include <Eigen/Core>

#include <pufferfish/linalg/gemm/gemm.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Eigen's product, using maps of the caller's memory. Runs in the calling thread unless the program has
/// enabled Eigen's own threads.
/// Stateless, so one object may be used by several threads.
struct eigen_gemm {
  /// c = a b, or c += a b, for any strides. Throws shape_error if the shapes do not fit.
  /// c must not overlap a or b.
  template <class T>
  void multiply(const tensor_view<const T, 2>& a, const tensor_view<const T, 2>& b,
                const tensor_view<T, 2>& c, bool accumulate = false) const {
    detail::check_product(a, b, c);
    if (c.empty()) return;
    with_map(a, [&](const auto& left) {
      with_map(b, [&](const auto& right) {
        with_map(c, [&](auto&& result) {
          if (!accumulate) result.setZero();
          if (a.extent(1) > 0) result.noalias() += left * right;
        });
      });
    });
  }

 private:
  // Eigen's fast paths need the contiguous dimension at compile time.
  template <class T, class F>
  static void with_map(const tensor_view<T, 2>& view, F&& f) {
    using scalar = std::remove_const_t<T>;
    using row_major_matrix = Eigen::Matrix<scalar, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    using col_major_matrix = Eigen::Matrix<scalar, Eigen::Dynamic, Eigen::Dynamic, Eigen::ColMajor>;
    using row_major = std::conditional_t<std::is_const_v<T>, const row_major_matrix, row_major_matrix>;
    using col_major = std::conditional_t<std::is_const_v<T>, const col_major_matrix, col_major_matrix>;
    using outer = Eigen::OuterStride<>;
    using any = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;
    const index_t rows = view.extent(0), cols = view.extent(1);
    if (view.stride(1) == 1 || cols == 1) {
      f(Eigen::Map<row_major, Eigen::Unaligned, outer>(view.data(), rows, cols, outer(view.stride(0))));
    } else if (view.stride(0) == 1) {
      f(Eigen::Map<col_major, Eigen::Unaligned, outer>(view.data(), rows, cols, outer(view.stride(1))));
    } else {
      f(Eigen::Map<row_major, Eigen::Unaligned, any>(view.data(), rows, cols,
                                                     any(view.stride(0), view.stride(1))));
    }
  }
};

PUFFERFISH_NAMESPACE_END
