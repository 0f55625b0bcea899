// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Inverted dropout whose mask is a pure function of (stream, position in the global batch).
///
/// No mask is stored: the gradient computes the random words again. Ranks that hold different parts of a
/// batch pass the position of their first element in the global batch, and so draw different parts of one
/// mask.
///
/// \code
/// const random_stream random = ctx.next_random_stream();
/// ops::dropout<float>(ctx, x.flat(), y.flat(), 0.1, random, first);
/// ops::dropout<float>(ctx, dy.flat(), dx.flat(), 0.1, random, first);  // the gradient
/// \endcode

#include <algorithm>
#include <cstdint>
#include <span>

#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// A probability in [0, 1) in units of 2^-32, rounded down, for comparison with 32 random bits.
inline std::uint32_t dropout_threshold(double probability) {
  return static_cast<std::uint32_t>(probability * 0x1p32);
}

/// Whether element `position` of the stream is dropped: random.word(position) < threshold. The probability of
/// this is threshold / 2^32.
inline bool dropped(const random_stream& random, std::uint64_t position, std::uint32_t threshold) {
  return random.word(position) < threshold;
}

namespace reference {

/// y_i = 0 where position first + i of the stream is dropped, else x_i / (1 - probability).
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
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/elementwise/dropout.inc>
#include <pufferfish/linalg/for_each_target.inc>

}  // namespace detail

/// y_i = 0 where position first + i is dropped (see dropped()), else x_i scale, with scale = 1 / (1 -
/// probability) rounded to parameter_t<T>. `probability` is in [0, 1) and is not checked. The gradient is the
/// same call with dy for x and dx for y. Spans of one length, else the assertion fails; y may be x. A dropped
/// NaN becomes 0. On a device, `random` must be a result of ctx.next_random_stream(): its seed is not used,
/// and the kernel reads seed and step from the context when it runs.
template <class T, class Device>
void dropout(context<Device>& ctx, std::span<const T> x, std::span<T> y, double probability,
             const random_stream& random, std::uint64_t first) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "dropout: lengths differ");
  const auto scale = static_cast<parameter_t<T>>(1.0 / (1.0 - probability));
  const std::uint32_t threshold = dropout_threshold(probability);
  if constexpr (!is_cpu<Device>) {
    elementwise_ops<Device>::dropout(ctx, x, y, scale, threshold, random, first);
  } else {
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
}
PUFFERFISH_SEPARATE_OPERATION(dense, dropout);

/// Dropout of a matrix: element (row, column) has position number(row) * columns + column in the random
/// stream. Rows are numbered first_row, first_row + 1, ..., or numbers[0], numbers[1], ... if `numbers` is
/// given. Given numbers can make the mask of a token independent of the lengths of the other sequences of the
/// batch. `numbers` is not owned; the array is in the memory of the context's device and must stay unchanged
/// until the backward pass.
///
///     const ops::row_dropout dropout{0.1, ctx.next_random_stream(), first_row};
///     ops::layer_norm_forward<float>(ctx, {x, residual, dropout, sum}, weight, bias, 1e-6, y, record);
struct row_dropout {
  double probability = 0.0;                ///< probability to drop an element, in [0, 1); 0: no dropout
  random_stream random{0, 0};              ///< stream of the layer and step
  std::uint64_t first_row = 0;             ///< number of the first row, if `numbers` is nullptr
  const std::uint64_t* numbers = nullptr;  ///< number of each row

  /// Whether any element may be dropped.
  bool drops() const { return probability > 0.0; }
  /// Number of a row in the random stream.
  std::uint64_t number(index_t row) const {
    return numbers != nullptr ? numbers[row] : first_row + static_cast<std::uint64_t>(row);
  }
  /// Factor of elements that are kept.
  double scale() const { return 1.0 / (1.0 - probability); }
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END
