// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// A launcher that adds sinusoids of positions to rows.

#include <pufferfish/gpu/kernels/rows.hpp>

PUFFERFISH_KERNELS_BEGIN

/// y_m = x_m + the sinusoids (ops::sinusoid) of places[m], or of m % length where `places` is nullptr; y may
/// be x. Computed in double, a sine a number: no table, whose rows would have to be where the device is.
template <class T>
void add_positions(cudaStream_t stream, const std::int32_t* places, index_t length, row_array<const T> x,
                   row_array<T> y, index_t rows, index_t columns);

PUFFERFISH_KERNELS_END
