// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: eigenvalues and eigenvectors of a symmetric tridiagonal matrix. Implicit QL iteration computes
/// all values and, if its rotations are accumulated, all vectors (at least 3 n^3 multiplications). Inverse
/// iteration computes the first few vectors in O(n) each. The result of inverse iteration is checked, so that
/// QL can be used if it fails.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/svd/orthonormal_rows.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A symmetric tridiagonal matrix: diagonal[0 .. n-1] and off-diagonal elements off[0 .. n-2]. `off` has n
/// entries, of which the last one is zero. The caller scales the entries to magnitudes of at most about one.
struct tridiagonal {
  std::vector<double> diagonal;
  std::vector<double> off;
  /// Number of rows n.
  index_t size() const { return static_cast<index_t>(diagonal.size()); }
};

/// Indices of `values` in descending order of the values; equal values in ascending order of the indices.
PUFFERFISH_COLD inline std::vector<index_t> descending_order(const std::vector<double>& values) {
  std::vector<index_t> order(values.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<index_t>(i);
  // Merge sort: stable, and compiles in a fraction of the time of std::stable_sort.
  std::vector<index_t> merged(values.size());
  const auto value = [&](std::size_t i) { return values[static_cast<std::size_t>(order[i])]; };
  for (std::size_t run = 1; run < order.size(); run *= 2) {
    for (std::size_t first = 0; first < order.size(); first += 2 * run) {
      const std::size_t middle = std::min(first + run, order.size());
      const std::size_t last = std::min(first + 2 * run, order.size());
      std::size_t left = first, right = middle;
      for (std::size_t to = first; to < last; ++to) {
        const bool from_right = left == middle || (right < last && value(right) > value(left));
        merged[to] = order[from_right ? right++ : left++];
      }
    }
    order.swap(merged);
  }
  return order;
}

/// The eigenvector matrix during QL, stored in panels of a few rows as [panel][column][row in panel].
/// Rotations are collected and then applied panel by panel, while the panel stays in the cache. A sweep runs
/// from high to low columns, so one of the two columns of a rotation is still in registers from the previous
/// rotation.
class rotated_columns {
 public:
  /// Starts with the identity matrix n x n.
  explicit rotated_columns(index_t n)
      : n_(n), panels_((n + width - 1) / width), data_(panels_ * n * width), rotations_(batch) {
    for (index_t i = 0; i < n; ++i) data_.data()[((i / width) * n + i) * width + i % width] = 1;
  }

  /// Adds one rotation, and applies all collected rotations when the batch is full. apply() must be called at
  /// the end.
  void add(const plane_rotation& rotation) {
    rotations_.data()[pending_++] = rotation;
    if (pending_ == batch) apply();
  }

  /// Applies all collected rotations.
  void apply() {
    for (index_t panel = 0; panel < panels_; ++panel) {
      rotate_panel(rotations_.data(), pending_, data_.data() + panel * n_ * width);
    }
    pending_ = 0;
  }

  /// Copies column `column`, n numbers, to contiguous memory. No rotation may be pending.
  void copy_column(index_t column, double* to) const {
    for (index_t i = 0; i < n_; ++i) to[i] = data_.data()[((i / width) * n_ + column) * width + i % width];
  }

 private:
  static constexpr index_t width = panel_width;
  static constexpr index_t batch = 4096;

  index_t n_;
  index_t panels_;
  aligned_buffer<double> data_;
  aligned_buffer<plane_rotation> rotations_;
  index_t pending_ = 0;
};

/// Implicit QL with Wilkinson's shift. On return, t.diagonal contains the eigenvalues, unsorted. `vectors`,
/// if given, receives every rotation in the order in which the eigenvector matrix must be multiplied by it.
/// t.off is overwritten. Throws error if 80 sweeps do not suffice for one eigenvalue.
PUFFERFISH_NOINLINE inline void run_ql(tridiagonal& t, rotated_columns* vectors = nullptr) {
  constexpr double epsilon = std::numeric_limits<double>::epsilon();
  constexpr int most_sweeps = 80;
  const index_t n = t.size();
  double* d = t.diagonal.data();
  double* e = t.off.data();
  const auto negligible = [&](index_t i) {
    // The absolute bound prevents the squares of remaining entries from underflowing.
    return std::abs(e[i]) <= epsilon * (std::abs(d[i]) + std::abs(d[i + 1])) || std::abs(e[i]) < 1e-140;
  };
  for (index_t l = 0; l < n; ++l) {
    for (int sweep = 0;; ++sweep) {
      index_t m = l;
      while (m + 1 < n && !negligible(m)) ++m;
      if (m == l) break;
      if (sweep == most_sweeps) {
        throw_error<error>({"symmetric_eigen: no convergence after ", most_sweeps,
                            " QL sweeps for eigenvalue ", l, " of ", n});
      }
      const double half_gap = (d[l + 1] - d[l]) / (2 * e[l]);
      const double root = std::sqrt(half_gap * half_gap + 1);
      double g = d[m] - d[l] + e[l] / (half_gap + std::copysign(root, half_gap));
      double s = 1;
      double c = 1;
      double p = 0;
      index_t i = m - 1;
      for (; i >= l; --i) {
        const double f = s * e[i];
        const double b = c * e[i];
        const double squares = f * f + g * g;
        if (squares > 1e-280) {
          const double r = std::sqrt(squares);
          const double inverse = 1 / r;
          e[i + 1] = r;
          s = f * inverse;
          c = g * inverse;
        } else {  // the squares have underflowed, partly or completely
          const double r = std::hypot(f, g);
          e[i + 1] = r;
          if (r == 0) break;
          s = f / r;
          c = g / r;
        }
        g = d[i + 1] - p;
        const double q = (d[i] - g) * s + 2 * c * b;
        p = s * q;
        d[i + 1] = g + p;
        g = c * q - b;
        if (vectors != nullptr) vectors->add(plane_rotation{i, c, s});
      }
      if (i >= l) {  // the chain broke early: the matrix splits here
        d[i + 1] -= p;
      } else {
        d[l] -= p;
        e[l] = g;
      }
      e[m] = 0;
    }
  }
}

/// Writes to the rows of z the eigenvectors of the largest z.extent(0) eigenvalues, by QL with accumulated
/// rotations. z: [count x n] with contiguous rows, count <= n.
PUFFERFISH_COLD inline void tridiagonal_vectors_by_ql(const tridiagonal& source,
                                                      const tensor_view<double, 2>& z) {
  tridiagonal t = source;
  rotated_columns columns(t.size());
  run_ql(t, &columns);
  columns.apply();
  const std::vector<index_t> order = descending_order(t.diagonal);
  for (index_t i = 0; i < z.extent(0); ++i) {
    columns.copy_column(order[static_cast<std::size_t>(i)], z.data() + i * z.stride(0));
  }
}

/// The factorization T - shift I = P L U with partial pivoting, stored for several solves. A pivot smaller
/// than `least_pivot` is replaced by least_pivot unless rows are exchanged, so that solve() never divides by
/// zero. For a shift that is an eigenvalue, the solution is then large in the direction of its eigenvector.
class shifted_factorization {
 public:
  /// Factorizes T - shift I.
  PUFFERFISH_NOINLINE shifted_factorization(const tridiagonal& t, double shift, double least_pivot)
      : rows_(t.size(), uninitialized) {
    const std::size_t n = t.diagonal.size();
    row* rows = rows_.data();
    double a = t.diagonal[0] - shift;
    double b = t.off[0];
    for (std::size_t i = 0; i + 1 < n; ++i) {
      const double below = t.off[i];
      const double next = t.diagonal[i + 1] - shift;
      const double beyond = t.off[i + 1];
      row& u = rows[i];
      u.swapped = std::abs(below) > std::abs(a);
      if (u.swapped) {
        u.factor = a / below;
        u.inverse = 1 / below;
        u.u1 = next;
        u.u2 = beyond;
        a = b - u.factor * next;
        b = -u.factor * beyond;
      } else {
        if (std::abs(a) < least_pivot) a = std::copysign(least_pivot, a);
        u.factor = below / a;
        u.inverse = 1 / a;
        u.u1 = b;
        u.u2 = 0;
        a = next - u.factor * b;
        b = beyond;
      }
    }
    if (std::abs(a) < least_pivot) a = std::copysign(least_pivot, a);
    rows[n - 1].inverse = 1 / a;
  }

  /// Solves (T - shift I) y = x; y overwrites x.
  PUFFERFISH_NOINLINE void solve(double* x) const {
    const index_t n = rows_.size();
    const row* rows = rows_.data();
    for (index_t i = 0; i + 1 < n; ++i) {
      if (rows[i].swapped) std::swap(x[i], x[i + 1]);
      x[i + 1] -= rows[i].factor * x[i];
    }
    x[n - 1] *= rows[n - 1].inverse;
    if (n < 2) return;
    x[n - 2] = (x[n - 2] - rows[n - 2].u1 * x[n - 1]) * rows[n - 2].inverse;
    for (index_t i = n - 2; i-- > 0;) {
      x[i] = (x[i] - rows[i].u1 * x[i + 1] - rows[i].u2 * x[i + 2]) * rows[i].inverse;
    }
  }

 private:
  // One row of the factorization: reciprocal pivot, the two elements of U right of the pivot, the factor of
  // the elimination, and whether two rows were exchanged.
  struct row {
    double inverse;
    double u1;
    double u2;
    double factor;
    bool swapped;
  };
  aligned_buffer<row> rows_;
};

/// Pseudo-random numbers in [-1, 1) by SplitMix64, for start vectors. The numbers are the same on every
/// machine.
class start_values {
 public:
  explicit start_values(std::uint64_t seed) : state_(seed) {}
  /// The next number.
  double next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15U);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-52 - 1;
  }

 private:
  std::uint64_t state_;
};

/// The largest |T x - value x| over the entries of x.
inline double tridiagonal_residual(const tridiagonal& t, double value, const double* x) {
  const index_t n = t.size();
  double largest = 0;
  for (index_t i = 0; i < n; ++i) {
    const auto at = static_cast<std::size_t>(i);
    double r = (t.diagonal[at] - value) * x[i];
    if (i > 0) r += t.off[at - 1] * x[i - 1];
    if (i + 1 < n) r += t.off[at] * x[i + 1];
    if (!(std::abs(r) <= largest)) largest = std::abs(r);
  }
  return largest;
}

/// Writes to the rows of z the eigenvectors of values[0 .. z.extent(0) - 1] (descending), by inverse
/// iteration. Vectors of values closer than 1e-5 are orthogonalized in each iteration, all others only once
/// at the end. Returns false, with unusable z, if a residual or the orthogonality is not accurate to
/// rounding.
PUFFERFISH_COLD inline bool tridiagonal_vectors_by_inverse_iteration(const tridiagonal& t,
                                                                     const std::vector<double>& values,
                                                                     const tensor_view<double, 2>& z) {
  constexpr double epsilon = std::numeric_limits<double>::epsilon();
  constexpr double cluster_gap = 1e-5;
  constexpr int solves = 3;
  const index_t n = t.size();
  start_values random(0x70756666U);
  index_t cluster = 0;
  double shift = 0;
  for (index_t i = 0; i < z.extent(0); ++i) {
    const double value = values[static_cast<std::size_t>(i)];
    if (i > 0 && values[static_cast<std::size_t>(i - 1)] - value > cluster_gap) cluster = i;
    // Equal shifts would give equal vectors, so adjacent shifts differ by at least a few units of rounding.
    shift = (i > cluster) ? std::min(value, shift - 4 * epsilon) : value;
    const shifted_factorization factors(t, shift, epsilon);
    double* x = z.data() + i * z.stride(0);
    for (index_t j = 0; j < n; ++j) x[j] = random.next();
    for (int step = 0; step < solves; ++step) {
      factors.solve(x);
      // Lengths grow by up to 1/epsilon per solve. A row without length fails the check below.
      normalize_row(x, n, 0.0);
      if (i > cluster) {
        project_out(z, i, x, cluster);
        normalize_row(x, n, 0.0);
      }
    }
  }
  orthonormalize_rows(z);
  const double tolerance = 64 * epsilon * std::sqrt(static_cast<double>(n));
  for (index_t i = 0; i < z.extent(0); ++i) {
    const double value = values[static_cast<std::size_t>(i)];
    if (!(tridiagonal_residual(t, value, z.data() + i * z.stride(0)) <= tolerance)) return false;
  }
  return true;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
