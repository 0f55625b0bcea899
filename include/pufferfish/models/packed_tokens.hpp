// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `packed_tokens`: the real tokens of a padded batch of sentences, one behind the other. What works on rows
/// of tokens spends nothing on padding, and no mask is needed to keep it out.

#include <cstdint>
#include <span>

#include <pufferfish/core/context.hpp>
#include <pufferfish/nn/positional_encoding.hpp>
#include <pufferfish/ops/attention.hpp>
#include <pufferfish/ops/embedding.hpp>
#include <pufferfish/ops/upload.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Token ids of sentences, batch x length, dense, on the host; shorter sentences are filled up with a padding
/// token.
using token_matrix = tensor_view<const std::int32_t, 2>;

/// A view of arrays on the tape (training) or in scratch, in the memory of a device.
struct packed_tokens {
  std::span<const std::int32_t> tokens;     ///< without padding, sentence after sentence
  const std::int32_t* positions = nullptr;  ///< of each in its sentence
  const std::uint64_t* numbers = nullptr;   ///< of each in the global batch; see ops::row_dropout
  token_runs runs;                          ///< the rows of each sentence
  extents<2> shape{};                       ///< of the padded batch

  index_t rows() const { return static_cast<index_t>(tokens.size()); }
};

namespace detail {

/// How many tokens are not padding.
inline index_t count_tokens(const token_matrix& ids, std::int32_t padding) {
  index_t count = 0;
  for (const std::int32_t id : ids.flat()) count += id != padding ? 1 : 0;
  return count;
}

/// Packs a batch, whose ids the host reads, for the device of a context. A token's number is (sentence in the
/// global batch) * table length + position: it does not depend on the rest of the batch. In training,
/// unpack_tokens gives the tape back. Throws value_error for a token outside the vocabulary, shape_error for
/// a sentence longer than the table of positions.
template <class T, class Device, class Who>
packed_tokens pack_tokens(context<Device>& ctx, scratch_frame& frame, const Who& who, const token_matrix& ids,
                          std::int32_t padding, index_t vocabulary, const PositionalEncoding<T>& encoding) {
  ops::check_tokens(who, ids.flat(), vocabulary, padding);
  const index_t sentences = ids.extent(0), length = ids.extent(1);
  const auto take = [&]<class V>(V, index_t count) {
    return ctx.training() ? ctx.tape().template push<V>(count) : frame.template take<V>(count);
  };
  auto* const runs = take(index_t{}, 2 * sentences);
  auto* const words = take(std::int32_t{}, 2 * ids.size());
  auto* const numbers = take(std::uint64_t{}, ids.size());
  scratch_frame notes(ctx.host_scratch());
  auto* const runs_here = ops::upload_buffer(ctx, notes, runs, 2 * sentences);
  auto* const words_here = ops::upload_buffer(ctx, notes, words, 2 * ids.size());
  auto* const numbers_here = ops::upload_buffer(ctx, notes, numbers, ids.size());
  index_t row = 0;
  for (index_t s = 0; s < sentences; ++s) {
    runs_here[s] = row;
    const auto sentence = static_cast<std::uint64_t>(ctx.first_sample() + s);
    for (index_t t = 0; t < length; ++t) {
      const std::int32_t id = ids.data()[s * length + t];
      if (id == padding) continue;
      encoding.require_length(t + 1);
      words_here[row] = id;
      words_here[ids.size() + row] = static_cast<std::int32_t>(t);
      numbers_here[row] =
          sentence * static_cast<std::uint64_t>(encoding.positions()) + static_cast<std::uint64_t>(t);
      ++row;
    }
    runs_here[sentences + s] = row - runs_here[s];
  }
  ops::upload(ctx, runs_here, runs, 2 * sentences);
  ops::upload(ctx, words_here, words, ids.size() + row);
  ops::upload(ctx, numbers_here, numbers, row);
  return {{words, static_cast<std::size_t>(row)},
          words + ids.size(),
          numbers,
          {sentences, runs, runs + sentences, row},
          ids.shape()};
}

template <class Device>
void unpack_tokens(context<Device>& ctx, const packed_tokens& packed) {
  const index_t size = volume<2>(packed.shape);
  ctx.tape().template pop<std::uint64_t>(size);
  ctx.tape().template pop<std::int32_t>(2 * size);
  ctx.tape().template pop<index_t>(2 * packed.shape[0]);
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
