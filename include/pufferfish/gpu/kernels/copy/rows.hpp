// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Matrices with dense rows as arguments of kernels, and launchers that move whole rows. Each launcher throws
/// backend_error if its launch fails.

#include <type_traits>

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// A matrix whose rows are dense; consecutive rows are `stride` elements apart.
template <class T>
struct row_array {
  T* data;
  index_t stride;

  /// Address of row m.
  PUFFERFISH_HOST_DEVICE T* row(index_t m) const { return data + m * stride; }

  template <class U>
  requires(std::is_same_v<U, const T> && !std::is_same_v<U, T>) operator row_array<U>() const {
    return {data, stride};
  }
};

/// The rows of each sequence of a batch: rows first[s] .. first[s] + count[s] - 1 belong to sequence s. The
/// arrays are in device memory.
struct run_arrays {
  index_t sequences;
  const index_t* first;
  const index_t* count;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// to_m = factor from_m for m < rows, rounded once. `to` may be `from`.
template <class T>
void scale_rows(cudaStream_t stream, accumulate_t<T> factor, row_array<const T> from, index_t rows,
                index_t columns, row_array<T> to);

/// to_m = from_(places[m]) for m < rows. `places`: row numbers in `from`, in device memory; nullptr:
/// places[m] is m. A number outside of `from` is not checked. No overlap.
template <class T>
void gather_rows(cudaStream_t stream, row_array<const T> from, const index_t* places, index_t rows,
                 index_t columns, row_array<T> to);
/// to_(places[m]) = from_m for m < rows. `places`: distinct row numbers in `to`, in device memory; nullptr:
/// places[m] is m. Numbers are not checked. No overlap.
template <class T>
void scatter_rows(cudaStream_t stream, row_array<const T> from, const index_t* places, index_t rows,
                  index_t columns, row_array<T> to);

/// to(m, j) = from(m, columns[j]) for j < count and m < rows. `width`: number of columns of `from`. The
/// numbers in `columns`, in device memory, are rounded to whole ones; a number outside 0 .. width - 1 gives
/// NaN.
template <class T>
void gather_columns(cudaStream_t stream, row_array<const T> from, index_t width,
                    const accumulate_t<T>* columns, index_t count, index_t rows, row_array<T> to);

/// Without `add`: sets `to` to 0, then to(m, columns[j]) = from(m, j) for j < count and m < rows. With `add`:
/// to(m, columns[j]) += from(m, j). The numbers in `columns`, in device memory, must be distinct; those
/// outside 0 .. width - 1 are ignored. `width`: number of columns of `to`.
template <class T>
void scatter_columns(cudaStream_t stream, row_array<const T> from, const accumulate_t<T>* columns,
                     index_t count, index_t rows, index_t width, row_array<T> to, bool add);

/// Writes zeros to the rows that belong to no run. Each row is compared with every run, which takes rows x
/// sequences comparisons.
template <class T>
void clear_rows_outside(cudaStream_t stream, const run_arrays& runs, row_array<T> x, index_t rows,
                        index_t columns);

/// first[s] = s length, and count[s] = lengths[s], or `length` if `lengths` is nullptr. The arrays have
/// `sequences` elements, in device memory.
void make_runs(cudaStream_t stream, index_t sequences, index_t length, const index_t* lengths, index_t* first,
               index_t* count);

PUFFERFISH_KERNELS_END
