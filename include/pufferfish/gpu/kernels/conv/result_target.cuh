// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `result_target`, the destination of the results of a product.

#include <cstdint>

#include <pufferfish/gpu/kernels/gemm/tile_product.cuh>
#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Destination of the results of a product, a dense matrix of `columns` columns. Results are written to
/// `out`, with a bias for each column or added to the old values. If sums are cut into slices, results are
/// written to this slice's part of `partials` instead. A thread writes runs of Product::width elements at
/// once if `runs` is true.
template <class T>
struct result_target {
  T* out;
  const T* bias;    ///< one number per column; null: no bias
  float* partials;  ///< partial results of a slice; null: results are complete
  bool add;         ///< whether results are added to the old values
  int columns;      ///< number of columns of the matrix
  bool runs;        ///< whether columns and addresses are multiples of 4 elements

  /// The same destination for the part of the matrix that begins `elements` elements further.
  __device__ result_target at(index_t elements) const {
    result_target moved = *this;
    moved.out += elements;
    if (partials != nullptr) moved.partials += elements;
    return moved;
  }

  /// Stores the results of a product; may change the product's values. row_of(row): the element at which a
  /// row of the product begins (int or index_t), negative for a row that does not exist; first_column: the
  /// column of the product's first one.
  template <class Product, class RowOf>
  __device__ void store(Product& product, int first_column, RowOf row_of) const {
    if (partials != nullptr) return write(partials, product, first_column, row_of);
    if (bias != nullptr) {
      product.change([&](int, int column, auto& run) {
        for_some(run, first_column + column,
                 [&](float& value, int at) { value += static_cast<float>(bias[at]); });
      });
    }
    if (add) {
      product.change([&](int row, int column, auto& run) {
        const auto begin = row_of(row);
        if (begin < 0) return;
        for_some(run, first_column + column,
                 [&](float& value, int at) { value += static_cast<float>(out[begin + at]); });
      });
    }
    write(out, product, first_column, row_of);
  }

  /// Stores the first `rows` rows of a product as consecutive rows of the matrix. first_column: column of the
  /// matrix for the product's first column.
  template <class Product>
  __device__ void store_rows(Product& product, int first_column, int rows) const {
    store(product, first_column, [&](int row) { return row < rows ? row * columns : -1; });
  }

 private:
  /// Calls f(value, column) for the values of a run that belong to a column of the matrix.
  template <int Width, class F>
  __device__ void for_some(element_run<float, Width>& run, int column, F f) const {
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      if (column + i < columns) f(run.values[i], column + i);
    }
  }

  // Stores each run at once if `runs` is true, else element by element up to the last column.
  template <class To, class Product, class RowOf>
  __device__ void write(To* to, Product& product, int first_column, RowOf row_of) const {
    constexpr int width = Product::width;
    if (width > 1 && runs) {
      const int length = columns - first_column;
      product.for_each([&](int row, int column, const auto& run) {
        const auto begin = row_of(row);
        element_run<To, width> stored;
#pragma unroll
        for (int i = 0; i < width; ++i) stored.values[i] = static_cast<To>(run.values[i]);
        if constexpr (width > 1) {
          store_global(to + first_column + begin + column, stored, begin >= 0 && column < length);
        }
      });
      return;
    }
    product.for_each([&](int row, int column, const auto& run) {
      const auto begin = row_of(row);
      const int at = first_column + column;
      if (begin < 0) return;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        if (at + i < columns) to[begin + at + i] = static_cast<To>(run.values[i]);
      }
    });
  }
};

/// A destination for complete results or, if `partials` is not null, for slices of them. add_slices then
/// applies the bias or the addition.
template <class T>
inline result_target<T> target_of(T* out, const T* bias, float* partials, bool add, int columns) {
  const auto address = partials != nullptr ? reinterpret_cast<std::uintptr_t>(partials) / sizeof(float)
                                           : reinterpret_cast<std::uintptr_t>(out) / sizeof(T);
  return {out, bias, partials, add, columns, columns % 4 == 0 && address % 4 == 0};
}

PUFFERFISH_KERNELS_END
