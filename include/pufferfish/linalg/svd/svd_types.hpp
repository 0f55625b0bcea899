// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Methods, options and results of `svd`.

#include <cstdint>
#include <vector>

#include <pufferfish/core/tensor.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Algorithm of `svd`.
enum class svd_method {
  /// `gram`, then `jacobi` if a kept singular value is below 1e-6 of the largest one. `randomized` if the
  /// smaller side is at least 2048 and max_rank requests at most an eighth of it.
  automatic,
  /// Eigenvectors of the Gram matrix of the smaller side, accumulated in double. The fastest
  /// method. Errors of singular values are about 1e-16 sigma_1^2 / sigma_i, so singular values
  /// below 1e-8 sigma_1 are noise.
  gram,
  /// One-sided Jacobi after a pivoted QR factorization. If a matrix is ill-conditioned only because of
  /// the scaling of its rows or columns, small singular values keep nearly all their digits, down to
  /// 1e-150 of the largest entry.
  jacobi,
  /// Subspace iteration from a random start (Halko, Martinsson & Tropp 2011). The result is near-optimal, not
  /// optimal.
  randomized,
  /// Another library, used through a separate header (linalg/svd_eigen.hpp). This value occurs in results
  /// only.
  external
};

/// Options of svd, checked by every call. svd throws rank_error for a negative max_rank, and value_error for
/// a negative oversampling or power_iterations and for the method external.
struct svd_options {
  /// Maximum number of singular vectors; 0: min(rows, columns).
  index_t max_rank = 0;
  svd_method method = svd_method::automatic;
  /// Seed of the randomized method's start; equal seeds give equal bits.
  std::uint64_t seed = 0;
  /// Randomized method: number of directions in addition to max_rank.
  index_t oversampling = 8;
  int power_iterations = 2;
};

/// The decomposition A ~ U diag(singular_values[0 .. k-1]) V^T of a matrix A [rows x columns]. All arrays are
/// in double and owned. k is the chosen rank, at most svd_options::max_rank.
struct svd_result {
  /// The singular values in descending order: all min(rows, columns) of them, or the first max_rank for the
  /// randomized method.
  std::vector<double> singular_values;
  /// U [rows x k], with orthonormal columns for any rank of A. In each column, the entry of largest magnitude
  /// (the first of equal ones) is positive.
  tensor<double, 2> u;
  /// V [columns x k], with orthonormal columns.
  tensor<double, 2> v;
  /// Sum of the squares of all entries of A, summed in double. The squared truncation error is this sum minus
  /// the sum of the squares of the kept singular values.
  double squared_norm = 0;
  /// The method that was used; never `automatic`.
  svd_method used = svd_method::gram;
};

PUFFERFISH_NAMESPACE_END
