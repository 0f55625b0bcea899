// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Sentence pairs for translation: two files whose lines correspond
/// to each other, a joint vocabulary of both languages, and ids.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/io/sentence_pairs.hpp>

#include "library.hpp"
#include "lines.hpp"
#include "tokenizer.hpp"
#include "vocabulary.hpp"

namespace examples {

using pufferfish::sentence_pairs;

/// Corresponding lines: line i of `target` translates line i of `source`.
struct parallel_text {
  std::vector<std::string> source, target;
};

/// Reads two text files, plain or gzip. Throws io_error as read_lines, and for unequal numbers of lines (both
/// are named).
inline parallel_text read_parallel_text(const std::string& source, const std::string& target) {
  parallel_text text{read_lines(source), read_lines(target)};
  if (text.source.size() != text.target.size()) {
    detail::throw_error<io_error>({source, " has ", text.source.size(), " lines, ", target, " has ",
                                   text.target.size(), ": they do not belong together"});
  }
  return text;
}

/// Replaces each line by its tokens, separated by one space. Not needed for text that is tokenised already.
/// Throws value_error for a line that is not UTF-8; the lines before it are then tokens already.
inline void tokenize(parallel_text& text, const tokenizer& source, const tokenizer& target) {
  for (std::string& line : text.source) line = source.line(line);
  for (std::string& line : text.target) line = target.line(line);
}

/// The special words of translation and their ids in a joint_vocabulary: the defaults of
/// pufferfish::special_tokens, and one for unknown words.
struct translation_tokens {
  static constexpr std::int32_t unknown = 0, padding = 1, begin = 2, end = 3;
};

/// One vocabulary for both languages of a tokenised text: `<unk>`, `<pad>`, `<s>`, `</s>`, then words that
/// occur `minimum_count` times in one language (as the paper's code does: the union of two vocabularies).
/// `maximum_size` includes the special words; 0: no limit. Throws value_error as vocabulary does.
inline vocabulary joint_vocabulary(const parallel_text& text, std::int64_t minimum_count = 3,
                                   index_t maximum_size = 0) {
  vocabulary_options options;
  options.special = {"<unk>", "<pad>", "<s>", "</s>"};
  options.maximum_size = maximum_size;
  word_counts counts[2];
  for (const std::string& line : text.source) {
    for (const std::string_view word : split_words(line)) counts[0].add(word);
  }
  for (const std::string& line : text.target) {
    for (const std::string_view word : split_words(line)) counts[1].add(word);
  }
  word_counts kept;
  for (const int side : {0, 1}) {
    for (const auto& [word, count] : counts[side].sorted()) {
      const std::int64_t other = counts[1 - side].count(word);
      const bool often = std::max(count, other) >= minimum_count;
      // A special word in the text is counted as unknown: `</s>` in the text, say, is no end of a sentence.
      const bool special =
          std::find(options.special.begin(), options.special.end(), word) != options.special.end();
      kept.add(often && !special ? std::string_view(word) : unknown_word, count);
    }
  }
  return vocabulary(kept, options);
}

/// Treatment of pairs that are too long, or empty on one side.
enum class unfit_pairs {
  drop,  ///< they are left out: for training and validation
  keep   ///< long ones are cut, empty ones stay: for test sets, where every line is scored
};

/// The ids of one tokenised line. Words without an id, and
/// special words that occur in the text, become `<unk>`.
inline std::vector<std::int32_t> encode_sentence(std::string_view line, const vocabulary& words) {
  std::vector<std::int32_t> ids;
  for (const std::string_view word : split_words(line)) {
    const std::int32_t id = words.id(word);
    ids.push_back(id > translation_tokens::end ? id : translation_tokens::unknown);
  }
  return ids;
}

/// The words of ids up to the first `</s>`, without special ones other than `<unk>`, as
/// input of detokenize. Throws value_error for ids that the vocabulary does not have.
inline std::vector<std::string> decode_sentence(std::span<const std::int32_t> ids, const vocabulary& words) {
  std::vector<std::string> result;
  for (const std::int32_t id : ids) {
    if (id == translation_tokens::end) break;
    if (id != translation_tokens::padding && id != translation_tokens::begin)
      result.push_back(words.word(id));
  }
  return result;
}

/// The pairs of a tokenised text. `max_length`: most words on either side. Throws
/// value_error for a max_length below 1, a vocabulary that does not begin like that
/// of joint_vocabulary, and a text whose sides have different numbers of lines.
/// With unfit_pairs::keep there is one pair for each line.
/// \code
///   parallel_text text = read_parallel_text("train.en", "train.de");
///   tokenize(text, tokenizer({.of = language::english}), tokenizer({.of = language::german}));
///   const vocabulary words = joint_vocabulary(text);
///   const sentence_pairs pairs = encode_pairs(text, words);
/// \endcode
inline sentence_pairs encode_pairs(const parallel_text& text, const vocabulary& words,
                                   index_t max_length = 100, unfit_pairs unfit = unfit_pairs::drop) {
  if (max_length < 1) detail::throw_error<value_error>({"encode_pairs: a length of at most ", max_length});
  if (text.source.size() != text.target.size()) {
    detail::throw_error<value_error>(
        {"encode_pairs: ", text.source.size(), " lines and ", text.target.size()});
  }
  if (words.find("<unk>") != translation_tokens::unknown ||
      words.find("<pad>") != translation_tokens::padding || words.find("<s>") != translation_tokens::begin ||
      words.find("</s>") != translation_tokens::end) {
    detail::throw_error<value_error>(
        {"encode_pairs: a vocabulary for translation begins with <unk>, <pad>, <s>, </s>"});
  }
  sentence_pairs result;
  const auto most = static_cast<std::size_t>(max_length);
  for (std::size_t i = 0; i < text.source.size(); ++i) {
    std::vector<std::int32_t> source = encode_sentence(text.source[i], words);
    std::vector<std::int32_t> target = encode_sentence(text.target[i], words);
    const bool empty = source.empty() || target.empty();
    const bool long_one = source.size() > most || target.size() > most;
    if ((empty || long_one) && unfit == unfit_pairs::drop) continue;
    source.resize(std::min(source.size(), most));
    target.resize(std::min(target.size(), most));
    result.source.push_back(source);
    result.target.push_back(target);
  }
  return result;
}

}  // namespace examples
