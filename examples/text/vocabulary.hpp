// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Words as numbers: `word_counts` counts them, `vocabulary` maps them to ids and back.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "library.hpp"

namespace examples {

namespace detail {

/// Lets maps of std::string be searched by std::string_view without a copy.
struct text_hash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
template <class Value>
using text_map = std::unordered_map<std::string, Value, text_hash, std::equal_to<>>;

}  // namespace detail

/// How often each word occurs.
/// \code
///   word_counts counts;
///   for (const std::string_view word : split_words("the cat and the dog")) counts.add(word);
///   const vocabulary words(counts, {.minimum_count = 2});  // <unk> and "the"
/// \endcode
class word_counts {
 public:
  /// Adds `times` to the count of a word. Throws value_error for an empty word and for a negative number.
  void add(std::string_view word, std::int64_t times = 1) {
    if (word.empty() || times < 0) {
      detail::throw_error<value_error>(
          {"word_counts: ", detail::quote_name(word), " counted ", times, " times"});
    }
    auto place = counts_.find(word);
    if (place == counts_.end()) place = counts_.emplace(std::string(word), 0).first;
    place->second += times;
    total_ += times;
  }

  /// The count of a word; 0 for a word that was never added.
  std::int64_t count(std::string_view word) const {
    const auto place = counts_.find(word);
    return place == counts_.end() ? 0 : place->second;
  }
  /// Sum of all counts.
  std::int64_t total() const { return total_; }

  /// Words and counts, the most frequent first, equally frequent ones in the
  /// order of their bytes. The result does not depend on the order of counting.
  /// Copies and sorts all words: O(n log n) per call.
  std::vector<std::pair<std::string, std::int64_t>> sorted() const {
    std::vector<std::pair<std::string, std::int64_t>> result(counts_.begin(), counts_.end());
    std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) {
      return a.second != b.second ? a.second > b.second : a.first < b.first;
    });
    return result;
  }

 private:
  detail::text_map<std::int64_t> counts_;
  std::int64_t total_ = 0;
};

/// The word that stands for all words without an id of their own.
inline constexpr std::string_view unknown_word = "<unk>";

/// Options of a vocabulary that is made from counts.
struct vocabulary_options {
  /// Words that are always in the vocabulary, with ids 0, 1, ... in this order. One is unknown_word.
  std::vector<std::string> special{std::string(unknown_word)};
  std::int64_t minimum_count = 1;  ///< rarer words are left out
  index_t maximum_size = 0;        ///< limit of the size, special words included; 0: no limit
};

/// Words with ids 0 .. size - 1: first the special ones, then the others,
/// the most frequent first. Has value semantics: copies are independent.
/// Const members may be called by several threads at once.
class vocabulary {
 public:
  /// An empty vocabulary.
  vocabulary() = default;

  /// The words of `counts` that the options admit. Throws value_error for special words that are empty,
  /// duplicate, or without unknown_word, and for a maximum below the number of special words.
  /// The size is at most 2^31 - 1.
  explicit vocabulary(const word_counts& counts, const vocabulary_options& options = {}) {
    for (const std::string& word : options.special) {
      if (word.empty() || !insert(word)) {
        detail::throw_error<value_error>(
            {"vocabulary: ", detail::quote_name(word), " is no special word, or is one twice"});
      }
    }
    const auto unknown = find(unknown_word);
    if (!unknown) {
      detail::throw_error<value_error>(
          {"vocabulary: ", detail::quote_name(unknown_word), " is not among the special words"});
    }
    unknown_ = *unknown;
    const auto limit = options.maximum_size == 0 ? largest : options.maximum_size;
    if (limit < size()) {
      detail::throw_error<value_error>(
          {"vocabulary: a maximum size of ", options.maximum_size, " with ", size(), " special words"});
    }
    for (const auto& [word, count] : counts.sorted()) {
      if (count >= options.minimum_count && size() < limit) insert(word);
    }
  }

  index_t size() const { return static_cast<index_t>(words_.size()); }

  /// The word with an id. Throws value_error for an id outside 0 .. size - 1.
  const std::string& word(std::int32_t id) const {
    if (id < 0 || id >= size()) {
      detail::throw_error<value_error>({"vocabulary: id ", id, " is not in 0 .. ", size() - 1});
    }
    return words_[static_cast<std::size_t>(id)];
  }

  /// The id of a word that is in the vocabulary, else nothing.
  std::optional<std::int32_t> find(std::string_view word) const {
    const auto place = index_of_.find(word);
    if (place == index_of_.end()) return std::nullopt;
    return place->second;
  }

  /// The id of a word; the id of unknown_word if the vocabulary does not contain it. Throws value_error if
  /// the vocabulary is empty.
  std::int32_t id(std::string_view word) const {
    if (words_.empty()) {
      detail::throw_error<value_error>(
          {"vocabulary: ", detail::quote_name(word), " has no id in an empty vocabulary"});
    }
    return find(word).value_or(unknown_);
  }

 private:
  static constexpr index_t largest = std::numeric_limits<std::int32_t>::max();

  /// Returns false if the word exists already.
  bool insert(const std::string& word) {
    if (!index_of_.emplace(word, static_cast<std::int32_t>(words_.size())).second) return false;
    words_.push_back(word);
    return true;
  }

  std::vector<std::string> words_;
  detail::text_map<std::int32_t> index_of_;
  std::int32_t unknown_ = 0;
};

}  // namespace examples
