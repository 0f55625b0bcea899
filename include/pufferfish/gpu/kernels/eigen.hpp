// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of the eigensolver for symmetric matrices: Jacobi's method in blocks. A sweep is a number of
/// rounds in which every block of 32 rows meets every other one. In a round, pairs of blocks are independent:
/// for each pair one block of threads rotates the 64 rows and columns of the pair among themselves in shared
/// memory and notes the product of its rotations; these are then applied to the rest of the matrix, and to
/// the vectors, as products of 64 x 64 matrices.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Rows of a block of a matrix.
inline constexpr int jacobi_block = 32;
/// Rows that are rotated among themselves at a time: two blocks.
inline constexpr int jacobi_side = 2 * jacobi_block;

/// A matrix on its way to diagonal form. All in device memory.
template <class T>
struct jacobi_work {
  T* matrix;      ///< order x order, symmetric
  T* vectors;     ///< order x order: rows become the eigenvectors
  index_t order;  ///< > 0
  int blocks;     ///< even; 32 blocks >= order; 2 if order <= 64
  T tolerance;    ///< elements are zero beside their diagonal elements: |a_pq| <= this sqrt(a_pp a_qq),
  T floor;        ///< or beside the matrix: |a_pq| <= this times the trace
  T* trace;       ///< one number
  T* rotations;   ///< blocks / 2 matrices of 64 x 64: each pair's rotations, multiplied together
  int* moved;     ///< blocks / 2: whether the pair had any
  int* rotated;   ///< how many there were since somebody set it to zero
};

PUFFERFISH_KERNEL_TYPES_END
PUFFERFISH_KERNELS_BEGIN

/// vectors = the unit matrix; *trace = the matrix's.
template <class T>
void jacobi_begin(cudaStream_t stream, const jacobi_work<T>& work);

/// Rotates within the pairs of one round, 0 .. blocks - 2: `sweeps` times or until nothing is left to do.
template <class T>
void jacobi_rotate(cudaStream_t stream, const jacobi_work<T>& work, int round, int sweeps);

/// Applies the rotations of that round to everything else.
template <class T>
void jacobi_apply(cudaStream_t stream, const jacobi_work<T>& work, int round);

/// values_i = matrix_ii.
template <class T>
void take_diagonal(cudaStream_t stream, const T* matrix, T* values, index_t order);

PUFFERFISH_KERNELS_END
