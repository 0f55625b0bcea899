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

PUFFERFISH_KERNELS_END
