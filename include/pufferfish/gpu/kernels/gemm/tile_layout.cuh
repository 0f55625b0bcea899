// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: how tiles of operands are stored in shared memory.

#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// The direction in which an operand's tile is dense: along the sum (`depth`: a row of the tile is a row of
/// the left operand or a column of the right one), or across the sum (`width`: a row of the tile is one
/// element of the sum).
enum class dense { depth, width };

/// Stride of a tile's rows, in elements. Every row begins 16 bytes further in the banks: 8 lanes that read 16
/// bytes each from 8 rows use different banks. If words of 4 bytes are read along the depth instead (float,
/// dense in width), 4 rows and 8 columns must use different banks: 32 bytes.
template <class T, dense D>
constexpr int tile_stride(int length) {
  return length + (D == dense::width && sizeof(T) == 4 ? 8 : vector_width<T>);
}

/// An array of `Count` elements.
template <class T, int Count>
using array_of = T[static_cast<std::size_t>(Count)];

/// `Count` elements at once. Their address is a multiple of their size.
template <class T, int Count>
struct alignas(sizeof(array_of<T, Count>)) element_run {
  array_of<T, Count> values;
};

PUFFERFISH_KERNELS_END
