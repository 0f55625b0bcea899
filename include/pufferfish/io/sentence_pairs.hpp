// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `sentence_pairs`: sentences and their translations as tokens of any tokenizer.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <ranges>
#include <span>
#include <vector>

#include <pufferfish/core/config.hpp>
#include <pufferfish/core/error.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/tokens.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Tokens that are added to sentences in batches. No sentence may contain them. `begin` and `end` may be
/// equal, and both differ from `padding`.
struct special_tokens {
  std::int32_t padding = 1;  ///< after the end of sentences that are shorter than others of their batch
  std::int32_t begin = 2;    ///< before the first token of a sentence; often written `<s>`
  std::int32_t end = 3;      ///< after the last token of a sentence; often written `</s>`
};

/// Sequences of tokens, stored one after the other in one array. Indices are 0 .. size() - 1; other indices
/// are undefined behavior in builds without assertions. Spans stay valid until the next push_back.
/// \code
///   id_lists sentences;
///   sentences.push_back(tokens);  // std::span<const std::int32_t>; copied
///   const std::span<const std::int32_t> first = sentences[0];
/// \endcode
class id_lists {
 public:
  id_lists() = default;

  /// Copies the sequences of a range, for example a std::vector<std::vector<std::int32_t>>.
  template <std::ranges::input_range Lists>
  requires(std::convertible_to<std::ranges::range_reference_t<const Lists>,
                               std::span<const std::int32_t>>) explicit id_lists(const Lists& lists) {
    for (const auto& list : lists) push_back(list);
  }

  /// Number of sequences.
  index_t size() const { return static_cast<index_t>(ends_.size()); }

  /// The tokens of sequence i.
  std::span<const std::int32_t> operator[](index_t i) const {
    const auto at = static_cast<std::size_t>(i);
    PUFFERFISH_ASSERT(i >= 0 && at < ends_.size(), "id_lists: outside");
    const std::size_t begin = at == 0 ? 0 : ends_[at - 1];
    return std::span(ids_).subspan(begin, ends_[at] - begin);
  }

  /// Appends a copy of a sequence.
  void push_back(std::span<const std::int32_t> list) {
    ids_.insert(ids_.end(), list.begin(), list.end());
    ends_.push_back(ids_.size());
  }

  /// Length of the longest sequence, 0 if there is none. The cost is linear in the number of sequences.
  index_t longest() const {
    index_t result = 0;
    for (index_t i = 0; i < size(); ++i) result = std::max(result, static_cast<index_t>((*this)[i].size()));
    return result;
  }

 private:
  std::vector<std::int32_t> ids_;
  std::vector<std::size_t> ends_;
};

/// Limits for the sentences that the constructor of sentence_pairs accepts.
struct sentence_limits {
  index_t vocabulary = 0;    ///< tokens must be in 0 .. vocabulary - 1; 0: not checked
  index_t length = 0;        ///< largest number of tokens of a sentence; 0: not checked
  bool allow_empty = false;  ///< whether a sentence may have no tokens
};

/// Sentences and their translations as tokens, without special_tokens: sentence i of `target` translates
/// sentence i of `source`.
/// \code
///   const std::vector<std::vector<std::int32_t>> german = ..., english = ...;  // by any tokenizer
///   const sentence_pairs pairs(german, english, {.vocabulary = 8000, .length = 100});
/// \endcode
struct sentence_pairs {
  id_lists source, target;

  sentence_pairs() = default;

  /// Copies two ranges of sentences (see id_lists) of the same length; sentence i of `targets` translates
  /// sentence i of `sources`. Throws value_error if the numbers of sentences differ, or if a sentence exceeds
  /// `limits`. The message names the side, the number of the sentence (from 0), the value found and the
  /// limit.
  template <class Sentences = std::vector<std::vector<std::int32_t>>>
  sentence_pairs(const Sentences& sources, const Sentences& targets, const sentence_limits& limits = {})
      : source(sources), target(targets) {
    if (source.size() != target.size()) {
      detail::throw_error<value_error>(
          {"sentence_pairs: ", source.size(), " sources and ", target.size(), " targets"});
    }
    for (index_t i = 0; i < size(); ++i) {
      check("source", source, "target", target, i, limits);
      check("target", target, "source", source, i, limits);
    }
  }

  /// Number of pairs.
  index_t size() const { return source.size(); }

 private:
  // Throws value_error for a sentence that exceeds the limits.
  static void check(const char* side, const id_lists& sentences, const char* other_side,
                    const id_lists& others, index_t i, const sentence_limits& limits) {
    const auto tokens = static_cast<index_t>(sentences[i].size());
    if (tokens == 0 && !limits.allow_empty) {
      detail::throw_error<value_error>({"sentence_pairs: ", side, " ", i, " has no tokens, ", other_side, " ",
                                        i, " has ", others[i].size()});
    }
    if (limits.length > 0 && tokens > limits.length) {
      detail::throw_error<value_error>(
          {"sentence_pairs: ", side, " ", i, " has ", tokens, " tokens, more than ", limits.length});
    }
    if (limits.vocabulary > 0) {
      const auto who = [&] { return detail::message({"sentence_pairs: ", side, " ", i}); };
      detail::check_tokens(who, sentences[i], limits.vocabulary);
    }
  }
};

PUFFERFISH_NAMESPACE_END
