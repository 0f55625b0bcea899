// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// A launcher that adds sinusoids of positions to rows.

#include <pufferfish/gpu/kernels/copy/rows.hpp>

PUFFERFISH_KERNELS_BEGIN

/// y_m = x_m + the sinusoids (ops::sinusoid) of position places[m], or of m % length if `places` is nullptr.
/// x and y: rows x columns; y may be x. The sinusoids are computed in double, one sine or cosine per element,
/// so that no table is needed on the device. Throws backend_error if the launch fails.
template <class T>
void add_positions(cudaStream_t stream, const std::int32_t* places, index_t length, row_array<const T> x,
                   row_array<T> y, index_t rows, index_t columns);

PUFFERFISH_KERNELS_END
