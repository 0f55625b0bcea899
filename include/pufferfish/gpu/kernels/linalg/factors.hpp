// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of a factorization, apart from its products and its eigensolver. T is the type of stored
/// weights; the computation is in double.
///
/// Order of use (gpu::detail::device_svd): measure_matrix and load_matrix; for the vectors mirror_lower, the
/// eigensolver, orthogonality_correction and row_norms; for the factors row_signs and store_factor.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// How a matrix is stored in memory. Its columns may be counted by three indices, the last one fastest: an
/// unrolled convolution [out][in height width] whose weight is stored [height][width][in][out].
struct matrix_layout {
  index_t rows;
  index_t row_step;
  index_t extents[3];
  index_t steps[3];
};

/// The results of one pass over all elements of a matrix.
struct matrix_moments {
  double sum_of_squares;
  double largest;  ///< largest magnitude; not finite if an element is not
};

/// Singular vectors of one side, as rows, and the numbers that scale them to a factor.
struct singular_rows {
  const double* rows;  ///< `length` elements each: unit vectors of one side, sigma times those of the other
  index_t length;
  const int* order;     ///< row number of the i-th largest singular value
  index_t count;        ///< number of rows that are used
  const double* norms;  ///< sigma, by row
};

PUFFERFISH_KERNEL_TYPES_END
PUFFERFISH_KERNELS_BEGIN

PUFFERFISH_HOST_DEVICE inline index_t columns_of(const matrix_layout& layout) {
  return layout.extents[0] * layout.extents[1] * layout.extents[2];
}
/// Offset of an element in memory.
PUFFERFISH_HOST_DEVICE inline index_t offset_of(const matrix_layout& layout, index_t row, index_t column) {
  const index_t last = column % layout.extents[2], rest = column / layout.extents[2];
  return row * layout.row_step + rest / layout.extents[1] * layout.steps[0] +
         rest % layout.extents[1] * layout.steps[1] + last * layout.steps[2];
}

/// Largest number of partial results of measure_matrix.
inline constexpr int most_moment_parts = 256;

/// *result = the moments of the matrix. `parts`: workspace of most_moment_parts elements. The order of the
/// sum depends on the number of elements alone.
template <class T>
void measure_matrix(cudaStream_t stream, const T* matrix, const matrix_layout& layout, matrix_moments* parts,
                    matrix_moments* result);

/// to_ij = matrix_ij, dense, or with `transposed` to_ji = matrix_ij.
template <class T>
void load_matrix(cudaStream_t stream, const T* matrix, const matrix_layout& layout, bool transposed,
                 double* to);

/// The upper triangle of a square matrix becomes the mirror image of the lower one. In place; the lower
/// triangle is not changed.
void mirror_lower(cudaStream_t stream, double* matrix, index_t order);

/// e := (3 I - e) / 2, where e = X X^T for some rows X: the rows of e X are orthonormal up to the square of
/// their error (one step of Newton's iteration for the nearest orthogonal matrix). In place.
void orthogonality_correction(cudaStream_t stream, double* e, index_t order);

/// norms_i = the length of row i. rows: count x length, dense. One block a row.
void row_norms(cudaStream_t stream, const double* rows, index_t count, index_t length, double* norms);

/// signs_i = -1 where the element of largest magnitude (the first of equal ones) of the i-th row in order is
/// negative, else 1.
void row_signs(cudaStream_t stream, const singular_rows& of, double* signs);

/// Writes a factor: its i-th row is signs_i sqrt(sigma_i) times the i-th singular vector. The rows of `of`
/// are unit vectors or, with `scaled`, sigma_i times those. The row is zero if sigma_i is. layout.rows
/// is of.count, and columns_of(layout) is of.length.
template <class T>
void store_factor(cudaStream_t stream, const singular_rows& of, const double* signs, bool scaled, T* to,
                  const matrix_layout& layout);

/// to_i = from_i, or += with `add`; from_i are `step` elements apart.
template <class T>
void copy_vector(cudaStream_t stream, const T* from, index_t step, T* to, index_t size, bool add);

PUFFERFISH_KERNELS_END
