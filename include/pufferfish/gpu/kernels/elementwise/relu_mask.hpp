// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The order of a ReLU mask's bits on a device. Element i of the dense matrix has bit i % 32 of 32-bit word i
/// / 32, so that consecutive elements of a warp share words. This order is simpler than the CPU's. The words
/// are those of ops::relu_mask, which has room for at least as many.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNELS_BEGIN

/// Number of bits of a word of a mask.
inline constexpr int mask_word_bits = 32;

/// The bit of element i (lowest bit of the result) and the bits of the elements after it in the same word.
PUFFERFISH_HOST_DEVICE inline std::uint32_t mask_bits(const std::uint32_t* words, index_t i) {
  return words[i / mask_word_bits] >> static_cast<unsigned>(i % mask_word_bits);
}

/// Whether the mask passes element i.
PUFFERFISH_HOST_DEVICE inline bool mask_passes(const std::uint32_t* words, index_t i) {
  return (mask_bits(words, i) & 1U) != 0;
}

PUFFERFISH_KERNELS_END
