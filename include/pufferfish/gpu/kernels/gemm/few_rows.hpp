// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launcher of products with few rows, such as those of one time step of a recurrent layer.

#include <pufferfish/gpu/kernels/copy/rows.hpp>

PUFFERFISH_KERNELS_BEGIN

/// Largest number of rows of few_rows_product.
inline constexpr index_t few_rows = 32;
/// Shared memory that a block of few_rows_product may need, in bytes. Devices that allow a block less
/// (compute capability 8.6 and 8.9) cannot run this kernel.
inline constexpr index_t few_rows_shared_bytes = 145'920;

/// Whether few_rows_product can compute the product. The conditions: elements have 16 bits; rows <= few_rows;
/// every row of `a` begins and ends at a multiple of 8 bytes; every row of the right operand (of its
/// transpose if `turned`) begins and ends at a multiple of 16 bytes; 0 < depth < 2^20, columns < 2^30, and
/// strides < 2^24.
template <class T>
inline bool is_few_rows_product(row_array<const T> a, row_array<const T> b, bool turned, index_t rows,
                                index_t depth, index_t columns) {
  constexpr index_t width = 16 / static_cast<index_t>(sizeof(T));
  const auto address = [](const T* data) { return reinterpret_cast<std::uintptr_t>(data); };
  const index_t dense = turned ? depth : columns;
  return sizeof(T) == 2 && rows <= few_rows && depth > 0 && depth % (width / 2) == 0 && dense % width == 0 &&
         a.stride % (width / 2) == 0 && b.stride % width == 0 && address(a.data) % 8 == 0 &&
         address(b.data) % 16 == 0 && depth < (index_t{1} << 20) && columns < (index_t{1} << 30) &&
         a.stride < (index_t{1} << 24) && b.stride < (index_t{1} << 24);
}

/// c = a b, or c += a b with `add`. Sums are in float, in an order that depends on the shapes only. a: rows x
/// depth; b: depth x columns, or columns x depth if `turned` (c = a b^T); c: rows x columns, which overlaps
/// no operand. T: bfloat16 or half. is_few_rows_product() must hold. Throws backend_error if the launch
/// fails. The time is that of reading b: each multiprocessor reads some columns of b by copies that run
/// ahead, and the warps of a block share the depth.
template <class T>
void few_rows_product(cudaStream_t stream, row_array<const T> a, row_array<const T> b, bool turned,
                      row_array<T> c, index_t rows, index_t depth, index_t columns, bool add);

PUFFERFISH_KERNELS_END
