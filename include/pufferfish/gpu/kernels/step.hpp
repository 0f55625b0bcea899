// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers that initialize the values of a step and the result of a product.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNELS_BEGIN

/// Writes `values` to *to, in the order of the stream. The values are copied at the launch, so the caller may
/// change them afterwards.
void store_step_values(cudaStream_t stream, step_values* to, const step_values& values);

/// Initializes the rows of a product's result: y_mn = row_n, or with `add` y_mn += row_n. row_n is 0 if `row`
/// is nullptr. y has `rows` rows of `columns` elements; row m begins at y + m step.
template <class T>
void fill_rows(cudaStream_t stream, const T* row, T* y, index_t rows, index_t columns, index_t step,
               bool add = false);

PUFFERFISH_KERNELS_END
