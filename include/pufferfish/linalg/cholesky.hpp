// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `cholesky`: A = L L^T for a symmetric positive definite matrix in double, and solving with L^T.

#include <cmath>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/vector_loops.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The lower triangular L with A = L L^T and zeros above the diagonal. a: [n x n]; only the lower
/// triangle is read. Computed row by row (Golub & Van Loan, Matrix Computations, section 4.2).
/// Deterministic. Throws shape_error if a is not square; value_error if a pivot is not finite or not
/// positive (A is then not positive definite).
/// Cost: n^3 / 6 multiplications in the calling thread. a is not changed; the result does not refer to it.
///
/// \code
/// const tensor<double, 2> lower = cholesky(moment);  // moment: tensor<double, 2>, positive definite
/// solve_transposed(lower, x.view());                 // x := L^-T x
/// \endcode
PUFFERFISH_COLD inline tensor<double, 2> cholesky(const tensor_view<const double, 2>& a) {
  const index_t n = a.extent(0);
  if (a.extent(1) != n) {
    detail::throw_error<shape_error>({"cholesky: a matrix ", a.shape(), " is not square"});
  }
  tensor<double, 2> lower({n, n});
  for (index_t i = 0; i < n; ++i) {
    double* const row = lower.data() + i * n;
    for (index_t j = 0; j < i; ++j) {
      const double* const other = lower.data() + j * n;
      row[j] = (a(i, j) - detail::dot(row, other, j)) / other[j];
    }
    const double pivot = a(i, i) - detail::dot(row, row, i);
    if (!(pivot > 0.0) || !std::isfinite(pivot)) {
      detail::throw_error<value_error>(
          {"cholesky: pivot ", i, " of ", n, " is ", pivot, ": the matrix is not positive definite"});
    }
    row[i] = std::sqrt(pivot);
  }
  return lower;
}

/// Solves L^T X = B in place of B: [n x m] with contiguous rows. L: a result of cholesky. Throws
/// shape_error if the sizes differ.
/// b must not overlap L. Only the lower triangle of L is read; its diagonal must not contain zeros. Cost: n^2
/// m / 2 multiplications.
PUFFERFISH_COLD inline void solve_transposed(const tensor<double, 2>& lower,
                                             const tensor_view<double, 2>& b) {
  const index_t n = lower.extent(0), columns = b.extent(1);
  if (b.extent(0) != n) {
    detail::throw_error<shape_error>(
        {"solve_transposed: ", b.shape(), " does not fit a factor of order ", n});
  }
  for (index_t i = n - 1; i >= 0; --i) {
    double* const row = b.data() + i * b.stride(0);
    detail::scale_by(1.0 / lower(i, i), row, columns);
    for (index_t j = 0; j < i; ++j) {
      detail::add_scaled(-lower(i, j), row, b.data() + j * b.stride(0), columns);
    }
  }
}

PUFFERFISH_NAMESPACE_END
