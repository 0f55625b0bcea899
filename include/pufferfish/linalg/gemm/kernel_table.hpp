// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the arguments of the micro-kernels of products and convolutions (micro_kernels.hpp describes
/// what they compute), and the tables that list them.

#include <cstddef>
#include <type_traits>

#include <pufferfish/core/scalar.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The type of a product's result for operands of T: T itself, float for pairs of bfloat16.
template <class T>
struct product_result {
  using type = T;
};
template <>
struct product_result<bf16_pair> {
  using type = float;
};
template <class T>
using product_result_t = typename product_result<T>::type;

/// Addresses of the first element of the left and of the right operand for one tap. A tap is a position (dy,
/// dx) of a convolution's kernel; a matrix product has one tap.
template <class T>
struct block_tap {
  const T* left;
  const T* right;
};

/// Arguments of a micro-kernel. Steps are in bytes. There must be at least one tap, and depth must be at
/// least 1.
template <class T>
struct block_arguments {
  const block_tap<T>* taps;
  const block_tap<T>* taps_end;
  index_t depth;
  index_t row_step;    ///< left operand: step from row to row (pixel to pixel)
  index_t depth_step;  ///< left operand: step from k to k + 1; in segment kernels, minus row_step
  index_t right_step;  ///< right operand: step from k to k + 1
  /// Segment kernels: step of the right operand from a tap to the next one on its right
  index_t column_step;
  product_result_t<T>* result;
  index_t result_step;  ///< step from row to row of the result
  index_t accumulate;   ///< nonzero: results are added to the old values
  /// Address that is prefetched during the computation, for data needed soon, and advanced by prefetch_step
  /// in every step of the kernel. Any address is allowed; nullptr: no prefetch.
  const void* prefetch = nullptr;
  index_t prefetch_step = 0;
  index_t left_shift = 0;   ///< added to the start of every tap's left operand
  index_t right_shift = 0;  ///< added to the start of every tap's right operand
};

/// A micro-kernel.
template <class T>
using block_kernel = void (*)(const block_arguments<T>&);

/// A micro-kernel for blocks of `rows` rows.
template <class T>
struct sized_kernel {
  index_t rows;
  block_kernel<T> run;
};

/// Kernels of one width, by decreasing number of rows. The last one has one row; null entries follow it.
template <class T>
struct kernel_list {
  sized_kernel<T> by_rows[9];
};

/// Kernels for a row segment of `rows` pixels of a convolution under three adjacent taps with stride 1. Each
/// tap of the arguments is a row of the convolution's kernel; its left operand is the segment's first pixel
/// under the middle column. The index tells which of the two columns adjacent to the segment are padding: 0
/// neither, 1 the left one, 2 the right one, 3 both.
template <class T>
struct segment_kernels {
  index_t rows;
  block_kernel<T> run[4];
};

/// The kernels of one instruction set. Lists are indexed by width: a width of w vectors has the entry w - 1.
/// The tables are static data of this library and are never modified.
template <class T>
struct kernel_table {
  index_t lanes;                                        ///< elements of a vector
  int widest_strided, widest_adjacent, widest_segment;  ///< largest widths, in vectors
  const kernel_list<T>* strided;                        ///< rows of the left operand with any stride
  const kernel_list<T>* adjacent;                       ///< rows of the left operand one element apart
  const segment_kernels<T>* segments;
};

/// Returns `pointer` advanced by a number of bytes.
template <class T>
PUFFERFISH_ALWAYS_INLINE T* moved(T* pointer, index_t bytes) {
  if constexpr (std::is_const_v<T>) {
    return reinterpret_cast<T*>(reinterpret_cast<const std::byte*>(pointer) + bytes);
  } else {
    return reinterpret_cast<T*>(reinterpret_cast<std::byte*>(pointer) + bytes);
  }
}

/// Computes any number of rows with the largest kernels that fit. `block` describes the first row; rows of
/// the result do not overlap the operands. Only the first call of a kernel prefetches. The function modifies
/// left_shift, result and the prefetch of `block`. A modified copy would be slower: it would be read with
/// wide loads right after the narrow stores of the arguments, and such loads wait until all earlier stores
/// have been written.
template <class T>
void run_rows(const kernel_list<T>& kernels, block_arguments<T>& block, index_t rows) {
  for (const sized_kernel<T>* kernel = kernels.by_rows; rows > 0; ++kernel) {
    for (; rows >= kernel->rows; rows -= kernel->rows) {
      kernel->run(block);
      block.prefetch = nullptr;
      block.prefetch_step = 0;
      block.left_shift += kernel->rows * block.row_step;
      block.result = moved(block.result, kernel->rows * block.result_step);
    }
  }
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
