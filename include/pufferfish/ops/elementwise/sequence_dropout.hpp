// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Dropout on sequences in time-major order, whose mask does not depend on how a batch is split over ranks.
///
/// \code
/// const ops::sequence_mask mask{ctx.next_random_stream(), 0.65, steps, batch, ctx.first_sample()};
/// ops::sequence_dropout<float>(ctx, x, mask, y);
/// ops::sequence_dropout<float>(ctx, dy, mask, dx);  // the gradient, with the same mask
/// \endcode

#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/dropout.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Parameters of a dropout mask on the steps * batch rows of `batch` sequences. Row t * batch + b is step t
/// of sequence b. `steps` is part of the positions in the random stream: other lengths draw other masks.
struct sequence_mask {
  random_stream random;    ///< stream of the layer and step
  double probability;      ///< probability to drop an element, in [0, 1)
  index_t steps, batch;    ///< number of steps, number of sequences
  index_t first_sequence;  ///< position of the first sequence in the global batch

  /// Position, in the random stream, of the first element of step t of sequence b, for
  /// rows of `width` elements. The stream holds the sequences one after the other.
  std::uint64_t position(index_t t, index_t b, index_t width) const {
    return static_cast<std::uint64_t>(((first_sequence + b) * steps + t) * width);
  }
};

namespace reference {

/// Reference of sequence_dropout: row t * batch + b of y is the dropout of the same row of x, with the stream
/// positions from position(t, b, width) on. Throws shape_error if a row is not contiguous.
template <class T>
void sequence_dropout(const tensor_view<const T, 2>& x, const sequence_mask& mask,
                      const tensor_view<T, 2>& y) {
  for (index_t row = 0; row < x.extent(0); ++row) {
    dropout<T>(x.slice(0, row, 1).flat(), y.slice(0, row, 1).flat(), mask.probability, mask.random,
               mask.position(row / mask.batch, row % mask.batch, x.extent(1)));
  }
}

}  // namespace reference

/// Dropout of sequences: element j of step t of sequence b, x(t * batch + b, j), becomes 0 if stream position
/// mask.position(t, b, width) + j is dropped; otherwise it is divided by 1 - probability. The gradient is the
/// same call with dy for x. x, y: steps * batch rows of `width` elements, dense; y may be x. Other shapes
/// fail the assertion; a view that is not dense throws shape_error. On a device, mask.random must be a result
/// of ctx.next_random_stream().
template <class T, class Device>
void sequence_dropout(context<Device>& ctx, const tensor_view<const T, 2>& x, const sequence_mask& mask,
                      const tensor_view<T, 2>& y) {
  PUFFERFISH_ASSERT(x.shape() == y.shape() && x.extent(0) == mask.steps * mask.batch,
                    "sequence_dropout: shapes do not fit");
  const T* const from = x.flat().data();
  T* const to = y.flat().data();
  const auto scale = static_cast<parameter_t<T>>(1.0 / (1.0 - mask.probability));
  const std::uint32_t threshold = dropout_threshold(mask.probability);
  const index_t width = x.extent(1);
  if constexpr (!is_cpu<Device>) {
    elementwise_ops<Device>::sequence_dropout(ctx, from, mask, width, scale, threshold, to);
  } else {
    const auto words_of = PUFFERFISH_KERNEL(widest_isa(), detail::dropouts, random_words);
    const auto drop = PUFFERFISH_KERNEL(widest_isa(), detail::dropouts, drop<T>);
    for_row_chunks(ctx, x.extent(0), width, [&](index_t begin, index_t end) {
      constexpr index_t piece = 1024;
      std::uint32_t words[piece];
      for (index_t row = begin; row < end; ++row) {
        const std::uint64_t position = mask.position(row / mask.batch, row % mask.batch, width);
        for (index_t i = 0; i < width; i += piece) {
          const index_t count = std::min(piece, width - i), at = row * width + i;
          words_of(mask.random.seed(), mask.random.stream(), position + static_cast<std::uint64_t>(i), count,
                   words);
          drop(from + at, words, threshold, scale, to + at, count);
        }
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, sequence_dropout);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
