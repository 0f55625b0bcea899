// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Matrices with dense rows as arguments of kernels, and launchers that move whole rows.

#include <type_traits>

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// A matrix with dense rows, each `stride` elements after the previous one.
template <class T>
struct row_array {
  T* data;
  index_t stride;

  PUFFERFISH_HOST_DEVICE T* row(index_t m) const { return data + m * stride; }

  template <class U>
  requires(std::is_same_v<U, const T> && !std::is_same_v<U, T>) operator row_array<U>() const {
    return {data, stride};
  }
};

/// Rows first[s] .. first[s] + count[s] - 1 belong to sequence s; the arrays are stored on the device.
struct run_arrays {
  index_t sequences;
  const index_t* first;
  const index_t* count;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// to_m = factor from_m; the two may be the same. Rounded once.
template <class T>
void scale_rows(cudaStream_t stream, accumulate_t<T> factor, row_array<const T> from, index_t rows,
                index_t columns, row_array<T> to);

/// to_m = from_(places[m]), or to_(places[m]) = from_m. `places`: row numbers in the other matrix, stored on
/// the device; nullptr: row m.
template <class T>
void gather_rows(cudaStream_t stream, row_array<const T> from, const index_t* places, index_t rows,
                 index_t columns, row_array<T> to);
template <class T>
void scatter_rows(cudaStream_t stream, row_array<const T> from, const index_t* places, index_t rows,
                  index_t columns, row_array<T> to);

/// to(m, j) = from(m, columns[j]) for j = 0 .. count - 1, NaN for a number that is not in 0 .. width - 1,
/// where `width` is the number of columns of `from`. The numbers are rounded to whole ones; device memory.
template <class T>
void gather_columns(cudaStream_t stream, row_array<const T> from, index_t width,
                    const accumulate_t<T>* columns, index_t count, index_t rows, row_array<T> to);

/// Without `add`: to = 0. Then to(m, columns[j]) = from(m, j), or += with `add`, for j = 0 .. count - 1 and
/// distinct numbers; those not in 0 .. width - 1 are ignored. `width`: columns of `to`.
template <class T>
void scatter_columns(cudaStream_t stream, row_array<const T> from, const accumulate_t<T>* columns,
                     index_t count, index_t rows, index_t width, row_array<T> to, bool add);

/// Writes zeros to the rows that are in no run. Each row is compared with every run: rows x sequences
/// comparisons.
template <class T>
void clear_rows_outside(cudaStream_t stream, const run_arrays& runs, row_array<T> x, index_t rows,
                        index_t columns);

/// first[s] = s length, count[s] = lengths[s], or `length` where `lengths` is nullptr. The arrays have
/// `sequences` elements, in device memory.
void make_runs(cudaStream_t stream, index_t sequences, index_t length, const index_t* lengths, index_t* first,
               index_t* count);

PUFFERFISH_KERNELS_END
