// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `packed_tokens`, `packed_pairs`, `pair_packing`: the real tokens of a padded batch of sentences, one
/// behind the other. What works on rows of tokens spends nothing on padding, and no mask is needed to keep it
/// out.

#include <cstddef>
#include <cstdint>
#include <span>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/ops/token_runs.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Token ids of sentences, batch x length, dense, on the host; shorter sentences are filled up with a padding
/// token.
using token_matrix = tensor_view<const std::int32_t, 2>;

/// A view of arrays in the memory of a device.
struct packed_tokens {
  /// Without padding, sentence after sentence; behind the last one there may be rows of padding, which belong
  /// to no sentence and change no result. A row_observer sees them like other rows, so a step that takes
  /// statistics must be packed without them.
  std::span<const std::int32_t> tokens;
  const std::int32_t* positions = nullptr;  ///< of each in its sentence
  const std::uint64_t* numbers = nullptr;   ///< of each in the global batch; see ops::row_dropout
  token_runs runs;                          ///< the rows of each sentence

  index_t rows() const { return static_cast<index_t>(tokens.size()); }
};

/// A batch of sentence pairs as a transformer reads it; a view, as packed_tokens.
struct packed_pairs {
  packed_tokens source, target;
  /// The token to follow each of target.tokens; padding: that row counts for no loss.
  const std::int32_t* next = nullptr;
};

namespace detail {

/// Arrays side by side in one block of memory, which one copy brings to a device.
class block_layout {
 public:
  /// Where an array of `count` elements of V begins.
  template <class V>
  index_t add(index_t count) {
    constexpr index_t step = 16;
    const index_t place = bytes_;
    bytes_ += (count * static_cast<index_t>(sizeof(V)) + step - 1) / step * step;
    return place;
  }
  index_t bytes() const { return bytes_; }

  template <class V>
  static V* at(std::byte* block, index_t place) {
    return reinterpret_cast<V*>(block + place);
  }
  template <class V>
  static const V* at(const std::byte* block, index_t place) {
    return reinterpret_cast<const V*>(block + place);
  }

 private:
  index_t bytes_ = 0;
};

/// How many tokens are not padding.
inline index_t count_tokens(const token_matrix& ids, std::int32_t padding) {
  index_t count = 0;
  for (const std::int32_t id : ids.flat()) count += id != padding ? 1 : 0;
  return count;
}

/// The arrays of packed_tokens in a block of memory.
class token_packing {
 public:
  /// For as many tokens as rows, or fewer if not `full`.
  token_packing(index_t sentences, index_t rows, bool full, block_layout& layout)
      : sentences_(sentences),
        rows_(rows),
        full_(full),
        runs_place_(layout.add<index_t>(2 * sentences)),
        numbers_place_(layout.add<std::uint64_t>(rows)),
        ids_place_(layout.add<std::int32_t>(rows)),
        positions_place_(layout.add<std::int32_t>(rows)) {}

  index_t rows() const { return rows_; }

  /// Packs the sentences of a batch, the first of which is number `first_sentence` of the global batch, into
  /// a block on the host. A token's number is (number of its sentence) * positions + position: it does not
  /// depend on the rest of the batch.
  void write(std::byte* block, const token_matrix& ids, std::int32_t padding, index_t first_sentence,
             index_t positions) const {
    auto* const runs = block_layout::at<index_t>(block, runs_place_);
    auto* const numbers = block_layout::at<std::uint64_t>(block, numbers_place_);
    auto* const words = block_layout::at<std::int32_t>(block, ids_place_);
    auto* const places = block_layout::at<std::int32_t>(block, positions_place_);
    const index_t length = ids.extent(1);
    index_t row = 0;
    for (index_t s = 0; s < sentences_; ++s) {
      runs[s] = row;
      for (index_t t = 0; t < length; ++t) {
        const std::int32_t id = ids.data()[s * length + t];
        if (id == padding) continue;
        words[row] = id;
        places[row] = static_cast<std::int32_t>(t);
        numbers[row++] = static_cast<std::uint64_t>((first_sentence + s) * positions + t);
      }
      runs[sentences_ + s] = row - runs[s];
    }
    for (; row < rows_; ++row) {
      words[row] = padding;
      places[row] = 0;
      numbers[row] = 0;
    }
  }

  /// What lies in a block, on the host or where that was brought to.
  packed_tokens in(const std::byte* block) const {
    const auto* const runs = block_layout::at<index_t>(block, runs_place_);
    return {{block_layout::at<std::int32_t>(block, ids_place_), static_cast<std::size_t>(rows_)},
            block_layout::at<std::int32_t>(block, positions_place_),
            block_layout::at<std::uint64_t>(block, numbers_place_),
            {sentences_, runs, runs + sentences_, full_ ? rows_ : -1}};
  }

 private:
  index_t sentences_, rows_;
  bool full_;
  index_t runs_place_, numbers_place_, ids_place_, positions_place_;
};

}  // namespace detail

/// How a batch of sentence pairs lies in one block of memory, and how it comes there. The block may be
/// written on the host and copied to a device as a whole.
///
///     pair_packing packing(source, target, padding);
///     packing.write(written, source, target, next, padding, ctx.first_sample(), positions);
///     ... packing.bytes() from `written` to `place` ...
///     net.root().loss(ctx, packing.in(place), smoothing, results);
class pair_packing {
 public:
  /// Sizes of a packed batch.
  struct sizes {
    index_t sentences = 0;
    index_t source_rows = 0, target_rows = 0;  ///< at least one for each token
    bool full = false;                         ///< every row is a token's, which saves clearing others
  };

  explicit pair_packing(const sizes& of) : pair_packing(of, detail::block_layout()) {}
  /// A row for every token.
  pair_packing(const token_matrix& source, const token_matrix& target, std::int32_t padding)
      : pair_packing(exact(source, target, padding)) {}

  /// Of the block, which begins on a boundary of 16.
  index_t bytes() const { return bytes_; }

  /// Packs a batch of the sizes told into a block on the host; the first pair is number `first_sentence` of
  /// the global batch, `positions` those of the model. Tokens must be in its vocabulary, sentences not longer
  /// than `positions`. `next` is shaped as `target`, or null where no loss is asked for. Returns how many
  /// rows count for the loss.
  index_t write(std::byte* block, const token_matrix& source, const token_matrix& target,
                const token_matrix& next, std::int32_t padding, index_t first_sentence,
                index_t positions) const {
    source_.write(block, source, padding, first_sentence, positions);
    target_.write(block, target, padding, first_sentence, positions);
    if (next.is_null()) return 0;
    auto* const follows = detail::block_layout::at<std::int32_t>(block, next_place_);
    index_t row = 0, counted = 0;
    for (index_t i = 0; i < target.size(); ++i) {
      if (target.data()[i] == padding) continue;
      follows[row++] = next.data()[i];
      counted += next.data()[i] != padding ? 1 : 0;
    }
    for (; row < target_.rows(); ++row) follows[row] = padding;
    return counted;
  }

  /// The batch in a block.
  packed_pairs in(const std::byte* block) const {
    return {source_.in(block), target_.in(block), detail::block_layout::at<std::int32_t>(block, next_place_)};
  }

 private:
  pair_packing(const sizes& of, detail::block_layout layout)
      : source_(of.sentences, of.source_rows, of.full, layout),
        target_(of.sentences, of.target_rows, of.full, layout),
        next_place_(layout.add<std::int32_t>(of.target_rows)),
        bytes_(layout.bytes()) {}

  static sizes exact(const token_matrix& source, const token_matrix& target, std::int32_t padding) {
    return {source.extent(0), detail::count_tokens(source, padding), detail::count_tokens(target, padding),
            true};
  }

  detail::token_packing source_, target_;
  index_t next_place_, bytes_;
};

PUFFERFISH_NAMESPACE_END
