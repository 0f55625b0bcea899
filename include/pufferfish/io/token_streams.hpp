// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `token_streams`: a text cut into parallel streams and segments for training a recurrent language model by
/// truncated backpropagation through time, split over the ranks of a run.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <pufferfish/core/error.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/tokens.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of token_streams. All ranks must have the same options, except for `rank`.
struct stream_options {
  index_t streams = 20;    ///< streams of all ranks together: the global batch
  index_t segment = 35;    ///< tokens of a stream in one step; an epoch's last segment may have fewer
  int rank = 0;            ///< number of this process in the run
  int ranks = 1;           ///< number of processes in the run
  index_t vocabulary = 0;  ///< tokens must be 0 .. vocabulary - 1; 0: not checked
};

/// The tokens of one step on one rank, in time-major order: token t of stream s is at index t * streams + s.
struct token_segment {
  index_t length = 0;          ///< number of tokens of each stream
  index_t first = 0;           ///< number of this rank's first stream among all streams
  index_t streams = 0;         ///< this rank's streams; may be 0 if there are more ranks than streams
  index_t global_streams = 0;  ///< number of streams of all ranks
  bool starts = false;         ///< true for the first segment: reset the carried state
  std::span<const std::int32_t> inputs;   ///< tokens [length x streams]
  std::span<const std::int32_t> targets;  ///< [length x streams]: the token after each input
};

/// Cuts a text of n tokens into B streams of floor(n / B) consecutive tokens, and the streams into segments.
/// The last n mod B tokens are unused. An epoch has ceil((floor(n / B) - 1) / segment) segments, in which
/// every token of a stream except the first is predicted once. Consecutive segments continue each other, so
/// recurrent state can be carried from step to step. Rank r of p gets streams B r / p .. B (r + 1) / p - 1.
/// Source of the scheme: the usual batching of word-level language models (Zaremba, Sutskever, Vinyals,
/// "Recurrent neural network regularization", 2014). An object may be used by one thread at a time.
/// \code
///   const std::vector<std::int32_t> ids = ...;  // a text as numbers, by any tokenizer
///   token_streams source(ids, {.streams = 20, .segment = 35, .vocabulary = 8000});
///   for (index_t step = 0; step < source.steps_per_epoch(); ++step) {
///     const token_segment part = source.load(step);  // part.inputs: [part.length x part.streams]
///   }
/// \endcode
class token_streams {
 public:
  /// Cuts the text `ids` into streams. The ids must outlive the object. Throws value_error for options out of
  /// range, for a text with fewer than two tokens per stream, and for an id outside the vocabulary, with its
  /// position.
  token_streams(std::span<const std::int32_t> ids, const stream_options& options)
      : ids_(ids), options_(options) {
    if (options.streams < 1 || options.segment < 1) {
      detail::throw_error<value_error>(
          {"token_streams: ", options.streams, " streams in segments of ", options.segment, " tokens"});
    }
    if (options.ranks < 1 || options.rank < 0 || options.rank >= options.ranks) {
      detail::throw_error<value_error>({"token_streams: rank ", options.rank, " of ", options.ranks});
    }
    length_ = static_cast<index_t>(ids.size()) / options.streams;
    if (length_ < 2) {
      detail::throw_error<value_error>({"token_streams: ", ids.size(), " tokens are too few for ",
                                        options.streams, " streams: each needs two"});
    }
    if (options.vocabulary > 0) detail::check_tokens("token_streams", ids, options.vocabulary);
    first_ = options.streams * options.rank / options.ranks;
    count_ = options.streams * (options.rank + 1) / options.ranks - first_;
    const auto room = static_cast<std::size_t>(longest_segment() * count_);
    inputs_.resize(room);
    targets_.resize(room);
  }
  /// Deleted: a temporary vector of ids would not outlive the object.
  token_streams(std::vector<std::int32_t>&&, const stream_options&) = delete;

  /// The options passed to the constructor.
  const stream_options& options() const { return options_; }

  /// Number of tokens of each stream.
  index_t stream_length() const { return length_; }

  /// Number of steps of an epoch: ceil((stream_length() - 1) / segment), at least 1.
  index_t steps_per_epoch() const {
    return (length_ - 1) / options_.segment + ((length_ - 1) % options_.segment > 0 ? 1 : 0);
  }
  /// Largest number of tokens of a stream in a step: the segment, but at most stream_length() - 1.
  index_t longest_segment() const { return std::min(options_.segment, length_ - 1); }

  /// Number of tokens predicted in an epoch, by all ranks.
  std::int64_t tokens_per_epoch() const { return static_cast<std::int64_t>(length_ - 1) * options_.streams; }

  /// Number of streams of this rank, the same in every step.
  index_t local_streams() const { return count_; }

  /// Returns the tokens of a step for this rank. The views are valid until the next call. Allocates nothing.
  /// Throws value_error for a step outside 0 .. steps_per_epoch() - 1.
  token_segment load(index_t step) {
    if (step < 0 || step >= steps_per_epoch()) {
      detail::throw_error<value_error>(
          {"token_streams: step ", step, "; steps are 0 .. ", steps_per_epoch() - 1});
    }
    const index_t begin = step * options_.segment;
    token_segment result;
    result.length = std::min(options_.segment, length_ - 1 - begin);
    result.first = first_;
    result.streams = count_;
    result.global_streams = options_.streams;
    result.starts = step == 0;
    for (index_t s = 0; s < count_; ++s) {
      const std::int32_t* const from = ids_.data() + (first_ + s) * length_ + begin;
      for (index_t t = 0; t < result.length; ++t) {
        const auto to = static_cast<std::size_t>(t * count_ + s);
        inputs_[to] = from[t];
        targets_[to] = from[t + 1];
      }
    }
    const auto tokens = static_cast<std::size_t>(result.length * count_);
    result.inputs = std::span(inputs_).first(tokens);
    result.targets = std::span(targets_).first(tokens);
    return result;
  }

 private:
  std::span<const std::int32_t> ids_;
  stream_options options_;
  index_t length_ = 0;
  index_t first_ = 0;
  index_t count_ = 0;
  std::vector<std::int32_t> inputs_, targets_;
};

PUFFERFISH_NAMESPACE_END
