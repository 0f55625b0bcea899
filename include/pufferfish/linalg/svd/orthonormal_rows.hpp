// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: makes the rows of a matrix orthonormal, earlier rows first, and replaces rows that are zero or
/// dependent.

#include <algorithm>
#include <cmath>
#include <vector>

#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/gemm/double_product.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Computes e = z z^T - I, of which only the lower triangle is valid. Returns the largest |e(i, j)|, j <= i,
/// or NaN if z has a NaN.
PUFFERFISH_NOINLINE inline double orthonormality_defect(const tensor_view<double, 2>& z,
                                                        const tensor_view<double, 2>& e) {
  const index_t rows = z.extent(0);
  const auto columns = product_operand(z).transposed();
  for (index_t i = 0; i < rows; ++i) std::fill_n(e.data() + i * e.stride(0), rows, 0.0);
  add_product_tn(columns, columns, e, product_part::lower);
  double largest = 0;
  for (index_t i = 0; i < rows; ++i) {
    e(i, i) -= 1;
    for (index_t j = 0; j <= i; ++j) {
      // Not std::max, which would drop a NaN.
      if (!(std::abs(e(i, j)) <= largest)) largest = std::abs(e(i, j));
    }
  }
  return largest;
}

/// Removes from `row` its components along rows begin .. before - 1 of z. Two passes, because one pass leaves
/// rounding errors of a nearly dependent row.
PUFFERFISH_COLD inline void project_out(const tensor_view<double, 2>& z, index_t before, double* row,
                                        index_t begin = 0) {
  const index_t length = z.extent(1);
  for (int pass = 0; pass < 2; ++pass) {
    for (index_t j = begin; j < before; ++j) {
      const double* other = z.data() + j * z.stride(0);
      add_scaled(-dot(other, row, length), other, row, length);
    }
  }
}

/// Scales a row to length one. Returns false, leaving the row unchanged, unless its length exceeds `least`.
PUFFERFISH_COLD inline bool normalize_row(double* row, index_t length, double least) {
  const double norm = std::sqrt(dot(row, row, length));
  if (!(norm > least)) return false;
  scale_by(1 / norm, row, length);
  return true;
}

/// Writes into row `row` a unit vector orthogonal to all previous rows, which are orthonormal. The vector is
/// made from the coordinate direction that the previous rows cover least: a share of at least (length - row)
/// / length of that direction remains.
PUFFERFISH_COLD inline void complete_row(const tensor_view<double, 2>& z, index_t row) {
  const index_t length = z.extent(1);
  std::vector<double> covered(static_cast<std::size_t>(length));
  for (index_t j = 0; j < row; ++j) {
    const double* other = z.data() + j * z.stride(0);
    for (index_t i = 0; i < length; ++i) covered[static_cast<std::size_t>(i)] += other[i] * other[i];
  }
  const auto least = std::min_element(covered.begin(), covered.end()) - covered.begin();
  double* target = z.data() + row * z.stride(0);
  std::fill_n(target, length, 0.0);
  target[least] = 1;
  project_out(z, row, target);
  normalize_row(target, length, 0.0);
}

/// Makes the rows of z orthonormal by Gram-Schmidt in blocks: two products remove a block's components along
/// all earlier rows, then the block's rows are made orthonormal one by one. Rows that vanish are replaced.
PUFFERFISH_COLD inline void orthonormalize_rows_by_projection(const tensor_view<double, 2>& z) {
  constexpr index_t block = 32;
  const index_t rows = z.extent(0);
  const index_t length = z.extent(1);
  for (index_t i = 0; i < rows; ++i) normalize_row(z.data() + i * z.stride(0), length, 0.0);
  for (index_t first = 0; first < rows; first += block) {
    const index_t count = std::min(block, rows - first);
    const product_operand done = z.slice(0, 0, first);
    const tensor_view<double, 2> fresh = z.slice(0, first, count);
    for (int pass = 0; pass < 2 && first > 0; ++pass) {
      tensor<double, 2> shadow({first, count});
      add_product_tn(done.transposed(), product_operand(fresh).transposed(), shadow);
      scale_by(-1, shadow.data(), shadow.size());
      add_product_tn(shadow, done, fresh);
    }
    for (index_t i = first; i < first + count; ++i) {
      double* row = z.data() + i * z.stride(0);
      // A shorter row consists mostly of rounding errors of the projections, so it is replaced.
      const bool alive = normalize_row(row, length, 1e-12);
      if (alive) project_out(z, i, row, first);
      if (!alive || !normalize_row(row, length, 1e-10)) {
        complete_row(z, i);
        continue;
      }
      // The block was projected before this row was scaled up; a second projection is cheap.
      project_out(z, i, row);
      normalize_row(row, length, 0.0);
    }
  }
}

/// Makes the rows of z (rows <= length, contiguous) orthonormal to about 1e-14. Row i changes only by
/// combinations of previous rows, so rows that are already orthonormal do not change. Rows that are zero or
/// depend on earlier rows are replaced by unit vectors orthogonal to all others.
PUFFERFISH_COLD inline void orthonormalize_rows(const tensor_view<double, 2>& z) {
  constexpr double good = 1e-13;
  const index_t rows = z.extent(0);
  if (rows == 0) return;
  tensor<double, 2> e({rows, rows});
  double defect = orthonormality_defect(z, e);
  // For nearly orthonormal rows, Z := (I - L) Z, with L the strict lower part of E plus half its diagonal,
  // reduces the defect to the order of its square.
  for (int step = 0; step < 3 && defect > good && defect * static_cast<double>(rows) < 0.1; ++step) {
    tensor<double, 2> lower_transposed({rows, rows});
    for (index_t i = 0; i < rows; ++i) {
      for (index_t j = 0; j < i; ++j) lower_transposed(j, i) = -e(i, j);
      lower_transposed(i, i) = -0.5 * e(i, i);
    }
    const tensor<double, 2> before = product_operand(z).copy();
    add_product_tn(lower_transposed, before, z);
    defect = orthonormality_defect(z, e);
  }
  if (!(defect <= good)) orthonormalize_rows_by_projection(z);
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
