// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of layer normalisation over rows.

#include <pufferfish/gpu/kernels/copy/rows.hpp>
#include <pufferfish/gpu/kernels/elementwise/layer_dropout.hpp>
#include <pufferfish/gpu/kernels/reduce/column_parts.hpp>
#include <pufferfish/gpu/kernels/reduce/reductions.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Dropout of rows, as ops::row_dropout: element (row, column) has position number(row) columns + column.
struct row_dropout_numbers {
  layer_dropout layer;
  std::uint64_t first_row;
  const std::uint64_t* numbers;  ///< row numbers, on the device; nullptr: counted from first_row

  PUFFERFISH_HOST_DEVICE std::uint64_t number(index_t row) const {
    return numbers != nullptr ? numbers[row] : first_row + static_cast<std::uint64_t>(row);
  }
};

/// y = norm(s) weight + bias with s = dropout(x) + residual, as ops::layer_norm_forward.
template <class T>
struct norm_problem {
  index_t rows, columns;
  row_array<const T> x, residual;  ///< residual.data nullptr: none
  const accumulate_t<T>*weight, *bias;
  double eps;
  row_array<T> sum;  ///< receives s; data nullptr: s is x
  row_array<T> y;
  accumulate_t<T>* statistics;  ///< receives mean and inverse deviation of each row, unless nullptr
  row_dropout_numbers dropout;
};

/// Gradients, as ops::layer_norm_backward: dsum of s, dx of x; data nullptr: not computed. dsum may be dy.
template <class T>
struct norm_gradient_problem {
  index_t rows, columns;
  row_array<const T> sum, dy;
  const accumulate_t<T>*statistics, *weight;
  row_array<T> dsum, dx;
  row_dropout_numbers dropout;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// `sum` may be x or y. statistics: (mean, inverse deviation) of row m at 2 m.
template <class T>
void layer_norm_forward(cudaStream_t stream, const norm_problem<T>& problem);

/// dsum = (g - mean(g) - n mean(g n)) inverse deviation with g = dy weight; dx = dsum with the dropout's
/// mask. Does nothing if both results are null.
template <class T>
void layer_norm_input_gradient(cudaStream_t stream, const norm_gradient_problem<T>& problem);

/// The gradients of the weight (sum of dy n over rows) and of the bias (sum of dy); to be called before dsum
/// overwrites dy. `scratch`: column_scratch(rows, columns, 2) doubles.
template <class T>
void layer_norm_parameter_gradients(cudaStream_t stream, const norm_gradient_problem<T>& problem,
                                    double* scratch, const norm_parameter_gradients& gradients);

PUFFERFISH_KERNELS_END
