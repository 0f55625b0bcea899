// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `symmetric_eigen`: eigenvalues of a real symmetric matrix in double, and any number of eigenvectors.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/gemm/double_product.hpp>
#include <pufferfish/linalg/svd/tridiagonal.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A power of two s with 1/2 <= s * largest < 1 (1 for zero), so that scaling causes no rounding errors.
inline double unit_scale(double largest) {
  if (largest == 0) return 1;
  int exponent = 0;
  std::frexp(largest, &exponent);
  // 2^1023 is the largest power of two in double; a matrix of denormals is scaled to less than 1/2.
  return std::ldexp(1.0, std::min(-exponent, 1023));
}

/// A Householder reflection I - beta v v^T that maps x[0 .. count) to (0, ..., 0, alpha).
struct reflector {
  double beta;
  double alpha;
};
/// Computes the reflection for x, which is replaced by v.
inline reflector reflect_to_last(double* x, index_t count) {
  const double last = x[count - 1];
  const double rest = dot(x, x, count - 1);
  // Negligible for a matrix scaled to one; and squares of 1 / rest must not overflow.
  if (rest < 1e-200) return {0, last};
  const double norm = std::sqrt(rest + last * last);
  const double alpha = last > 0 ? -norm : norm;
  x[count - 1] = last - alpha;
  return {2 / (rest + x[count - 1] * x[count - 1]), alpha};
}

/// Householder reduction of the lower triangle of a, from the last row up: A = Q T Q^T with Q = H_{n-1} ...
/// H_2. Row i >= 2 of a is overwritten by the reflector v_i (entries 0 .. i-1), whose factor is betas[i].
PUFFERFISH_COLD inline tridiagonal reduce_to_tridiagonal(tensor<double, 2>& a,
                                                         aligned_buffer<double>& betas) {
  const index_t n = a.extent(0);
  const auto count = static_cast<std::size_t>(n);
  tridiagonal t{std::vector<double>(count), std::vector<double>(count)};
  betas = aligned_buffer<double>(n);
  aligned_buffer<double> zero(n), w_buffer(n), y_buffer(n);
  double* w = w_buffer.data();
  double* y = y_buffer.data();
  const double* v = zero.data();
  for (index_t i = n - 1; i >= 1; --i) {
    const auto at = static_cast<std::size_t>(i);
    double* row = a.data() + i * n;
    // Apply the pending update v w^T + w v^T of the previous step to this row first.
    for (index_t j = 0; j <= i; ++j) row[j] -= v[i] * w[j] + w[i] * v[j];
    t.diagonal[at] = row[i];
    const reflector h = i >= 2 ? reflect_to_last(row, i) : reflector{0, row[0]};
    t.off[at - 1] = h.alpha;
    betas.data()[i] = h.beta;
    update_and_multiply(a.data(), n, i, v, w, row, y);
    const double half = 0.5 * h.beta * (h.beta * dot(row, y, i));
    for (index_t j = 0; j < i; ++j) w[j] = h.beta * y[j] - half * row[j];
    v = h.beta == 0 ? zero.data() : row;
    if (h.beta == 0) std::fill_n(w, n, 0.0);
  }
  if (n > 0) t.diagonal[0] = a.data()[0];
  return t;
}

/// Multiplies each row of z, as a column vector, by the Q of reduce_to_tridiagonal: z := z Q^T. The
/// reflectors are applied in blocks, each I - V^T S V with S upper triangular, so that most work is in matrix
/// products.
PUFFERFISH_COLD inline void apply_reflectors(const tensor<double, 2>& a, const aligned_buffer<double>& betas,
                                             const tensor_view<double, 2>& z) {
  constexpr index_t block = 32;
  const index_t n = a.extent(0);
  const index_t rows = z.extent(0);
  for (index_t first = 2; first < n && rows > 0; first += block) {
    const index_t count = std::min(block, n - first);
    const index_t length = first + count - 1;
    tensor<double, 2> v({count, length});
    tensor<double, 2> s({count, count});
    for (index_t k = 0; k < count; ++k) {
      const double beta = betas.data()[first + k];
      std::copy_n(a.data() + (first + k) * n, first + k, v.data() + k * length);
      double overlap[block] = {};
      for (index_t j = 0; j < k; ++j) overlap[j] = dot(v.data() + j * length, v.data() + k * length, length);
      for (index_t i = 0; i < k; ++i) {
        double sum = 0;
        for (index_t j = i; j < k; ++j) sum += s(i, j) * overlap[j];
        s(i, k) = -beta * sum;
      }
      s(k, k) = beta;
    }
    const tensor_view<double, 2> part = z.slice(1, 0, length);
    tensor<double, 2> along({count, rows});  // the products V Z^T
    tensor<double, 2> removed({count, rows});
    add_product_tn(product_operand(v).transposed(), product_operand(part).transposed(), along);
    add_product_tn(s, along, removed);
    scale_by(-1, removed.data(), removed.size());
    add_product_tn(removed, v, part);
  }
}

}  // namespace detail

/// Eigenvalues and eigenvectors of a real symmetric matrix, A = sum_i values[i] x_i x_i^T. Eigenvalues are
/// computed by Householder reduction to tridiagonal form, then implicit QL. Few eigenvectors are computed by
/// inverse iteration on the tridiagonal form, which is checked, with QL as a fallback; many eigenvectors by
/// QL with accumulated rotations (Golub & Van Loan, Matrix Computations, chapter 8). Errors of values and
/// residuals are a small multiple of 1e-16 times the largest |value|. Deterministic: equal input gives equal
/// bits.
///
/// \code
/// pufferfish::symmetric_eigen eigen(gram.view());
/// auto axes = eigen.vectors(8);  // rows: the eigenvectors of the 8 largest values
/// \endcode
class symmetric_eigen {
 public:
  /// Reduces a [n x n] to tridiagonal form and computes all eigenvalues. a may have any strides and is not
  /// referred to afterwards; only the lower triangle is read. The cost is about 2 n^3 / 3 multiplications in
  /// the calling thread and n^2 doubles of memory. Throws shape_error if a is not square, value_error if an
  /// entry read is not finite, and error if QL does not converge in 80 sweeps for one eigenvalue.
  explicit symmetric_eigen(const tensor_view<const double, 2>& a);

  /// All n eigenvalues in descending order.
  const std::vector<double>& values() const { return values_; }

  /// The first `count` eigenvectors [count x n]: row i is the eigenvector of values()[i], with length one and
  /// an unspecified sign. Rows are orthonormal also for repeated eigenvalues. The cost is about count n^2
  /// multiplications for few vectors, 3 n^3 for more than half of them. Several threads may call this
  /// function on one object. Throws rank_error unless 0 <= count <= n.
  tensor<double, 2> vectors(index_t count) const;

 private:
  tensor<double, 2> reflectors_;
  aligned_buffer<double> betas_;
  detail::tridiagonal t_;
  std::vector<double> scaled_values_;
  std::vector<double> values_;
};

inline symmetric_eigen::symmetric_eigen(const tensor_view<const double, 2>& a) : reflectors_(a.shape()) {
  const index_t n = a.extent(0);
  if (a.extent(1) != n) {
    detail::throw_error<shape_error>({"symmetric_eigen: a matrix ", a.shape(), " is not square"});
  }
  double largest = 0;
  for (index_t i = 0; i < n; ++i) {
    for (index_t j = 0; j <= i; ++j) {
      const double value = a(i, j);
      if (!std::isfinite(value)) {
        detail::throw_error<value_error>(
            {"symmetric_eigen: element (", i, ", ", j, ") of the matrix ", a.shape(), " is not finite"});
      }
      largest = std::max(largest, std::abs(value));
      reflectors_(i, j) = value;
    }
  }
  // Norms are at most n times the largest entry, so no square overflows after this scaling.
  const double scale = detail::unit_scale(largest);
  for (index_t i = 0; i < n; ++i) detail::scale_by(scale, reflectors_.data() + i * n, i + 1);
  t_ = detail::reduce_to_tridiagonal(reflectors_, betas_);
  detail::tridiagonal work = t_;
  detail::run_ql(work);
  const std::vector<index_t> order = detail::descending_order(work.diagonal);
  scaled_values_ = std::vector<double>(order.size());
  values_ = std::vector<double>(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    scaled_values_[i] = work.diagonal[static_cast<std::size_t>(order[i])];
    values_[i] = scaled_values_[i] / scale;
  }
}

PUFFERFISH_COLD inline tensor<double, 2> symmetric_eigen::vectors(index_t count) const {
  const index_t n = reflectors_.extent(0);
  if (count < 0 || count > n) {
    detail::throw_error<rank_error>(
        {"symmetric_eigen: ", count, " eigenvectors wanted of a matrix of order ", n});
  }
  tensor<double, 2> z({count, n});
  if (count == 0) return z;
  // For more than half of the vectors and for small matrices, QL is not slower and needs no check.
  const bool few = n >= 32 && 2 * count <= n;
  if (!few || !detail::tridiagonal_vectors_by_inverse_iteration(t_, scaled_values_, z)) {
    detail::tridiagonal_vectors_by_ql(t_, z);
  }
  detail::apply_reflectors(reflectors_, betas_, z);
  return z;
}

PUFFERFISH_NAMESPACE_END
