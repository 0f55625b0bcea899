// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The random numbers of core/random.hpp for kernels, bit for bit: Philox4x32-10 (Salmon, Moraes, Dror, Shaw:
/// "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and the library's functions of its words.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNELS_BEGIN

/// One result of the generator: 128 random bits.
struct random_block {
  std::uint32_t words[4];
};

/// Identifies a stream of random numbers, like pufferfish::random_stream on the host.
struct random_key {
  std::uint64_t seed, stream;
};

/// Returns the number of a substream, with the same bits as pufferfish::substream on the host.
PUFFERFISH_HOST_DEVICE constexpr std::uint64_t substream_of(std::uint64_t stream, std::uint64_t number) {
  std::uint64_t z = stream + 0x9E3779B97F4A7C15U * (number + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

/// The stream of layer `number` (from context::next_random_stream()) in the step of `values`. Element i of a
/// layer's dropout is dropped if random_word(layer_key(*values, layer), i) is below the threshold.
PUFFERFISH_HOST_DEVICE constexpr random_key layer_key(const step_values& values, std::uint64_t number) {
  return {values.seed, substream_of(values.layer_stream, number)};
}

/// Block i of a stream: ten rounds over the counter (i, stream) with the seed as the key.
PUFFERFISH_HOST_DEVICE constexpr random_block random_block_at(const random_key& key, std::uint64_t i) {
  auto c0 = static_cast<std::uint32_t>(i), c1 = static_cast<std::uint32_t>(i >> 32);
  auto c2 = static_cast<std::uint32_t>(key.stream), c3 = static_cast<std::uint32_t>(key.stream >> 32);
  auto k0 = static_cast<std::uint32_t>(key.seed), k1 = static_cast<std::uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * c0,
                        product1 = std::uint64_t{0xCD9E8D57U} * c2;
    c0 = static_cast<std::uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(product1);
    c2 = static_cast<std::uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(product0);
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return {{c0, c1, c2, c3}};
}

/// The 32 random bits at a position of a stream: random_stream::word on the host. Position
/// 32 g + 16 h + 2 i + l has word 2 h + l of block 8 g + i, so one block serves the positions 32 g + 2 i +
/// {0, 1, 16, 17}.
PUFFERFISH_HOST_DEVICE constexpr std::uint32_t random_word(const random_key& key, std::uint64_t position) {
  return random_block_at(key, position / 32 * 8 + position % 16 / 2)
      .words[position / 16 % 2 * 2 + position % 2];
}

/// The i-th uniform number in 0 .. bound - 1 of a stream: random_stream::below on the host. Computed from
/// words 0 and 1 of block i.
PUFFERFISH_HOST_DEVICE constexpr std::uint64_t random_below(const random_key& key, std::uint64_t i,
                                                            std::uint64_t bound) {
  const random_block block = random_block_at(key, i);
  return (block.words[1] * bound + ((block.words[0] * bound) >> 32)) >> 32;
}

PUFFERFISH_KERNELS_END
