// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of the eigensolver for symmetric matrices: Jacobi's method in blocks. In the rounds of a
/// sweep every block of 32 rows forms a pair with every other one. The pairs of a round are independent:
/// for each pair a block of threads rotates the 64 rows and columns of the pair among themselves in shared
/// memory and stores the product of its rotations. Then the rest of the matrix, and the vectors, are
/// multiplied by these products of 64 x 64.
///
/// Order of use (gpu::jacobi_eigensolver):
///
///     jacobi_begin(stream, work);
///     do {
///       ... *work.rotated = 0 on the device ...
///       for (int round = 0; round < work.blocks - 1; ++round) {
///         jacobi_rotate(stream, work, round, 1);
///         jacobi_apply(stream, work, round);
///       }
///     } while (... *work.rotated > 0 ...);
///     take_diagonal(stream, work.matrix, values, work.order);

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Rows of a block of a matrix.
inline constexpr int jacobi_block = 32;
/// Rows of a pair of blocks, which are rotated among themselves.
inline constexpr int jacobi_side = 2 * jacobi_block;

/// The state of a diagonalization. All arrays are in device memory.
template <class T>
struct jacobi_work {
  T* matrix;      ///< order x order, symmetric
  T* vectors;     ///< order x order: rows become the eigenvectors
  index_t order;  ///< > 0
  int blocks;     ///< even; 32 blocks >= order; 2 if order <= 64
  T tolerance;    ///< an element counts as zero if |a_pq| <= tolerance sqrt(a_pp a_qq),
  T floor;        ///< or if |a_pq| <= floor times the trace
  T* trace;       ///< one number
  T* rotations;   ///< blocks / 2 matrices of 64 x 64: the product of each pair's rotations
  int* moved;     ///< blocks / 2 flags: whether the pair had rotations
  int* rotated;   ///< number of rotations since it was last set to zero
};

PUFFERFISH_KERNEL_TYPES_END
PUFFERFISH_KERNELS_BEGIN

/// vectors = the unit matrix; *trace = the trace of the matrix. One launch. All launchers throw backend_error
/// if a launch fails.
template <class T>
void jacobi_begin(cudaStream_t stream, const jacobi_work<T>& work);

/// Rotates within the pairs of one round, 0 .. blocks - 2: at most `sweeps` sweeps, fewer if all is zero.
/// Adds the number of rotations to *work.rotated. One block of 256 threads per pair, with 2 x 64 x 65 numbers
/// of T of dynamic shared memory (66560 bytes for double, for which a device needs more than 48 KB a block).
template <class T>
void jacobi_rotate(cudaStream_t stream, const jacobi_work<T>& work, int round, int sweeps);

/// Applies the rotations of that round to the rest of the matrix and to the vectors. To be called after
/// jacobi_rotate of the same round. Shared memory as there.
template <class T>
void jacobi_apply(cudaStream_t stream, const jacobi_work<T>& work, int round);

/// values_i = matrix_ii.
template <class T>
void take_diagonal(cudaStream_t stream, const T* matrix, T* values, index_t order);

PUFFERFISH_KERNELS_END
