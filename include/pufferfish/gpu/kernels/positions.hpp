// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers that add rows of a table of positions.

#include <pufferfish/gpu/kernels/rows.hpp>

PUFFERFISH_KERNELS_BEGIN

/// x_m += table_(places[m]); a position outside the table adds NaN.
template <class T>
void add_positions(cudaStream_t stream, row_array<const T> table, index_t table_rows,
                   const std::int32_t* places, row_array<T> x, index_t rows, index_t columns);

/// y_m = x_m + table_(m % period); y may be x.
template <class T>
void add_repeated(cudaStream_t stream, row_array<const T> table, index_t period, row_array<const T> x,
                  row_array<T> y, index_t rows, index_t columns);

PUFFERFISH_KERNELS_END
