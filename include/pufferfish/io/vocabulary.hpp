// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Words as numbers: `word_counts` counts them, `vocabulary` maps them to ids and back and is saved as text.

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/io/error_text.hpp>
#include <pufferfish/io/text.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace detail {

/// Lets maps of std::string be searched by std::string_view without a copy.
struct text_hash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
template <class Value>
using text_map = std::unordered_map<std::string, Value, text_hash, std::equal_to<>>;

/// True if the text can be a word of a vocabulary, whose file holds a word, a tab and a count in each line.
inline bool is_word(std::string_view word) {
  return !word.empty() && word.find_first_of("\t\n") == std::string_view::npos &&
         first_invalid_utf8(word) == word.size();
}

}  // namespace detail

/// How often each word occurs.
/// \code
///   word_counts counts;
///   for (const std::string_view word : split_words("the cat and the dog")) counts.add(word);
///   const vocabulary words(counts, {.minimum_count = 2});  // <unk> and "the"
/// \endcode
class word_counts {
 public:
  /// Adds `times` to the count of a word. Throws value_error for a word that is
  /// empty, not UTF-8, or contains a tab or a line end, and for a negative number.
  void add(std::string_view word, std::int64_t times = 1) {
    if (times < 0) detail::throw_error<value_error>({"word_counts: a word counted ", times, " times"});
    auto place = counts_.find(word);
    if (place == counts_.end()) {
      if (!detail::is_word(word)) {
        detail::throw_error<value_error>({"word_counts: ", detail::quote_name(word),
                                          " is no word: empty, not UTF-8, or with a tab or line end in it"});
      }
      place = counts_.emplace(std::string(word), 0).first;
    }
    place->second += times;
    total_ += times;
  }

  /// The count of a word; 0 for a word that was never added.
  std::int64_t count(std::string_view word) const {
    const auto place = counts_.find(word);
    return place == counts_.end() ? 0 : place->second;
  }
  /// Sum of all counts, and number of different words; words added 0 times count among the latter.
  std::int64_t total() const { return total_; }
  index_t distinct() const { return static_cast<index_t>(counts_.size()); }

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

/// Options of a vocabulary that is made from counts.
struct vocabulary_options {
  /// Words that are always in the vocabulary, with ids 0, 1, ... in this order.
  std::vector<std::string> special{"<unk>"};
  /// The word for all words left out; one of `special`. Empty: no such word, unknown words are errors.
  std::string unknown = "<unk>";
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

  /// The words of `counts` that the options admit. The count of the unknown word includes those of
  /// all words left out. Throws value_error for special words that are no words (see word_counts),
  /// duplicate, or without the unknown word, and for a maximum below the number of special words.
  /// The size is at most 2^31 - 1.
  explicit vocabulary(const word_counts& counts, const vocabulary_options& options = {}) {
    for (const std::string& word : options.special) {
      if (!detail::is_word(word) || !insert(word, counts.count(word))) {
        detail::throw_error<value_error>(
            {"vocabulary: ", detail::quote_name(word), " is no special word, or is one twice"});
      }
    }
    if (!options.unknown.empty()) {
      unknown_ = find(options.unknown);
      if (!unknown_) {
        detail::throw_error<value_error>(
            {"vocabulary: the unknown word ", detail::quote_name(options.unknown), " is no special one"});
      }
    }
    const auto limit = options.maximum_size == 0 ? largest : options.maximum_size;
    if (limit < size()) {
      detail::throw_error<value_error>(
          {"vocabulary: a maximum size of ", options.maximum_size, " with ", size(), " special words"});
    }
    std::int64_t left_out = 0;
    for (const auto& [word, count] : counts.sorted()) {
      if (index_of_.contains(word)) continue;
      if (count < options.minimum_count || size() >= limit) {
        left_out += count;
      } else {
        insert(word, count);
      }
    }
    if (unknown_) counts_[static_cast<std::size_t>(*unknown_)] += left_out;
  }

  index_t size() const { return static_cast<index_t>(words_.size()); }

  /// The word with an id. Throws value_error for an id outside 0 .. size - 1.
  const std::string& word(std::int32_t id) const { return words_[checked(id)]; }
  /// The count of that word. Throws as word().
  std::int64_t count(std::int32_t id) const { return counts_[checked(id)]; }

  /// The id of a word that is in the vocabulary, else nothing.
  std::optional<std::int32_t> find(std::string_view word) const {
    const auto place = index_of_.find(word);
    if (place == index_of_.end()) return std::nullopt;
    return place->second;
  }

  /// The id of the word for unknown words, if there is one.
  std::optional<std::int32_t> unknown() const { return unknown_; }

  /// The id of a word; the id of the unknown word if the vocabulary does
  /// not contain it. Throws value_error if there is no unknown word either.
  std::int32_t id(std::string_view word) const {
    const auto place = index_of_.find(word);
    if (place != index_of_.end()) return place->second;
    if (!unknown_) {
      detail::throw_error<value_error>({"vocabulary: ", detail::quote_name(word), " is not one of its ",
                                        size(), " words, and there is no word for unknown ones"});
    }
    return *unknown_;
  }

  /// Equal words, in the same order and with the same counts, and the same unknown word.
  bool operator==(const vocabulary& other) const {
    return words_ == other.words_ && counts_ == other.counts_ && unknown_ == other.unknown_;
  }

  /// The vocabulary as lines: a title, the unknown word, the number of words, then each
  /// word with a tab and its count, in the order of ids, then a digest of all these lines.
  std::string to_text() const {
    std::string text = std::string(title) + "\nunknown" +
                       (unknown_ ? " " + words_[static_cast<std::size_t>(*unknown_)] : std::string()) +
                       "\nwords " + std::to_string(size()) + "\n";
    for (std::size_t i = 0; i < words_.size(); ++i) {
      text += words_[i];
      text += '\t';
      text += std::to_string(counts_[i]);
      text += '\n';
    }
    return text + digest_line(text) + "\n";
  }

  /// The inverse of to_text(). `name`: used in error messages. Throws io_error, with the
  /// line, for text that to_text does not write: another title, a duplicate or missing word,
  /// a count that is no number, too many or too few lines, a digest that does not match.
  static vocabulary from_text(std::string_view text, const std::string& name) {
    return parse({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()}, name);
  }

  /// Writes to_text() to a file, completely or not at all. Throws io_error.
  void save(const std::string& path) const {
    const std::string text = to_text();
    write_file_atomically(path, {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
  }

  /// Reads a file from save(), plain or gzip. Throws io_error as from_text and read_plain_or_gzip.
  /// `limit` bounds the file and its decompressed size, in bytes.
  /// \code
  ///   words.save("words.txt");
  ///   const vocabulary again = vocabulary::load("words.txt");  // again == words
  /// \endcode
  static vocabulary load(const std::string& path, std::uint64_t limit = default_text_limit) {
    return parse(read_plain_or_gzip(path, limit), path);
  }

 private:
  static constexpr std::string_view title = "pufferfish vocabulary 1";
  static constexpr index_t largest = std::numeric_limits<std::int32_t>::max();

  /// Returns false if the word exists already.
  bool insert(const std::string& word, std::int64_t count) {
    if (!index_of_.emplace(word, static_cast<std::int32_t>(words_.size())).second) return false;
    words_.push_back(word);
    counts_.push_back(count);
    return true;
  }

  std::size_t checked(std::int32_t id) const {
    if (id < 0 || id >= size()) {
      detail::throw_error<value_error>({"vocabulary: id ", id, " is not in 0 .. ", size() - 1});
    }
    return static_cast<std::size_t>(id);
  }

  static std::string digest_line(std::string_view text) { return "digest " + std::to_string(digest(text)); }

  [[noreturn]] static void fail(const std::string& name, std::size_t line, const std::string& what) {
    detail::throw_error<io_error>({name, ": line ", line, " of the vocabulary ", what});
  }

  /// The rest of a line after `key` and a space.
  static std::string_view field(const std::vector<std::string>& lines, std::size_t at, std::string_view key,
                                const std::string& name) {
    const std::string_view line = lines[at];
    if (line == key) return {};
    if (line.substr(0, key.size()) != key || line[key.size()] != ' ') {
      fail(name, at + 1, "does not begin with '" + std::string(key) + " '");
    }
    return line.substr(key.size() + 1);
  }

  static std::optional<std::int64_t> number(std::string_view text) {
    std::int64_t value = 0;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (problem != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
    return value;
  }

  // Checks title, number of lines, every line, and the digest. Throws io_error as from_text.
  static vocabulary parse(std::span<const std::uint8_t> bytes, const std::string& name) {
    constexpr std::size_t head = 3;
    std::vector<std::string> lines = parse_lines(bytes, name);
    if (lines.size() < head + 1 || lines[0] != title) {
      detail::throw_error<io_error>({name, ": is not a vocabulary: it does not begin with '", title, "'"});
    }
    const std::optional<std::int64_t> words = number(field(lines, 2, "words", name));
    if (!words || *words > largest || static_cast<std::size_t>(*words) != lines.size() - head - 1) {
      fail(name, head,
           "says " + detail::quote_name(lines[2]) + ", the file has " +
               std::to_string(lines.size() - head - 1) + " lines of words");
    }
    vocabulary result;
    std::string whole;
    for (std::size_t i = 0; i + 1 < lines.size(); ++i) {
      if (i >= head) result.parse_word(lines[i], i + 1, name);
      whole += lines[i];
      whole += '\n';
    }
    if (lines.back() != digest_line(whole)) {
      fail(name, lines.size(), "is not the digest of those before it: the file was changed or cut");
    }
    const std::string_view unknown = field(lines, 1, "unknown", name);
    if (!unknown.empty()) result.unknown_ = result.find(unknown);
    if (!unknown.empty() && !result.unknown_) {
      fail(name, 2, "names " + detail::quote_name(unknown) + ", which is no word of it");
    }
    return result;
  }

  // Adds the word of a line "word<tab>count". Throws io_error, with the line, for another line or a known
  // word.
  void parse_word(std::string_view line, std::size_t number_of_line, const std::string& name) {
    const std::size_t tab = std::min(line.find('\t'), line.size());
    const std::string_view word = line.substr(0, tab);
    const std::optional<std::int64_t> count = number(line.substr(std::min(tab + 1, line.size())));
    if (!count || !detail::is_word(word)) fail(name, number_of_line, "is not a word, a tab and a count");
    if (!insert(std::string(word), *count)) {
      fail(name, number_of_line, "has the word " + detail::quote_name(word) + " a second time");
    }
  }

  std::vector<std::string> words_;
  std::vector<std::int64_t> counts_;
  detail::text_map<std::int32_t> index_of_;
  std::optional<std::int32_t> unknown_;
};

PUFFERFISH_NAMESPACE_END
