// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the micro-kernels of all products and convolutions. They are compiled for AVX-512, AVX2 and the
/// base instruction set; the widest set that the processor supports is used.
///
/// A micro-kernel keeps a block of the result in registers: some rows by a few vectors. For every tap t and k
/// = 0 .. depth - 1, the kernel adds the products of a broadcast element of each row of the left operand and
/// a row of the right operand:
///   result[p] (+)= sum over t, k of left_t[p row_step + k depth_step] * right_t[k right_step ...].
/// For pairs of bfloat16 (bf16_pair), an element is a pair, the product of two pairs is the sum of their two
/// products, and the result is float.
/// Both operands are read in place. A matrix product has one tap. A convolution has one tap for each element
/// of its kernel that overlaps the image, so that padding is never multiplied. A weight gradient has one tap
/// for each line of pixels.

#include <cstddef>
#include <type_traits>
#include <utility>

#include <pufferfish/core/scalar.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/linalg/isa.hpp>

// Assembly kernels need x86-64 and GNU syntax. Sanitizers cannot instrument them and get the C++ kernels.
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define PUFFERFISH_KERNELS_ASSEMBLY 0
#endif
#endif
#if !defined(PUFFERFISH_KERNELS_ASSEMBLY)
#if defined(__x86_64__) && !defined(__ILP32__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && defined(__GNUC__)
#define PUFFERFISH_KERNELS_ASSEMBLY 1
#else
#define PUFFERFISH_KERNELS_ASSEMBLY 0
#endif
#endif
#if PUFFERFISH_KERNELS_ASSEMBLY
#include <pufferfish/linalg/gemm/x86_rows.hpp>
#endif

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
  sized_kernel<T> by_rows[8];
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

/// The table of the kernels that a namespace of micro_kernels.inc defines as static members of the class
/// `Kernels`.
template <class T, class Kernels>
constexpr kernel_table<T> make_kernel_table() {
  return {Kernels::lanes,
          static_cast<int>(std::size(Kernels::strided)),
          static_cast<int>(std::size(Kernels::adjacent)),
          static_cast<int>(std::size(Kernels::segments)),
          Kernels::strided,
          Kernels::adjacent,
          Kernels::segments};
}

#define PUFFERFISH_KERNELS micro_kernels
#define PUFFERFISH_KERNEL_FILE <pufferfish/linalg/gemm/micro_kernels.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// The kernels for pairs of bfloat16, or nullptr if this machine has none: they need AVX512_BF16 and
/// assembly. Their products are those of the instruction vdpbf16ps: sums are in float, rounded to nearest;
/// operands and sums below 2^-126 count as 0.
inline const kernel_table<bf16_pair>* pair_kernels() {
#if PUFFERFISH_KERNELS_ASSEMBLY && PUFFERFISH_KERNELS_AVX512
  if (isa_available(isa::avx512) && __builtin_cpu_supports("avx512bf16")) {
    return &micro_kernels_avx512::table<bf16_pair>;
  }
#endif
  return nullptr;
}

/// True if products of T are computed in pairs: for bfloat16, if this machine has the kernels.
template <class T>
bool has_pairs() {
  return std::is_same_v<T, bfloat16> && pair_kernels() != nullptr;
}

/// The kernel table of an instruction set for which isa_available() is true. For pairs of bfloat16, the
/// caller must have checked pair_kernels(), which all instruction sets share.
template <class T>
const kernel_table<T>& kernels_for(isa target) {
  if constexpr (std::is_same_v<T, bf16_pair>) {
    return *pair_kernels();
  } else {
    return *PUFFERFISH_KERNEL(target, micro_kernels, table<T>);
  }
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
