// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launcher of copies between matrices with different strides, such as copies to aligned rows.

#include <pufferfish/gpu/kernels/copy/rows.hpp>

PUFFERFISH_KERNELS_BEGIN

/// to_g(m, j) = from_g(m, j) + bias(g columns + j) for g < groups, m < rows, j < columns, rounded once.
/// Matrix g begins g from_step elements after `from`, and g to_step elements after `to`. `bias`: nullptr for
/// zeros. An access has 16, 8, 4 or 2 bytes, as many as all addresses, strides and steps allow. No overlap.
/// Throws backend_error if the launch fails.
template <class T>
void copy_groups(cudaStream_t stream, index_t groups, index_t rows, index_t columns, row_array<const T> from,
                 index_t from_step, row_array<T> to, index_t to_step, const T* bias = nullptr);

PUFFERFISH_KERNELS_END
