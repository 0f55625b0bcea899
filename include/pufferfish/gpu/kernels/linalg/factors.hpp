// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of a factorization, except for its products and its eigensolver. T is the type of stored
/// weights; the computation is in double. All arrays are in device memory. Each launcher throws backend_error
/// if its launch fails.
///
/// Order of use (gpu::detail::device_svd): measure_matrix and load_matrix; for the singular vectors
/// mirror_lower, the eigensolver, orthogonality_correction and row_norms; for the factors row_signs and
/// store_factor.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// How a matrix is stored in memory. Element (row, column) is at row row_step + i steps[0] + j steps[1] + k
/// steps[2], where (i, j, k) are the three indices that count the columns, the last one fastest. Example: an
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

/// Singular vectors of one side as the rows of a matrix, and the numbers that scale them to a factor.
struct singular_rows {
  const double* rows;  ///< rows of `length` elements: unit vectors, or unit vectors times sigma
  index_t length;
  const int* order;     ///< row number of the i-th largest singular value
  index_t count;        ///< number of rows that are used
  const double* norms;  ///< singular value of each row
};

PUFFERFISH_KERNEL_TYPES_END
PUFFERFISH_KERNELS_BEGIN

/// Number of columns of a matrix.
PUFFERFISH_HOST_DEVICE inline index_t columns_of(const matrix_layout& layout) {
  return layout.extents[0] * layout.extents[1] * layout.extents[2];
}
/// Offset in memory of an element, in elements.
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

/// Converts a matrix to a dense matrix of doubles: to_ij = matrix_ij, or with `transposed` to_ji = matrix_ij.
template <class T>
void load_matrix(cudaStream_t stream, const T* matrix, const matrix_layout& layout, bool transposed,
                 double* to);

/// Copies the lower triangle of a square matrix, order x order, to its upper triangle. In place.
void mirror_lower(cudaStream_t stream, double* matrix, index_t order);

/// e := (3 I - e) / 2 in place, where e = X X^T [order x order] for rows X. The rows of e X are then
/// orthonormal up to the square of the error of X (one step of Newton's iteration for the nearest orthogonal
/// matrix).
void orthogonality_correction(cudaStream_t stream, double* e, index_t order);

/// norms_i = the Euclidean length of row i. rows: count x length, dense. One block per row.
void row_norms(cudaStream_t stream, const double* rows, index_t count, index_t length, double* norms);

/// signs_i = -1 where the element of largest magnitude of the i-th row in order is negative, else 1. Among
/// equal magnitudes the first element decides.
void row_signs(cudaStream_t stream, const singular_rows& of, double* signs);

/// Writes a factor whose i-th row is signs_i sqrt(sigma_i) times the i-th singular vector; the row is zero if
/// sigma_i is zero. The rows of `of` are unit vectors or, with `scaled`, sigma_i times unit vectors.
/// layout.rows must be of.count, and columns_of(layout) must be of.length.
template <class T>
void store_factor(cudaStream_t stream, const singular_rows& of, const double* signs, bool scaled, T* to,
                  const matrix_layout& layout);

/// to_i = from_(i step) for i < size, or to_i += from_(i step) with `add`.
template <class T>
void copy_vector(cudaStream_t stream, const T* from, index_t step, T* to, index_t size, bool add);

PUFFERFISH_KERNELS_END
