// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of layer normalization over rows. All arrays are in device memory. Each launcher throws
/// backend_error if its launch fails.

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

  /// Number of a row in the stream of dropout.
  PUFFERFISH_HOST_DEVICE std::uint64_t number(index_t row) const {
    return numbers != nullptr ? numbers[row] : first_row + static_cast<std::uint64_t>(row);
  }
};

/// Arguments of the forward pass: y = norm(s) weight + bias with s = dropout(x) + residual, as in
/// ops::layer_norm_forward.
template <class T>
struct norm_problem {
  index_t rows, columns;
  row_array<const T> x, residual;  ///< residual.data nullptr: no residual
  const accumulate_t<T>*weight, *bias;
  double eps;
  row_array<T> sum;  ///< receives s; data nullptr: s is not stored, because s is x
  row_array<T> y;
  accumulate_t<T>* statistics;  ///< receives mean and inverse deviation of each row, unless nullptr
  row_dropout_numbers dropout;
};

/// Arguments of the backward pass, as in ops::layer_norm_backward: dsum is the gradient of s, dx that of x. A
/// null pointer as data: this gradient is not computed. dsum may be dy.
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

/// Computes the forward pass. `sum` may be x or y. statistics: mean and inverse deviation of row m are stored
/// at 2 m and 2 m + 1.
template <class T>
void layer_norm_forward(cudaStream_t stream, const norm_problem<T>& problem);

/// dsum = (g - mean(g) - n mean(g n)) inverse deviation with g = dy weight and the normalized row n; dx =
/// dsum with dropout's mask. Each is computed unless it is null. The gradient of the weight is the sum of dy
/// n over rows, that of the bias the sum of dy. One launch computes all of them, unless dsum or dx is dy:
/// then the gradients of the parameters are a launch before. `work`: for two quantities.
template <class T>
void layer_norm_gradients(cudaStream_t stream, const norm_gradient_problem<T>& problem,
                          const column_workspace& work, const norm_parameter_gradients& gradients);

PUFFERFISH_KERNELS_END
