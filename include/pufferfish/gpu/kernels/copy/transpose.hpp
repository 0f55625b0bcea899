// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of the transposition of matrices. Each throws backend_error if its launch fails.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNELS_BEGIN

/// to_(j rows + i) = from_(i columns + j): the transpose of a dense matrix of rows x columns. Device memory,
/// no overlap. Element types: float, bfloat16 and half.
template <class T>
void transpose(cudaStream_t stream, const T* from, index_t rows, index_t columns, T* to);

/// to = the transpose of `from` (rows x columns, dense), converted to float; with `add`, to += the transpose.
/// No overlap.
template <class T>
void transpose_wide(cudaStream_t stream, const T* from, index_t rows, index_t columns, accumulate_t<T>* to,
                    bool add);

/// Converts the gradient of a filter of `taps` taps that was computed with input and output swapped
/// (gpu/kernels/conv/conv_plan.hpp): to_(taps - 1 - i) = the transpose of from_i (rows x columns), or += with
/// `add`. Both arrays have taps x rows x columns elements and do not overlap.
void turn_filter(cudaStream_t stream, const float* from, index_t taps, index_t rows, index_t columns,
                 float* to, bool add);

PUFFERFISH_KERNELS_END
