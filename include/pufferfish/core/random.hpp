// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Counter-based random numbers: a number is a pure function of (seed, stream, index), so it is the same on
/// any number of ranks and threads and in any order of evaluation. Generator: Philox4x32-10 (Salmon, Moraes,
/// Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/scalar.hpp>
#include <pufferfish/core/separate.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Computes 128 random bits from 128 bits of counter and 64 bits of key, by ten rounds of Philox4x32.
constexpr std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                                  std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57U} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<std::uint32_t>(product0)};
    key[0] += 0x9E3779B9U;
    key[1] += 0xBB67AE85U;
  }
  return counter;
}

/// Stream number for a purpose ("shuffle", a parameter's name): 64-bit FNV-1a hash of the text.
constexpr std::uint64_t stream_id(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash;
}

/// Derives a stream from (stream, number), for the epochs, steps and layers of one purpose.
constexpr std::uint64_t substream(std::uint64_t stream, std::uint64_t number) {
  std::uint64_t z = stream + 0x9E3779B97F4A7C15U * (number + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

/// Random access to one stream of one seed. Stateless: every call is a pure function of its index.
/// Copyable, 16 bytes; calls from several threads need no lock. Different streams of one seed share no
/// counter.
///
/// \code
/// const random_stream random(seed, stream_id("dropout"));
/// const double u = random.child("layer3").uniform(17);  // the same number in every run
/// \endcode
class random_stream {
 public:
  constexpr random_stream(std::uint64_t seed, std::uint64_t stream) : seed_(seed), stream_(stream) {}

  /// A stream derived from this one, for a named part of the object that uses this stream.
  constexpr random_stream child(std::string_view part) const {
    return {seed_, substream(stream_, stream_id(part))};
  }

  /// Number i of the stream: 64 random bits.
  constexpr std::uint64_t bits(std::uint64_t i) const {
    const auto words = block(i);
    return (std::uint64_t{words[1]} << 32) | words[0];
  }

  /// 32 random bits at a position, for runs of numbers. Position 32 g + 16 h + 2 i + l is word 2 h + l of
  /// Philox block 8 g + i, so that vectors of any width compute adjacent positions at once
  /// (ops/elementwise/dropout.hpp).
  constexpr std::uint32_t word(std::uint64_t position) const {
    const auto in_block = static_cast<std::size_t>(position / 16 % 2 * 2 + position % 2);
    return block(position / 32 * 8 + position % 16 / 2)[in_block];
  }

  /// Seed of the stream, as passed to the constructor.
  constexpr std::uint64_t seed() const { return seed_; }
  /// Number of the stream among the streams of its seed.
  constexpr std::uint64_t stream() const { return stream_; }

  /// Number i of the stream, uniform in [0, 1), a multiple of 2^-53.
  constexpr double uniform(std::uint64_t i) const { return static_cast<double>(bits(i) >> 11) * 0x1p-53; }

  /// Integer i of the stream, uniform in [0, bound), by multiplication (bias below bound * 2^-64). `bound`
  /// must be in 1 .. 2^32 - 1, which is not checked.
  constexpr std::uint64_t below(std::uint64_t i, std::uint64_t bound) const {
    const std::uint64_t random = bits(i);
    const std::uint64_t low = (random & 0xffffffffU) * bound;
    // High word of a 64 x 64-bit product, in two halves. Needs bound < 2^32; the library uses no larger one.
    return ((random >> 32) * bound + (low >> 32)) >> 32;
  }

  /// Number i of the stream, normal with mean 0 and variance 1 (Box-Muller), of magnitude at most
  /// sqrt(64 log 2) = 6.7. Uses the library functions log and cos, whose last bits may differ between
  /// systems.
  double normal(std::uint64_t i) const {
    const auto words = block(i);
    const double radius_uniform = (static_cast<double>(words[0]) + 1.0) * 0x1p-32;
    const double angle = 2.0 * std::numbers::pi * static_cast<double>(words[1]) * 0x1p-32;
    return std::sqrt(-2.0 * std::log(radius_uniform)) * std::cos(angle);
  }

 private:
  // Block i of the stream: four random words (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC
  // 2011).
  constexpr std::array<std::uint32_t, 4> block(std::uint64_t i) const {
    return philox4x32({static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(i >> 32),
                       static_cast<std::uint32_t>(stream_), static_cast<std::uint32_t>(stream_ >> 32)},
                      {static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32)});
  }

  std::uint64_t seed_;
  std::uint64_t stream_;
};

/// Returns the numbers 0 .. count - 1 in random order (Fisher-Yates); `count` must be below 2^32. The order
/// depends on the stream and `count` only.
inline std::vector<std::uint32_t> random_permutation(index_t count, random_stream random) {
  std::vector<std::uint32_t> order(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint32_t>(i);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[static_cast<std::size_t>(random.below(i, i))]);
  }
  return order;
}

/// Sets values[i] = low + (high - low) random.uniform(i), rounded to T: uniform in [low, high) before the
/// rounding.
template <class T>
void fill_uniform(std::span<T> values, double low, double high, random_stream random) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<T>(low + (high - low) * random.uniform(i));
  }
}
PUFFERFISH_SEPARATE_FUNCTION(dense, fill_uniform);

/// Sets values[i] = deviation random.normal(i), rounded to T: normal with mean 0 and the given standard
/// deviation. For a 16-bit T the number is rounded to float first.
template <class T>
void fill_normal(std::span<T> values, double deviation, random_stream random) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<T>(static_cast<parameter_t<T>>(deviation * random.normal(i)));
  }
}
PUFFERFISH_SEPARATE_FUNCTION(dense, fill_normal);

PUFFERFISH_NAMESPACE_END
