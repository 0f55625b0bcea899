// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The random numbers of core/random.hpp for kernels: the same words from the same (seed, stream, position).

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Four words of a stream.
struct random_block {
  std::uint32_t words[4];
};

/// Block `number` of a stream, as random_stream's: ten rounds of Philox4x32.
PUFFERFISH_HOST_DEVICE inline random_block philox_block(std::uint64_t seed, std::uint64_t stream,
                                                        std::uint64_t number) {
  auto c0 = static_cast<std::uint32_t>(number), c1 = static_cast<std::uint32_t>(number >> 32);
  auto c2 = static_cast<std::uint32_t>(stream), c3 = static_cast<std::uint32_t>(stream >> 32);
  auto k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53U} * c0, p1 = std::uint64_t{0xCD9E8D57U} * c2;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(p1);
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(p0);
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return {{c0, c1, c2, c3}};
}

/// As pufferfish::substream.
PUFFERFISH_HOST_DEVICE inline std::uint64_t stream_below(std::uint64_t stream, std::uint64_t number) {
  std::uint64_t z = stream + 0x9E3779B97F4A7C15U * (number + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

/// As random_stream::word.
PUFFERFISH_HOST_DEVICE inline std::uint32_t random_word(std::uint64_t seed, std::uint64_t stream,
                                                        std::uint64_t position) {
  const random_block block = philox_block(seed, stream, position / 32 * 8 + position % 16 / 2);
  return block.words[position / 16 % 2 * 2 + position % 2];
}

/// Words position .. position + Count - 1; Count: a power of two up to 16 that divides the position.
template <int Count>
PUFFERFISH_HOST_DEVICE inline void random_words(std::uint64_t seed, std::uint64_t stream,
                                                std::uint64_t position, std::uint32_t (&words)[Count]) {
  if constexpr (Count == 1) {
    words[0] = random_word(seed, stream, position);
  } else {
    for (int i = 0; i < Count; i += 2) {
      const random_block block = philox_block(
          seed, stream, position / 32 * 8 + position % 16 / 2 + static_cast<std::uint64_t>(i / 2));
      words[i] = position / 16 % 2 == 0 ? block.words[0] : block.words[2];
      words[i + 1] = position / 16 % 2 == 0 ? block.words[1] : block.words[3];
    }
  }
}

/// Dropout of one layer in one step. Element `position` of the layer's stream is dropped where its word is
/// below the threshold, else multiplied by `scale`.
struct layer_dropout {
  const step_values* step;  ///< on the device; nullptr: nothing is dropped
  std::uint64_t layer;      ///< the layer's number in the step
  std::uint32_t threshold;
  float scale;

  PUFFERFISH_HOST_DEVICE bool drops() const { return step != nullptr; }
  PUFFERFISH_HOST_DEVICE std::uint64_t stream() const { return stream_below(step->layer_stream, layer); }
};

PUFFERFISH_KERNEL_TYPES_END
