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

#include <iterator>
#include <type_traits>

#include <pufferfish/linalg/gemm/kernel_table.hpp>
#include <pufferfish/linalg/gemm/tile_kernels.hpp>
#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/linalg/kernel_report.hpp>

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
/// operands and sums below 2^-126 count as 0. Blocks of sixteen rows are computed by tiles (tile_kernels.hpp)
/// where the processor has them.
inline const kernel_table<bf16_pair>* pair_kernels() {
#if PUFFERFISH_KERNELS_ASSEMBLY && PUFFERFISH_KERNELS_AVX512
  if (isa_available(isa::avx512) && __builtin_cpu_supports("avx512bf16")) {
    constexpr const kernel_table<bf16_pair>& vectors = micro_kernels_avx512::table<bf16_pair>;
#if PUFFERFISH_KERNELS_TILES
    static const bool uses_tiles = [] {
      if (!tiles_available()) return false;
      const bool right = table_is_right(tile_table<pair_tiles, vectors>);
      if (!right) print_once({"the tiles of AMX are not used: their products were wrong"});
      if (right && reports_kernels()) print_once({"products of pairs of bfloat16: tiles of AMX"});
      return right;
    }();
    if (uses_tiles) return &tile_table<pair_tiles, vectors>;
#endif
    return &vectors;
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
