// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Text for language models as token ids, by words (WikiText) or by bytes (any file), in a training, a
/// validation and a test part.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/io/dataset.hpp>
#include <pufferfish/io/gzip.hpp>

#include "library.hpp"
#include "lines.hpp"
#include "vocabulary.hpp"

namespace examples {

/// The unit of a token: a word between spaces, or a byte.
enum class text_unit { words, bytes };

/// The word after each line, if tokens are words.
inline constexpr std::string_view end_of_line = "<eos>";

namespace detail {

/// Calls f(word) for every word of the lines, and f(end_of_line) after each line.
template <class F>
void for_each_token(std::span<const std::string> lines, F&& f) {
  for (const std::string& line : lines) {
    for (const std::string_view word : split_words(line)) f(word);
    f(end_of_line);
  }
}

}  // namespace detail

/// Converts text to token ids and back.
/// \code
///   const text_codec bytes;         // ids 0 .. 255
///   const text_codec words(known);  // a vocabulary; lines end with <eos>
///   const std::vector<std::int32_t> ids = words.encode("the cat\n");
///   const std::string text = words.decode(ids);
/// \endcode
class text_codec {
 public:
  /// One token per byte, ids 0 .. 255.
  text_codec() = default;

  /// One token per word, and one token end_of_line after each line. Throws value_error if the vocabulary does
  /// not contain end_of_line.
  explicit text_codec(vocabulary words) : unit_(text_unit::words), words_(std::move(words)) {
    if (!words_.find(end_of_line)) {
      detail::throw_error<value_error>({"text_codec: the end of a line, ", detail::quote_name(end_of_line),
                                        ", is no word of the vocabulary"});
    }
  }

  text_unit unit() const { return unit_; }
  /// The vocabulary; empty if tokens are bytes.
  const vocabulary& words() const { return words_; }

  /// Number of ids.
  index_t size() const { return unit_ == text_unit::bytes ? 256 : words_.size(); }

  /// The ids of a text. If tokens are words, each line ends with end_of_line. Throws io_error for words that
  /// are not UTF-8.
  std::vector<std::int32_t> encode(std::string_view text) const {
    const std::span bytes(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
    if (unit_ == text_unit::bytes) return {bytes.begin(), bytes.end()};
    return encode_lines(parse_lines(bytes, "text"));
  }

  /// The ids of lines that are given without line ends, if tokens are words. The encoding of the lines is not
  /// checked.
  std::vector<std::int32_t> encode_lines(std::span<const std::string> lines) const {
    std::vector<std::int32_t> ids;
    detail::for_each_token(lines, [&](std::string_view word) { ids.push_back(words_.id(word)); });
    return ids;
  }

  /// The text of ids: words separated by spaces, a line end for
  /// end_of_line. Throws value_error for an id outside 0 .. size() - 1.
  /// For bytes the exact inverse of encode. For words, blanks between words become one space.
  std::string decode(std::span<const std::int32_t> ids) const {
    std::string text;
    for (const std::int32_t id : ids) {
      if (unit_ == text_unit::words) {
        append_word(text, words_.word(id));
      } else if (id < 0 || id > 255) {
        detail::throw_error<value_error>({"text_codec: ", id, " is no byte"});
      } else {
        text += static_cast<char>(static_cast<std::uint8_t>(id));
      }
    }
    return text;
  }

 private:
  /// Appends a word with a space before it, or a line end for end_of_line.
  static void append_word(std::string& text, const std::string& word) {
    if (word == end_of_line) {
      text += '\n';
      return;
    }
    if (!text.empty() && text.back() != '\n') text += ' ';
    text += word;
  }

  text_unit unit_ = text_unit::bytes;
  vocabulary words_;
};

/// The parts of a corpus as ids of one codec.
/// For byte tokens the codec is text_codec().
struct language_corpus {
  text_codec codec;
  std::vector<std::int32_t> train, valid, test;
};

/// Options of load_corpus, load_wikitext and load_text.
struct corpus_options {
  text_unit unit = text_unit::words;
  vocabulary_options words;  ///< selects the words of the training part that get ids
};

/// Shares of the tokens of a single text file that validation and test get: its last tokens.
struct corpus_shares {
  double valid = 0.05;
  double test = 0.05;
};

namespace detail {

/// The vocabulary of a training part. The word for the end of a line always has an id.
inline vocabulary corpus_words(const word_counts& counts, const corpus_options& options,
                               const std::string& name) {
  if (counts.total() == 0) throw_error<io_error>({name, ": no tokens"});
  vocabulary_options words = options.words;
  if (std::find(words.special.begin(), words.special.end(), end_of_line) == words.special.end()) {
    words.special.emplace_back(end_of_line);
  }
  return vocabulary(counts, words);
}

inline std::vector<std::int32_t> read_byte_tokens(const std::string& path) {
  const std::vector<std::uint8_t> bytes = pufferfish::read_plain_or_gzip(path, default_text_limit);
  return {bytes.begin(), bytes.end()};
}

}  // namespace detail

/// Loads three files, plain or gzip. The vocabulary is that of the training part. Throws io_error for
/// files that cannot be read or, if tokens are words, are not UTF-8, and for a training part without
/// tokens. Memory: the lines of a file, as strings, and the ids of all parts.
/// \code
///   corpus_options options;
///   options.words.maximum_size = 10000;
///   const language_corpus corpus = load_corpus("train.txt", "valid.txt", "test.txt", options);
/// \endcode
inline language_corpus load_corpus(const std::string& train, const std::string& valid,
                                   const std::string& test, const corpus_options& options = {}) {
  language_corpus result;
  if (options.unit == text_unit::bytes) {
    result.train = detail::read_byte_tokens(train);
    result.valid = detail::read_byte_tokens(valid);
    result.test = detail::read_byte_tokens(test);
    if (result.train.empty()) detail::throw_error<io_error>({train, ": no tokens"});
    return result;
  }
  const std::vector<std::string> lines = read_lines(train);
  word_counts counts;
  detail::for_each_token(lines, [&](std::string_view word) { counts.add(word); });
  result.codec = text_codec(detail::corpus_words(counts, options, train));
  result.train = result.codec.encode_lines(lines);
  result.valid = result.codec.encode_lines(read_lines(valid));
  result.test = result.codec.encode_lines(read_lines(test));
  return result;
}

/// Loads a folder with wiki.{train,valid,test}.tokens (WikiText-2 and -103) or {train,valid,test}.txt, each
/// plain or with ".gz". Throws as load_corpus, and io_error for a missing file.
/// \code
///   const language_corpus corpus = load_wikitext("data/wikitext-2");
///   std::printf("%td words, %zu tokens\n", corpus.codec.size(), corpus.train.size());
/// \endcode
inline language_corpus load_wikitext(const std::string& folder, const corpus_options& options = {}) {
  const std::string tokens = folder + "/wiki.train.tokens";
  const bool wiki =
      pufferfish::detail::is_regular_file(tokens) || pufferfish::detail::is_regular_file(tokens + ".gz");
  const auto path = [&](const std::string& part) {
    return pufferfish::detail::find_plain_or_gzip(folder +
                                                  (wiki ? "/wiki." + part + ".tokens" : "/" + part + ".txt"));
  };
  return load_corpus(path("train"), path("valid"), path("test"), options);
}

/// Loads one file, plain or gzip, and cuts its tokens: first the training part, then
/// validation, then test (each share rounded down to whole tokens). Throws as load_corpus,
/// and value_error for shares that are negative or leave no tokens for training.
/// With n tokens, test has the last floor(test n), validation the floor(valid n) before them. The vocabulary
/// is that of the training part.
/// \code
///   const language_corpus corpus = load_text("book.txt", {.valid = 0.1, .test = 0.2});
/// \endcode
inline language_corpus load_text(const std::string& path, const corpus_shares& shares = {},
                                 const corpus_options& options = {}) {
  if (!(shares.valid >= 0.0 && shares.test >= 0.0 && shares.valid + shares.test < 1.0)) {
    detail::throw_error<value_error>(
        {"load_text: shares of ", shares.valid, " for validation and ", shares.test, " for test"});
  }
  const auto part = [](double share, std::size_t tokens) {
    return static_cast<std::size_t>(share * static_cast<double>(tokens));
  };
  language_corpus result;
  std::vector<std::int32_t> ids;
  if (options.unit == text_unit::bytes) {
    ids = detail::read_byte_tokens(path);
  } else {
    const std::vector<std::string> lines = read_lines(path);
    std::size_t tokens = 0;
    detail::for_each_token(lines, [&](std::string_view) { ++tokens; });
    std::size_t left = tokens - part(shares.valid, tokens) - part(shares.test, tokens);
    word_counts counts;
    detail::for_each_token(lines, [&](std::string_view word) {
      if (left == 0) return;
      counts.add(word);
      --left;
    });
    result.codec = text_codec(detail::corpus_words(counts, options, path));
    ids = result.codec.encode_lines(lines);
  }
  if (ids.empty()) detail::throw_error<io_error>({path, ": no tokens"});
  const auto test = ids.end() - static_cast<std::ptrdiff_t>(part(shares.test, ids.size()));
  const auto valid = test - static_cast<std::ptrdiff_t>(part(shares.valid, ids.size()));
  result.valid.assign(valid, test);
  result.test.assign(test, ids.end());
  ids.erase(valid, ids.end());
  result.train = std::move(ids);
  return result;
}

}  // namespace examples
