// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: one-sided Jacobi SVD after a QR factorization with column pivoting. This method is slower than
/// the Gram matrix, but computes small singular values of a graded matrix to nearly all their digits. Source:
/// Drmac & Veselic, New fast and accurate Jacobi SVD algorithm (SIAM J. Matrix Anal. Appl. 29, 2008); for
/// sorting the rows first: Cox & Higham, Stability of Householder QR for weighted least squares (1998).

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/svd/tridiagonal.hpp>
#include <pufferfish/linalg/vector_loops.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A factorization B^T P = Q R of a wide matrix B [n x m], n <= m, whose rows (the columns of B^T) are
/// contiguous. Row j of `work` contains the j-th reflector v_j from column j on; the reflection is I -
/// betas[j] v v^T. Column i of R belongs to row pivots[i] of B.
struct pivoted_qr {
  tensor<double, 2> work;
  tensor<double, 2> r;
  std::vector<double> betas;
  std::vector<index_t> pivots;
};

/// Overwrites `v` with the Householder reflector that maps it to (alpha, 0, ..., 0). Returns {beta, alpha},
/// where the reflection is I - beta v v^T.
inline std::pair<double, double> reflect_to_first(double* v, index_t count) {
  const double first = v[0];
  const double rest = dot(v + 1, v + 1, count - 1);
  if (rest < std::numeric_limits<double>::min()) return {0.0, first};
  const double norm = std::sqrt(first * first + rest);
  const double alpha = first > 0 ? -norm : norm;
  v[0] = first - alpha;
  return {2 / (v[0] * v[0] + rest), alpha};
}

/// Householder QR of B^T with column pivoting: in step j, the row of B with the largest remaining norm comes
/// first. Norms are downdated, and summed again where the difference has lost four digits.
PUFFERFISH_COLD inline pivoted_qr factor_with_pivoting(tensor<double, 2> b) {
  const index_t n = b.extent(0);
  const index_t m = b.extent(1);
  const auto count = static_cast<std::size_t>(n);
  pivoted_qr f{std::move(b), tensor<double, 2>({n, n}), std::vector<double>(count),
               std::vector<index_t>(count)};
  for (std::size_t i = 0; i < count; ++i) f.pivots[i] = static_cast<index_t>(i);
  const auto row = [&](index_t i) { return f.work.data() + i * m; };
  // Squared norms of the remaining part of each row, downdated; and their values when last summed.
  std::vector<double> left(count), summed(count);
  for (index_t i = 0; i < n; ++i) {
    left[static_cast<std::size_t>(i)] = summed[static_cast<std::size_t>(i)] = dot(row(i), row(i), m);
  }
  for (index_t j = 0; j < n; ++j) {
    const auto at = static_cast<std::size_t>(j);
    const auto best = static_cast<std::size_t>(std::max_element(left.begin() + j, left.end()) - left.begin());
    if (best != at) {
      std::swap_ranges(row(j), row(j) + m, row(static_cast<index_t>(best)));
      for (index_t i = 0; i < j; ++i) std::swap(f.r(i, j), f.r(i, static_cast<index_t>(best)));
      std::swap(f.pivots[at], f.pivots[best]);
      std::swap(left[at], left[best]);
      std::swap(summed[at], summed[best]);
    }
    const index_t length = m - j;
    double* v = row(j) + j;
    const auto [beta, alpha] = reflect_to_first(v, length);
    f.betas[at] = beta;
    f.r(j, j) = alpha;
    for (index_t i = j + 1; i < n; ++i) {
      double* x = row(i) + j;
      if (beta != 0) add_scaled(-beta * dot(v, x, length), v, x, length);
      f.r(j, i) = x[0];
      const auto to = static_cast<std::size_t>(i);
      left[to] -= x[0] * x[0];
      if (!(left[to] > 1e-4 * summed[to])) left[to] = summed[to] = dot(x + 1, x + 1, length - 1);
    }
  }
  return f;
}

/// Rotates the rows of w (square) until they are orthogonal, and the rows of z in the same way: w = J
/// w_before and z = J z_before for an orthogonal J. Zero rows stay zero. Throws error if 60 sweeps do not
/// suffice.
PUFFERFISH_COLD inline void orthogonalize_by_rotation(tensor<double, 2>& w, tensor<double, 2>& z) {
  constexpr int most_sweeps = 60;
  const index_t n = w.extent(0);
  const double tolerance = std::numeric_limits<double>::epsilon() * std::sqrt(static_cast<double>(n));
  std::vector<double> norms(static_cast<std::size_t>(n));  // squared norms of the rows of w
  const auto row = [n](tensor<double, 2>& x, index_t i) { return x.data() + i * n; };
  for (int sweep = 0; sweep < most_sweeps; ++sweep) {
    for (index_t i = 0; i < n; ++i) norms[static_cast<std::size_t>(i)] = dot(row(w, i), row(w, i), n);
    bool rotated = false;
    for (index_t p = 0; p + 1 < n; ++p) {
      for (index_t q = p + 1; q < n; ++q) {
        double& pp = norms[static_cast<std::size_t>(p)];
        double& qq = norms[static_cast<std::size_t>(q)];
        if (pp == 0 || qq == 0) continue;
        const double pq = dot(row(w, p), row(w, q), n);
        if (std::abs(pq) <= tolerance * std::sqrt(pp) * std::sqrt(qq)) continue;
        rotated = true;
        const double zeta = (qq - pp) / (2 * pq);
        const double t = std::copysign(1 / (std::abs(zeta) + std::hypot(1.0, zeta)), zeta);
        const double c = 1 / std::sqrt(1 + t * t);
        rotate(c, c * t, row(w, p), row(w, q), n);
        rotate(c, c * t, row(z, p), row(z, q), n);
        const double old_p = pp;
        const double old_q = qq;
        pp -= t * pq;
        qq += t * pq;
        // Sum again if the difference has lost digits.
        if (!(pp > 1e-2 * old_p)) pp = dot(row(w, p), row(w, p), n);
        if (!(qq > 1e-2 * old_q)) qq = dot(row(w, q), row(w, q), n);
      }
    }
    if (!rotated) return;
  }
  throw_error<error>(
      {"svd: no convergence after ", most_sweeps, " Jacobi sweeps over a matrix of order ", n});
}

/// The singular values of a wide matrix in descending order, and the data for computing its singular vectors.
class jacobi_decomposition {
 public:
  /// Decomposes b [n x m], n <= m, whose entries have magnitudes of at most about one. b is read during the
  /// call only. Throws error if the rotations do not converge.
  PUFFERFISH_COLD explicit jacobi_decomposition(const tensor_view<const double, 2>& b) {
    const index_t n = b.extent(0);
    const index_t m = b.extent(1);
    // Large columns first, so that the reflectors preserve the digits of small columns.
    std::vector<double> size(static_cast<std::size_t>(m));
    for (index_t i = 0; i < n; ++i) {
      for (index_t j = 0; j < m; ++j) {
        size[static_cast<std::size_t>(j)] = std::max(size[static_cast<std::size_t>(j)], std::abs(b(i, j)));
      }
    }
    columns_ = descending_order(size);
    tensor<double, 2> sorted({n, m});
    for (index_t i = 0; i < n; ++i) {
      for (index_t j = 0; j < m; ++j) sorted.data()[i * m + j] = b(i, columns_[static_cast<std::size_t>(j)]);
    }
    qr_ = factor_with_pivoting(std::move(sorted));
    rotations_ = tensor<double, 2>({n, n});
    for (index_t i = 0; i < n; ++i) rotations_(i, i) = 1;
    orthogonalize_by_rotation(qr_.r, rotations_);
    std::vector<double> norms(static_cast<std::size_t>(n));
    for (index_t i = 0; i < n; ++i) {
      const double* row = qr_.r.data() + i * n;
      norms[static_cast<std::size_t>(i)] = std::sqrt(dot(row, row, n));
    }
    order_ = descending_order(norms);
    values_ = std::vector<double>(norms.size());
    for (std::size_t i = 0; i < norms.size(); ++i) values_[i] = norms[static_cast<std::size_t>(order_[i])];
  }

  /// All n singular values, in descending order.
  const std::vector<double>& values() const { return values_; }

  /// Row i of `left` [k x n] and of `right` [k x m] become the i-th singular vectors of b. A left vector is
  /// zero if its singular value is zero.
  PUFFERFISH_COLD void vectors(tensor<double, 2>& left, tensor<double, 2>& right) const {
    const index_t k = left.extent(0);
    const index_t n = left.extent(1);
    const index_t m = right.extent(1);
    tensor<double, 2> y({k, m});
    for (index_t i = 0; i < k; ++i) {
      const index_t from = order_[static_cast<std::size_t>(i)];
      const double value = values_[static_cast<std::size_t>(i)];
      for (index_t c = 0; c < n && value > 0; ++c) {
        left(i, qr_.pivots[static_cast<std::size_t>(c)]) = qr_.r(from, c) / value;
      }
      std::copy_n(rotations_.data() + from * n, n, y.data() + i * m);
    }
    for (index_t j = n; j-- > 0;) {
      const double beta = qr_.betas[static_cast<std::size_t>(j)];
      const double* v = qr_.work.data() + j * m + j;
      for (index_t i = 0; i < k && beta != 0; ++i) {
        double* x = y.data() + i * m + j;
        add_scaled(-beta * dot(v, x, m - j), v, x, m - j);
      }
    }
    for (index_t i = 0; i < k; ++i) {
      for (index_t j = 0; j < m; ++j) right(i, columns_[static_cast<std::size_t>(j)]) = y(i, j);
    }
  }

 private:
  std::vector<index_t> columns_;
  pivoted_qr qr_;
  tensor<double, 2> rotations_;
  std::vector<index_t> order_;
  std::vector<double> values_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
