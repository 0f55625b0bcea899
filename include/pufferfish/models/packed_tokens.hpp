// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `packed_tokens`, `packed_pairs`, `pair_packing`: the real tokens of a padded batch of sentences, stored
/// one after the other without padding. Operations on rows of tokens then spend no time on padding and need
/// no mask.

#include <cstddef>
#include <cstdint>
#include <span>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/ops/attention/token_runs.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Token ids of sentences, batch x length, dense, on the host. Shorter sentences end with padding tokens up
/// to the common length.
using token_matrix = tensor_view<const std::int32_t, 2>;

/// A packed batch of token ids and their places: views of arrays in the memory of the device (the CPU's or a
/// GPU's). The arrays belong to one block of a pair_packing or to the caller; none is copied.
struct packed_tokens {
  /// Ids, sentence after sentence without padding. Rows of padding may follow the last sentence; they belong
  /// to no sentence and change no result. A row_observer is shown these rows too, so a batch of a step that
  /// takes statistics must be packed without them.
  std::span<const std::int32_t> tokens;
  const std::int32_t* positions = nullptr;  ///< position of each token in its sentence
  const std::uint64_t* numbers = nullptr;  ///< number of each token in the global batch; see ops::row_dropout
  token_runs runs;                         ///< rows of each sentence

  /// Number of rows, rows of padding included.
  index_t rows() const { return static_cast<index_t>(tokens.size()); }
};

/// Views of a batch of sentence pairs, the input of a transformer.
/// source.runs and target.runs have one entry per pair.
struct packed_pairs {
  packed_tokens source, target;
  /// Expected next token for each row of target.tokens; the padding token if the row has no loss.
  const std::int32_t* next = nullptr;
};

namespace detail {

/// Layout of several arrays in one block of memory, so that one copy moves all of them to a device. Each
/// array starts at a multiple of 16 bytes after the start of the block.
class block_layout {
 public:
  /// Reserves `count` elements of V. Returns the offset of the array in bytes.
  template <class V>
  index_t add(index_t count) {
    constexpr index_t step = 16;
    const index_t place = bytes_;
    bytes_ += (count * static_cast<index_t>(sizeof(V)) + step - 1) / step * step;
    return place;
  }
  /// Number of bytes of the block that all parts share.
  index_t bytes() const { return bytes_; }

  /// Address of a part of a block; `place`: its offset in bytes.
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

/// Number of tokens that are not padding. Throws shape_error unless the matrix is dense.
inline index_t count_tokens(const token_matrix& ids, std::int32_t padding) {
  index_t count = 0;
  for (const std::int32_t id : ids.flat()) count += id != padding ? 1 : 0;
  return count;
}

/// Places of the arrays of packed_tokens in a block of memory.
class token_packing {
 public:
  /// Reserves memory for `rows` rows. The number of tokens is `rows`, or at most `rows` if not `full`.
  token_packing(index_t sentences, index_t rows, bool full, block_layout& layout)
      : sentences_(sentences),
        rows_(rows),
        full_(full),
        runs_place_(layout.add<index_t>(2 * sentences)),
        numbers_place_(layout.add<std::uint64_t>(rows)),
        ids_place_(layout.add<std::int32_t>(rows)),
        positions_place_(layout.add<std::int32_t>(rows)) {}

  index_t rows() const { return rows_; }

  /// Writes the tokens of `ids` that are not `padding` to `block` (host memory of the layout's size),
  /// sentence after sentence; unused rows receive `padding`. Sentence s of `ids` has number first_sentence +
  /// s in the global batch. Also writes each token's position and its number (number of its sentence) *
  /// positions + position, which does not depend on how the batch is split or padded. `positions`: upper
  /// bound of the length of all sentences.
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

  /// Views of the arrays in a block, on the host or in its copy on a device.
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

/// Layout of a batch of sentence pairs in one block of memory, with a function that writes the block on the
/// host. The block may then be copied to a device as a whole.
///
///     pair_packing packing(source, target, padding);
///     packing.write(written, source, target, next, padding, ctx.first_sample(), positions);
///     ... packing.bytes() from `written` to `place` ...
///     net.root().loss(ctx, packing.in(place), smoothing, results);
///
/// A block holds, for source and target: first row and length of each sentence (index_t), the number of each
/// row in the global batch (64 bits), its token and its position (32 bits each); then the next tokens (32
/// bits). Every array starts at a multiple of 16 bytes.
class pair_packing {
 public:
  /// Sizes of a packed batch.
  struct sizes {
    index_t sentences = 0;
    index_t source_rows = 0, target_rows = 0;  ///< at least the number of tokens
    bool full = false;  ///< whether every row is a token, so that no rows need clearing
  };

  /// Layout for batches of at most these numbers of rows. Batches of the same sizes have the same layout, so
  /// that a captured step can be replayed with another batch.
  explicit pair_packing(const sizes& of) : pair_packing(of, detail::block_layout()) {}
  /// Layout of one row for each token, without rows of padding. Counts the tokens of both matrices, which
  /// must be dense (shape_error).
  pair_packing(const token_matrix& source, const token_matrix& target, std::int32_t padding)
      : pair_packing(exact(source, target, padding)) {}

  /// Size of the block in bytes. The block must start at a multiple of 16 bytes.
  index_t bytes() const { return bytes_; }

  /// Packs a batch of the given sizes into a block on the host. The first pair is number `first_sentence` of
  /// the global batch. `positions`: length of the model's table of positions; no sentence may be longer.
  /// Tokens must be in the model's vocabulary. `next` has the shape of `target`, or is null if no loss is
  /// computed. Returns the number of rows that count for the loss.
  /// Nothing is checked: source and target must be dense, have `sentences` rows, and at most as many tokens
  /// as there are rows.
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

  /// Views of the batch in a block.
  /// The views are valid as long as the block; nothing is read.
  packed_pairs in(const std::byte* block) const {
    return {source_.in(block), target_.in(block), detail::block_layout::at<std::int32_t>(block, next_place_)};
  }

 private:
  pair_packing(const sizes& of, detail::block_layout layout)
      : source_(of.sentences, of.source_rows, of.full, layout),
        target_(of.sentences, of.target_rows, of.full, layout),
        next_place_(layout.add<std::int32_t>(of.target_rows)),
        bytes_(layout.bytes()) {}

  // Sizes of a batch with one row for each token.
  static sizes exact(const token_matrix& source, const token_matrix& target, std::int32_t padding) {
    return {source.extent(0), detail::count_tokens(source, padding), detail::count_tokens(target, padding),
            true};
  }

  detail::token_packing source_, target_;
  index_t next_place_, bytes_;
};

PUFFERFISH_NAMESPACE_END
