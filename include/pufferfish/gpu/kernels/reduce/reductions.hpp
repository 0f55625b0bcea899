// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of sums over the rows of a matrix. Gradients of biases and normalizations use them. All arrays
/// are in device memory.

#include <pufferfish/gpu/kernels/reduce/column_parts.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Destinations of the gradients of a normalization's weight and bias. Each gradient overwrites the old
/// values, or is added to them if add_weight or add_bias is true.
struct norm_parameter_gradients {
  float *weight, *bias;
  bool add_weight, add_bias;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// sums_c = sum over rows of x, or sums_c += that sum with `add`, as in ops::column_sums. x has `rows` rows
/// of `columns` dense elements, with stride row_stride. `work`: for one quantity. Throws
/// backend_error if the launch fails. If columns, row stride and address are
/// whole vectors, x is read 16 bytes at a time.
template <class T>
void column_sums(cudaStream_t stream, const T* x, index_t row_stride, index_t rows, index_t columns, bool add,
                 const column_workspace& work, accumulate_t<T>* sums);

/// dz_i = dy_i where y_i > 0 or y_i is NaN, else 0; and sums_c = sum over rows of dz, or sums_c += that sum
/// with `add`. y, dy and dz: rows x columns, dense; dz may be dy. `work`: for one quantity. Throws
/// backend_error if the launch fails.
template <class T>
void relu_column_sums(cudaStream_t stream, const T* y, const T* dy, T* dz, index_t rows, index_t columns,
                      bool add, const column_workspace& work, accumulate_t<T>* sums);

PUFFERFISH_KERNELS_END
