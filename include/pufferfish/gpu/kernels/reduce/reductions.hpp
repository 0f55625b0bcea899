// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of sums over the rows of a matrix, and of the gradients of biases and normalisations that use
/// them. All arrays are in device memory.

#include <pufferfish/gpu/kernels/reduce/column_parts.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// The gradients of a normalisation's weight and bias; each is overwritten or added to.
struct norm_parameter_gradients {
  float *weight, *bias;
  bool add_weight, add_bias;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// ops::column_sums: x has `rows` rows of `columns` dense elements, `row_stride` apart. `scratch`:
/// column_scratch(rows, columns, 1) doubles. Two launches (columns.cuh). Columns, row stride and address of
/// whole vectors are read 16 bytes at a time.
template <class T>
void column_sums(cudaStream_t stream, const T* x, index_t row_stride, index_t rows, index_t columns, bool add,
                 double* scratch, accumulate_t<T>* sums);

PUFFERFISH_KERNELS_END
