// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `pair_batches`: batches of sentence pairs, padded or packed, in a new order every epoch, split over the
/// ranks of a run.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/random.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/io/sentence_pairs.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// How the tokens of a batch are stored in memory.
enum class pair_layout {
  padded,  ///< every sentence has as many positions as the longest one, padding after its end
  packed   ///< sentences are stored without gaps, so no padding is computed
};

/// Options of pair_batches. All ranks must have the same options, except for `rank`.
struct pair_batch_options {
  index_t batch = 256;  ///< pairs of all ranks together; an epoch's last batch may have fewer
  bool shuffle = true;  ///< whether the order is random, and new every epoch; else the order of the set
  /// Number of batches whose pairs are sorted by length together before they are cut into batches, to save
  /// padding. With `shuffle`, the order of the batches is random again afterwards. 0: no sorting.
  index_t bucket_batches = 0;
  pair_layout layout = pair_layout::padded;
  std::uint64_t seed = 0;  ///< seed of the random orders
  int rank = 0;            ///< number of this process in the run
  int ranks = 1;           ///< number of processes in the run
  special_tokens special{};
};

/// One rank's part of a global batch. Sentence i has positions first[i] .. first[i] + count[i] - 1 of its
/// side, where `first` and `count` are source_first and source_count, or target_first and target_count. In
/// the padded layout, first[i] is i * length, and the positions after the sentence hold
/// special_tokens::padding. The views are valid until the next load().
struct pair_batch {
  index_t first = 0;          ///< position of this rank's first pair in the global batch
  index_t count = 0;          ///< this rank's pairs; may be 0 in a batch smaller than the number of ranks
  index_t global_count = 0;   ///< number of pairs of all ranks
  index_t source_length = 0;  ///< tokens of this rank's longest source, begin and end included
  index_t target_length = 0;  ///< tokens of this rank's longest target, begin or end included
  std::int64_t tokens = 0;    ///< labels of this rank that are not padding
  std::int64_t global_tokens = 0;        ///< labels of all ranks that are not padding
  std::span<const std::int32_t> source;  ///< begin, tokens, end of each sentence
  std::span<const std::int32_t> target;  ///< begin, tokens: input of the decoder
  std::span<const std::int32_t> labels;  ///< tokens, end: labels of the decoder, at the positions of target
  std::span<const index_t> source_first, source_count;  ///< first position and length of each source
  /// First position and length of each target and its labels
  std::span<const index_t> target_first, target_count;
  std::span<const std::uint32_t> pairs;  ///< index of each pair in the set
};

/// Serves the batches of a set of sentence pairs. The order is a pure function of (seed, epoch), so any
/// number of ranks sees the same global batches. Rank r of p gets pairs B r / p .. B (r + 1) / p - 1 of a
/// batch of B pairs. The set must outlive the object and must not change. An object may be used by one thread
/// at a time. The sum of pair_batch::tokens over the ranks is global_tokens.
/// \code
///   pair_batches source(pairs, {.batch = 64, .bucket_batches = 10, .seed = 1});
///   for (index_t step = 0; step < source.steps_per_epoch(); ++step) {
///     const pair_batch part = source.load(0, step);  // part.source: [part.count x part.source_length]
///   }
/// \endcode
class pair_batches {
 public:
  /// Throws value_error for an empty set, unequal numbers of sources and targets, a batch below 1, a negative
  /// number of bucketed batches, a rank outside 0 .. ranks - 1, a padding that is also the begin or end
  /// token, and a sentence that contains a special token, with its position.
  pair_batches(const sentence_pairs& set, const pair_batch_options& options) : set_(&set), options_(options) {
    const pair_batch_options& o = options;
    if (set.size() < 1) detail::throw_error<value_error>({"pair_batches: a set without pairs"});
    if (o.batch < 1 || o.bucket_batches < 0) {
      detail::throw_error<value_error>(
          {"pair_batches: batches of ", o.batch, " pairs, ", o.bucket_batches, " of them sorted together"});
    }
    if (o.ranks < 1 || o.rank < 0 || o.rank >= o.ranks) {
      detail::throw_error<value_error>({"pair_batches: rank ", o.rank, " of ", o.ranks});
    }
    if (set.source.size() != set.target.size()) {
      detail::throw_error<value_error>(
          {"pair_batches: ", set.source.size(), " sources and ", set.target.size(), " targets"});
    }
    if (o.special.padding == o.special.begin || o.special.padding == o.special.end) {
      detail::throw_error<value_error>({"pair_batches: padding ", o.special.padding, ", begin ",
                                        o.special.begin, ", end ", o.special.end,
                                        ": padding must differ from the others"});
    }
    refuse_special("source", set.source);
    refuse_special("target", set.target);
    max_source_length_ = set.source.longest() + 2;
    max_target_length_ = set.target.longest() + 1;
    const auto pairs = static_cast<std::size_t>(max_local_batch());
    source_.resize(pairs * static_cast<std::size_t>(max_source_length()));
    target_.resize(pairs * static_cast<std::size_t>(max_target_length()));
    labels_.resize(target_.size());
    for (auto* places : {&source_first_, &source_count_, &target_first_, &target_count_}) {
      places->resize(pairs);
    }
  }
  /// Deleted: a temporary set would not outlive the object.
  pair_batches(sentence_pairs&&, const pair_batch_options&) = delete;

  /// The set passed to the constructor.
  const sentence_pairs& set() const { return *set_; }
  /// The options passed to the constructor.
  const pair_batch_options& options() const { return options_; }

  /// Number of global batches in an epoch, including a smaller last one.
  index_t steps_per_epoch() const {
    return set_->size() / options_.batch + (set_->size() % options_.batch > 0 ? 1 : 0);
  }

  /// Largest number of pairs that load() returns on any rank.
  index_t max_local_batch() const {
    return (std::min(options_.batch, set_->size()) + options_.ranks - 1) / options_.ranks;
  }
  /// Largest number of tokens of a source sentence in a batch, begin and end included.
  index_t max_source_length() const { return max_source_length_; }
  /// Largest number of tokens of a target sentence in a batch, begin or end included.
  index_t max_target_length() const { return max_target_length_; }

  /// Returns the sentence pairs of this rank (process of a distributed run) in a step's global batch. The
  /// views of the result refer to memory of this object and are valid until the next load(). Allocates only
  /// at the beginning of an epoch. Throws value_error for an epoch or step that does not exist.
  pair_batch load(index_t epoch, index_t step) {
    if (epoch < 0 || step < 0 || step >= steps_per_epoch()) {
      detail::throw_error<value_error>(
          {"pair_batches: epoch ", epoch, ", step ", step, "; steps are 0 .. ", steps_per_epoch() - 1});
    }
    arrange(epoch);
    const index_t begin = step * options_.batch;
    pair_batch result;
    result.global_count = std::min(options_.batch, set_->size() - begin);
    result.first = result.global_count * options_.rank / options_.ranks;
    result.count = result.global_count * (options_.rank + 1) / options_.ranks - result.first;
    const auto order = std::span<const std::uint32_t>(order_).subspan(
        static_cast<std::size_t>(begin), static_cast<std::size_t>(result.global_count));
    for (const std::uint32_t pair : order) result.global_tokens += target_tokens(pair);
    result.pairs =
        order.subspan(static_cast<std::size_t>(result.first), static_cast<std::size_t>(result.count));
    fill(result);
    return result;
  }

 private:
  // Throws value_error for a sentence that contains a special token.
  void refuse_special(const char* side, const id_lists& sentences) const {
    const special_tokens& s = options_.special;
    for (index_t i = 0; i < sentences.size(); ++i) {
      const std::span<const std::int32_t> tokens = sentences[i];
      const auto found = std::find_if(tokens.begin(), tokens.end(), [&](std::int32_t token) {
        return token == s.padding || token == s.begin || token == s.end;
      });
      if (found == tokens.end()) continue;
      const char* const name = *found == s.padding ? "padding" : *found == s.begin ? "begin" : "end";
      detail::throw_error<value_error>({"pair_batches: ", side, " ", i, " has the ", name, " token ", *found,
                                        " at position ", found - tokens.begin(), " of ", tokens.size(),
                                        "; sentences are given without special tokens"});
    }
  }

  // Number of labels of a pair: the tokens of its target and the end token.
  std::int64_t target_tokens(std::uint32_t pair) const {
    return static_cast<std::int64_t>(set_->target[pair].size()) + 1;
  }

  /// Writes the sentences of batch.pairs to the object's memory, and sets the lengths and views of the batch.
  void fill(pair_batch& batch) {
    const auto count = static_cast<std::size_t>(batch.count);
    for (std::size_t i = 0; i < count; ++i) {
      source_count_[i] = static_cast<index_t>(set_->source[batch.pairs[i]].size()) + 2;
      target_count_[i] = static_cast<index_t>(set_->target[batch.pairs[i]].size()) + 1;
      batch.source_length = std::max(batch.source_length, source_count_[i]);
      batch.target_length = std::max(batch.target_length, target_count_[i]);
      batch.tokens += target_count_[i];
    }
    const std::size_t sources = place(source_count_, batch.source_length, count, source_first_);
    const std::size_t targets = place(target_count_, batch.target_length, count, target_first_);
    if (options_.layout == pair_layout::padded) {
      std::fill_n(source_.begin(), sources, options_.special.padding);
      std::fill_n(target_.begin(), targets, options_.special.padding);
      std::fill_n(labels_.begin(), targets, options_.special.padding);
    }
    for (std::size_t i = 0; i < count; ++i) {
      const std::span<const std::int32_t> source = set_->source[batch.pairs[i]];
      const std::span<const std::int32_t> target = set_->target[batch.pairs[i]];
      std::int32_t* to = source_.data() + source_first_[i];
      *to++ = options_.special.begin;
      *std::copy(source.begin(), source.end(), to) = options_.special.end;
      to = target_.data() + target_first_[i];
      *to++ = options_.special.begin;
      std::copy(target.begin(), target.end(), to);
      to = labels_.data() + target_first_[i];
      *std::copy(target.begin(), target.end(), to) = options_.special.end;
    }
    batch.source = std::span(source_).first(sources);
    batch.target = std::span(target_).first(targets);
    batch.labels = std::span(labels_).first(targets);
    batch.source_first = std::span(source_first_).first(count);
    batch.source_count = std::span(source_count_).first(count);
    batch.target_first = std::span(target_first_).first(count);
    batch.target_count = std::span(target_count_).first(count);
  }

  /// Sets the first position of each sentence from the lengths `counts`; returns the number of positions of
  /// all sentences. `longest`: positions of each sentence in the padded layout.
  std::size_t place(const std::vector<index_t>& counts, index_t longest, std::size_t sentences,
                    std::vector<index_t>& first) const {
    index_t next = 0;
    for (std::size_t i = 0; i < sentences; ++i) {
      first[i] = next;
      next += options_.layout == pair_layout::padded ? longest : counts[i];
    }
    return static_cast<std::size_t>(next);
  }

  // Random numbers for one purpose in one epoch.
  random_stream stream(const char* purpose, index_t epoch) const {
    return {options_.seed, substream(stream_id(purpose), static_cast<std::uint64_t>(epoch))};
  }

  /// Sets the order of an epoch's pairs: random with shuffle. With bucketing, each pool
  /// is sorted by length, and with shuffle the full batches are put in random order.
  void arrange(index_t epoch) {
    if (epoch == order_epoch_) return;
    if (options_.shuffle) {
      order_ = random_permutation(set_->size(), stream("shuffle", epoch));
    } else {
      order_.resize(static_cast<std::size_t>(set_->size()));
      for (std::size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<std::uint32_t>(i);
    }
    if (options_.bucket_batches > 0) sort_pools();
    if (options_.bucket_batches > 0 && options_.shuffle) shuffle_batches(epoch);
    order_epoch_ = epoch;
  }

  // Sorts each run of bucket_batches batches by target length, then by source length.
  void sort_pools() {
    const auto batch = static_cast<std::size_t>(options_.batch);
    const auto batches = static_cast<std::size_t>(std::min(options_.bucket_batches, steps_per_epoch()));
    for (std::size_t begin = 0; begin < order_.size(); begin += batch * batches) {
      const auto from = order_.begin() + static_cast<std::ptrdiff_t>(begin);
      const auto to =
          order_.begin() + static_cast<std::ptrdiff_t>(std::min(begin + batch * batches, order_.size()));
      // Equal lengths keep their random order.
      std::stable_sort(from, to, [this](std::uint32_t a, std::uint32_t b) {
        const std::size_t target_a = set_->target[a].size(), target_b = set_->target[b].size();
        return target_a != target_b ? target_a < target_b : set_->source[a].size() < set_->source[b].size();
      });
    }
  }

  /// Puts the full batches in random order. The last batch, which may be smaller, stays last.
  void shuffle_batches(index_t epoch) {
    const index_t full = set_->size() / options_.batch;
    const auto batch = static_cast<std::size_t>(options_.batch);
    const std::vector<std::uint32_t> before = order_;
    const std::vector<std::uint32_t> places = random_permutation(full, stream("batches", epoch));
    for (std::size_t b = 0; b < places.size(); ++b) {
      std::copy_n(before.begin() + static_cast<std::ptrdiff_t>(places[b] * batch), batch,
                  order_.begin() + static_cast<std::ptrdiff_t>(b * batch));
    }
  }

  const sentence_pairs* set_;
  pair_batch_options options_;
  std::vector<std::int32_t> source_, target_, labels_;
  std::vector<index_t> source_first_, source_count_, target_first_, target_count_;
  std::vector<std::uint32_t> order_;
  index_t order_epoch_ = -1;
  index_t max_source_length_ = 0, max_target_length_ = 0;
};

PUFFERFISH_NAMESPACE_END
