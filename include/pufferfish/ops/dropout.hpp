// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Inverted dropout whose mask is a pure function of (stream, position in the global batch).

#include <algorithm>
#include <cstdint>
#include <span>

#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/ops/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// `probability` in units of 2^-32, for comparison with 32 random bits.
inline std::uint32_t dropout_threshold(double probability) {
  return static_cast<std::uint32_t>(probability * 0x1p32);
}

/// True if element `position` is dropped.
inline bool dropped(const random_stream& random, std::uint64_t position, std::uint32_t threshold) {
  return random.word(position) < threshold;
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

namespace detail {

#define PUFFERFISH_KERNELS dropouts
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/dropout.inc>
#include <pufferfish/linalg/for_each_target.inc>

}  // namespace detail

/// y_i = 0 where position first + i is dropped (with the given probability,
/// in [0, 1)), else x_i / (1 - probability). The gradient is the same call
/// with dy for x and dx for y. Spans of one length; y may be x.
template <class T>
void dropout(context<device::cpu>& ctx, std::span<const T> x, std::span<T> y, double probability,
             const random_stream& random, std::uint64_t first) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "dropout: lengths differ");
  const T scale = static_cast<T>(1.0 / (1.0 - probability));
  const std::uint32_t threshold = dropout_threshold(probability);
  const auto words_of = PUFFERFISH_KERNEL(widest_isa(), detail::dropouts, random_words);
  const auto drop = PUFFERFISH_KERNEL(widest_isa(), detail::dropouts, drop<T>);
  for_chunks(ctx, static_cast<index_t>(x.size()), [&](index_t begin, index_t end) {
    constexpr index_t piece = 1024;
    std::uint32_t words[piece];
    for (index_t i = begin; i < end; i += piece) {
      const index_t count = std::min(piece, end - i);
      words_of(random.seed(), random.stream(), first + static_cast<std::uint64_t>(i), count, words);
      drop(x.data() + i, words, threshold, scale, y.data() + i, count);
    }
  });
}
/// GPU overload: <pufferfish/gpu.hpp>. `random` must be a result of its context's next_random_stream().
template <class T>
void dropout(context<device::gpu>& ctx, std::span<const T> x, std::span<T> y, double probability,
             const random_stream& random, std::uint64_t first);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
