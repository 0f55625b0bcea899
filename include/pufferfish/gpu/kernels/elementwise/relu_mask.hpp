// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The order of a ReLU mask's bits on a device. The words are those of ops::relu_mask, which has room for at
/// least as many. The order is simpler than the CPU's: element i of the dense matrix has bit i % 32 of 32-bit
/// word i / 32, so that a warp's consecutive elements share words.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNELS_BEGIN

inline constexpr int mask_word_bits = 32;

/// The bits of element i and of the elements after it in its word, from the result's lowest bit on.
PUFFERFISH_HOST_DEVICE inline std::uint32_t mask_bits(const std::uint32_t* words, index_t i) {
  return words[i / mask_word_bits] >> static_cast<unsigned>(i % mask_word_bits);
}

/// Whether the mask passes element i.
PUFFERFISH_HOST_DEVICE inline bool mask_passes(const std::uint32_t* words, index_t i) {
  return (mask_bits(words, i) & 1U) != 0;
}

PUFFERFISH_KERNELS_END
