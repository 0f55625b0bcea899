// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Products of small matrices by a warp's tensor cores (mma.sync, from compute capability 8.0 on), and loads
/// of their operands from shared memory to the lanes. Operands are words of 4 bytes: one TF32 number, or two
/// numbers of 16 bits with the lower index in the lower half.
///
/// With g = lane / 4, t = lane % 4 and K = 8 numbers (TF32) or 16 (16 bits) deep:
///   a (16 x K, rows):     a[0] row g, words t;  a[1] row g + 8, words t;  a[2], a[3] the same, words t + 4
///   b (K x 8, columns):   b[0] column g, words t;  b[1] column g, words t + 4
///   c (16 x 8):           c[0], c[1] row g, columns 2 t, 2 t + 1;  c[2], c[3] the same in row g + 8
/// where word t of a row (or column) holds number t of the depth, or numbers 2 t and 2 t + 1.

#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// The bits of a float rounded to TF32, which has 10 bits of mantissa. Rounding is to nearest; ties are
/// rounded away from zero, or to even from compute capability 9.0 on, which has one instruction for that.
__device__ inline std::uint32_t to_tf32(float value) {
#if defined(PUFFERFISH_EMULATED_DEVICE)
  return emulated_device::to_tf32(value);
#else
  std::uint32_t bits = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
#endif
  return bits;
#endif
}
/// Rounds a float that is given by its bits to TF32.
__device__ inline std::uint32_t to_tf32(std::uint32_t bits) { return to_tf32(__uint_as_float(bits)); }

/// Rounds two floats to T (16 bits) and packs them into a word, the first one in the lower half.
template <class T>
__device__ inline std::uint32_t packed(float first, float second) {
  const T pair[2] = {static_cast<T>(first), static_cast<T>(second)};
  std::uint32_t word;
  memcpy(&word, pair, sizeof(word));
  return word;
}

/// c += a b, by all 32 lanes. T: float (words are TF32; bits below the 10 bits of mantissa are ignored),
/// __nv_bfloat16 or __half. Sums are in float; their order and the rounding of intermediate sums are not
/// specified.
template <class T>
__device__ inline void mma(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
#if defined(PUFFERFISH_EMULATED_DEVICE)
  emulated_device::mma<T>(c, a, b);
#else
#define PUFFERFISH_MMA(types)                                    \
  asm volatile("mma.sync.aligned." types                         \
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
               "{%0, %1, %2, %3};"                               \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (std::is_same_v<T, float>) {
    PUFFERFISH_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    PUFFERFISH_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  } else {
    PUFFERFISH_MMA("m16n8k16.row.col.f32.f16.f16.f32");
  }
#undef PUFFERFISH_MMA
#endif
}

/// Loads four 8 x 8 blocks of 2-byte numbers (or 8 x 4 blocks of words of 4 bytes) from shared memory, by all
/// 32 lanes. `row` of lane 8 i + j is the address of row j of block i, which has 16 bytes and is aligned to
/// 16 bytes. words[i] becomes the word lane % 4 of row lane / 4 of block i. Transposed, for 2-byte numbers:
/// words[i] becomes the numbers of rows 2 (lane % 4) and 2 (lane % 4) + 1 in column lane / 4 of block i.
template <bool Transposed = false>
__device__ inline void load_matrices(std::uint32_t (&words)[4], const void* row) {
#if defined(PUFFERFISH_EMULATED_DEVICE)
  emulated_device::load_matrices(words, row, Transposed);
#else
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(row));
#define PUFFERFISH_LOAD(kind)                                                             \
  asm volatile("ldmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 {%0, %1, %2, %3}, [%4];" \
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])           \
               : "r"(address)                                                             \
               : "memory")
  if constexpr (Transposed) {
    PUFFERFISH_LOAD(".trans");
  } else {
    PUFFERFISH_LOAD("");
  }
#undef PUFFERFISH_LOAD
#endif
}

PUFFERFISH_KERNELS_END
