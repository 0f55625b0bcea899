// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `largest_eigenvalue`: the largest eigenvalue of a positive semidefinite matrix, at a fraction of the cost
/// of all eigenvalues.

#include <algorithm>
#include <cmath>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/svd/symmetric_eigen.hpp>
#include <pufferfish/linalg/vector_loops.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Whether shift I - a is positive definite, that is, whether all eigenvalues of a are below the shift.
/// Computed by a Cholesky factorization, with n^3 / 6 multiplications. a: [n x n] with dense rows, of which
/// only the lower triangle is read.
PUFFERFISH_COLD inline bool is_below(const tensor<double, 2>& a, double shift) {
  const index_t n = a.extent(0);
  tensor<double, 2> factor({n, n});
  for (index_t i = 0; i < n; ++i) {
    double* const row = factor.data() + i * n;
    for (index_t j = 0; j < i; ++j) {
      const double* const above = factor.data() + j * n;
      row[j] = (-a.data()[i * n + j] - dot(row, above, j)) / above[j];
    }
    const double square = shift - a.data()[i * n + i] - dot(row, row, i);
    if (!(square > 0.0)) return false;
    row[i] = std::sqrt(square);
  }
  return true;
}

/// Lanczos iteration on a symmetric matrix from a fixed start vector (Golub & Van Loan, Matrix Computations,
/// chapter 10). After k steps, ritz_value() is the largest eigenvalue of the matrix restricted to the span of
/// the start vector and its first k - 1 images. It rises towards the largest eigenvalue of the matrix and, up
/// to rounding, never exceeds it. The vectors are not reorthogonalized: rounding errors then duplicate
/// eigenvalues that have converged, but do not affect the largest one.
class lanczos_iteration {
 public:
  /// Prepares an iteration on `a` [n x n, rows dense], which must outlive this object. Both triangles are
  /// read. Elements have magnitudes of at most about one.
  explicit lanczos_iteration(const tensor<double, 2>& a)
      : a_(a), q_(a.extent(0)), before_(a.extent(0)), next_(a.extent(0)) {
    start_values random(0x706f776572U);
    for (index_t i = 0; i < n(); ++i) q_.data()[i] = random.next();
    scale_by(1.0 / std::sqrt(dot(q_.data(), q_.data(), n())), q_.data(), n());
  }

  /// Performs one more step. Returns false, without a step, if the span of the vectors so far contains the
  /// images of all of them.
  bool step() {
    if (finished_) return false;
    double* const next = next_.data();
    for (index_t i = 0; i < n(); ++i) next[i] = dot(a_.data() + i * n(), q_.data(), n());
    const double diagonal = dot(next, q_.data(), n());
    add_scaled(-diagonal, q_.data(), next, n());
    if (!t_.off.empty()) add_scaled(-t_.off.back(), before_.data(), next, n());
    const double length = std::sqrt(dot(next, next, n()));
    t_.diagonal.push_back(diagonal);
    t_.off.push_back(length);
    finished_ = length < 1e-14;
    if (!finished_) scale_by(1.0 / length, next, n());
    std::swap(before_, q_);
    std::swap(q_, next_);
    return true;
  }

  /// The largest eigenvalue of the tridiagonal matrix of all steps so far. At least one step must have run.
  double ritz_value() const {
    tridiagonal work = t_;
    work.off.back() = 0.0;
    run_ql(work);
    return *std::max_element(work.diagonal.begin(), work.diagonal.end());
  }

 private:
  index_t n() const { return a_.extent(0); }

  const tensor<double, 2>& a_;
  aligned_buffer<double> q_, before_, next_;
  tridiagonal t_;
  bool finished_ = false;
};

/// The largest eigenvalue of a matrix with a trace of about one and both triangles stored, by Lanczos
/// iteration. Returns 0 if the iteration has not converged.
PUFFERFISH_COLD inline double largest_by_lanczos(const tensor<double, 2>& a, double tolerance) {
  constexpr int most_steps = 128, between = 8, most_checks = 3;
  lanczos_iteration iteration(a);
  double before = 0.0;
  int checks = 0;
  for (int step = 1; step <= most_steps; ++step) {
    const bool goes_on = iteration.step();
    if (goes_on && step % between != 0) continue;
    const double value = iteration.ritz_value();
    const bool still = value - before <= 0.1 * tolerance * value;
    before = value;
    if (goes_on && !still) continue;
    if (value > 0.0 && is_below(a, value * (1.0 + tolerance))) return value;
    if (!goes_on || ++checks == most_checks) return 0.0;
  }
  return 0.0;
}

}  // namespace detail

/// The largest eigenvalue lambda_1 of a positive semidefinite matrix a [n x n]. Only the lower triangle is
/// read. The result v satisfies v <= lambda_1 <= v (1 + tolerance), up to rounding.
///
/// v is computed by Lanczos iteration, which needs about the square root of the number of products with a
/// that power iteration needs. A Cholesky factorization of v (1 + tolerance) I - a then proves the upper
/// bound for any start vector. All eigenvalues are computed (symmetric_eigen) for n <= 32, and if the proof
/// fails, because the tolerance is close to rounding or the iteration has not converged within 128 steps.
/// Deterministic: equal input gives equal bits.
///
/// `a` may have any strides and is not changed. Whether `a` is positive semidefinite is not checked. The
/// result is 0 for a matrix of zeros or without elements. Each Lanczos step needs n^2 multiplications, the
/// proof n^3 / 6; memory: two n x n matrices of doubles. Throws shape_error if a is not square, value_error
/// for a tolerance that is not positive and for an element that is not finite.
///
/// \code
/// const double sigma_1 = std::sqrt(largest_eigenvalue(gram));  // gram = A A^T, tensor<double, 2>
/// \endcode
PUFFERFISH_COLD inline double largest_eigenvalue(const tensor_view<const double, 2>& a,
                                                 double tolerance = 1e-6) {
  const index_t n = a.extent(0);
  if (a.extent(1) != n) {
    detail::throw_error<shape_error>({"largest_eigenvalue: a matrix ", a.shape(), " is not square"});
  }
  if (!(tolerance > 0.0)) {
    detail::throw_error<value_error>({"largest_eigenvalue: tolerance ", tolerance, " is not positive"});
  }
  double trace = 0.0;
  for (index_t i = 0; i < n; ++i) trace += a(i, i);
  const auto is_finite = [&a, n] {
    bool finite = true;
    for (index_t i = 0; i < n; ++i) {
      for (index_t j = 0; j <= i; ++j) finite = finite && std::isfinite(a(i, j));
    }
    return finite;
  };
  if (trace == 0.0 && is_finite()) return 0.0;  // otherwise symmetric_eigen throws
  constexpr index_t small = 32;
  if (n > small && trace > 0.0 && std::isfinite(trace)) {
    const double scale = detail::unit_scale(trace);
    tensor<double, 2> scaled({n, n});
    bool finite = true;
    for (index_t i = 0; i < n; ++i) {
      for (index_t j = 0; j <= i; ++j) {
        scaled(i, j) = scaled(j, i) = scale * a(i, j);
        finite = finite && std::isfinite(scaled(i, j));
      }
    }
    const double found = finite ? detail::largest_by_lanczos(scaled, tolerance) : 0.0;
    if (found > 0.0) return found / scale;
  }
  return std::max(0.0, symmetric_eigen(a).values().front());
}

PUFFERFISH_NAMESPACE_END
