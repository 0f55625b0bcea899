// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Moments of the columns of a matrix, or sums for the gradient of a batch norm, that a kernel collects while
/// it computes the matrix: arguments of launchers, and sizes of memory. A part is a set of rows that one
/// thread block computes. Parts depend on shapes alone, and so does the order in which they are merged.

#include <algorithm>

#include <pufferfish/gpu/kernels/reduce/column_parts.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Memory of the device for the moments of a matrix, or for sums of the same number. The default: nothing is
/// collected.
struct moment_workspace {
  /// Receives the means, then the sums of squared deviations from them, `columns` numbers each.
  double* moments = nullptr;
  float* parts = nullptr;        ///< moment_scratch floats
  unsigned* counters = nullptr;  ///< as in column_workspace
};

/// Arrays of a batch norm that a kernel reads if it sums the gradient of the norm's output while it computes
/// that gradient. g: the gradient as stored, with zeros where the mask blocks it. The sums over the rows are
/// those of g, then those of g (x - mean), `columns` numbers each, in moment_workspace::moments.
template <class T>
struct gradient_sum_input {
  const T* x = nullptr;  ///< input of the norm, shaped as the gradient, at a multiple of 16 bytes
  const accumulate_t<T>* mean = nullptr;  ///< mean of each channel
  const std::uint32_t* mask = nullptr;    ///< mask of the ReLU after the norm; nullptr: no ReLU
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Largest number of parts of `rows` rows: parts of 64 rows, or one for each of 132 thread blocks that run at
/// the same time.
inline index_t most_column_parts(index_t rows) { return std::max<index_t>((rows + 63) / 64, 132); }

/// Number of floats for the parts: for each column number of rows, mean as a sum of two floats, and sum of
/// squared deviations.
inline index_t moment_scratch(index_t rows, index_t columns) { return 4 * most_column_parts(rows) * columns; }

/// Number of consecutive parts that one block merges: a power of two, of which the square is at least
/// `parts`.
inline index_t moment_group(index_t parts) {
  index_t size = 16;
  while (size * size < parts) size *= 2;
  return size;
}

/// Whether the counters suffice: one for each group of parts and one for all groups, for each tile of at
/// least 16 columns.
inline bool moments_fit(index_t rows, index_t columns) {
  const index_t parts = most_column_parts(rows), group = moment_group(parts);
  return (columns + 15) / 16 * ((parts + group - 1) / group + 1) <= most_column_counters;
}

PUFFERFISH_KERNELS_END
