// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Dropout inside of other passes: what a launcher is told about it, and runs of random words.

#include <pufferfish/gpu/kernels/random.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Dropout of one layer in one step. Element `position` of the layer's stream is dropped where its word is
/// below the threshold, else multiplied by `scale`.
struct layer_dropout {
  const step_values* step;  ///< on the device; nullptr: nothing is dropped
  std::uint64_t layer;      ///< what context::next_random_stream() gave as the stream
  std::uint32_t threshold;
  float scale;

  PUFFERFISH_HOST_DEVICE bool drops() const { return step != nullptr; }
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Words position .. position + Count - 1 of a stream; Count: a power of two up to 16 that divides the
/// position.
template <int Count>
PUFFERFISH_HOST_DEVICE inline void random_words(const random_key& key, std::uint64_t position,
                                                std::uint32_t (&words)[Count]) {
  if constexpr (Count == 1) {
    words[0] = random_word(key, position);
  } else {
    const std::uint64_t first = position / 32 * 8 + position % 16 / 2;
    const bool upper = position / 16 % 2 != 0;
    for (int i = 0; i < Count; i += 2) {
      const random_block block = random_block_at(key, first + static_cast<std::uint64_t>(i / 2));
      words[i] = upper ? block.words[2] : block.words[0];
      words[i + 1] = upper ? block.words[3] : block.words[1];
    }
  }
}

PUFFERFISH_KERNELS_END
