// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Inverted dropout whose mask is a pure function of (stream, position in the global batch).

#include <cstdint>
#include <span>

#include <pufferfish/ops/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// A probability in steps of 2^-32, as the masks need it: compared with 32 random bits.
inline std::uint64_t dropout_threshold(double probability) {
  return static_cast<std::uint64_t>(probability * 0x1p32);
}

/// True if element `position` is dropped: element 2k takes the lower half of random number k, 2k + 1 the
/// upper.
inline bool dropped(const random_stream& random, std::uint64_t position, std::uint64_t threshold) {
  const std::uint64_t bits = random.bits(position / 2);
  return (position % 2 == 0 ? bits & 0xffffffffU : bits >> 32) < threshold;
}

namespace reference {

/// y_i = 0 where position first + i is dropped, else x_i / (1 - probability).
template <class T>
void dropout(std::span<const T> x, std::span<T> y, double probability, const random_stream& random,
             std::uint64_t first) {
  const T scale = static_cast<T>(1.0 / (1.0 - probability));
  for (std::size_t i = 0; i < x.size(); ++i) {
    y[i] = dropped(random, first + i, dropout_threshold(probability)) ? T{} : x[i] * scale;
  }
}

}  // namespace reference

/// y_i = 0 where position first + i is dropped (with the given probability, in [0, 1)), else
/// x_i / (1 - probability). Its own gradient: the same call with dy for x gives dx. Spans of one length; y
/// may be x.
template <class T>
void dropout(context<device::cpu>& ctx, std::span<const T> x, std::span<T> y, double probability,
             const random_stream& random, std::uint64_t first) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "dropout: lengths differ");
  const T scale = static_cast<T>(1.0 / (1.0 - probability));
  const std::uint64_t threshold = dropout_threshold(probability);
  for_chunks(ctx, static_cast<index_t>(x.size()), [&](index_t begin, index_t end) {
    std::uint64_t bits = 0;  // of two neighbours
    for (index_t i = begin; i < end; ++i) {
      const std::uint64_t position = first + static_cast<std::uint64_t>(i);
      if (i == begin || position % 2 == 0) bits = random.bits(position / 2);
      const std::uint64_t mine = position % 2 == 0 ? bits & 0xffffffffU : bits >> 32;
      y.data()[i] = mine < threshold ? T{} : x.data()[i] * scale;
    }
  });
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
