// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Dropout inside of other passes: the launchers' argument, and runs of random words.

#include <pufferfish/gpu/kernels/random.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Dropout of one layer in one step. Element `position` of the layer's stream is dropped where its random
/// word is below the threshold, else multiplied by `scale`.
struct layer_dropout {
  const step_values* step;  ///< on the device; nullptr: nothing is dropped
  std::uint64_t layer;      ///< number of the layer: the stream of context::next_random_stream()
  std::uint32_t threshold;  ///< share of dropped elements times 2^32
  float scale;              ///< 1 / (1 - share of dropped elements)

  /// Whether any element may be dropped.
  PUFFERFISH_HOST_DEVICE bool drops() const { return step != nullptr; }
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Count neighbouring random words of a stream.
template <int Count>
struct random_run {
  std::uint32_t words[static_cast<std::size_t>(Count)];
  /// Word i of the run.
  PUFFERFISH_HOST_DEVICE std::uint32_t operator[](int i) const { return words[i]; }
};

/// The random words position .. position + Count - 1 of a stream. Count is a power of two up to 16 that
/// divides the position.
template <int Count>
PUFFERFISH_HOST_DEVICE inline random_run<Count> random_words(const random_key& key, std::uint64_t position) {
  random_run<Count> run{};
  if constexpr (Count == 1) {
    run.words[0] = random_word(key, position);
  } else {
    const std::uint64_t first = position / 32 * 8 + position % 16 / 2;
    const bool upper = position / 16 % 2 != 0;
    for (int i = 0; i < Count; i += 2) {
      const random_block block = random_block_at(key, first + static_cast<std::uint64_t>(i / 2));
      run.words[i] = upper ? block.words[2] : block.words[0];
      run.words[i + 1] = upper ? block.words[3] : block.words[1];
    }
  }
  return run;
}

PUFFERFISH_KERNELS_END
