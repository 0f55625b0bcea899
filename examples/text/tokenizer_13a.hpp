// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The tokenisation for BLEU scores: "13a" of sacreBLEU, the same as in NIST's script mteval-v13a. Source:
/// M. Post, "A call for clarity in reporting BLEU scores", WMT 2018, and the sacrebleu package, version 2.6.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "unicode.hpp"

namespace examples {

namespace detail {

/// Replaces every occurrence, from left to right; replacements are not searched again. `from` is not empty.
inline void replace_all(std::string& text, std::string_view from, std::string_view to) {
  if (text.find(from) == std::string::npos) return;
  std::string result;
  std::size_t at = 0;
  for (std::size_t hit = text.find(from); hit != std::string::npos; hit = text.find(from, at)) {
    result.append(text, at, hit - at).append(to);
    at = hit + from.size();
  }
  text = result.append(text, at);
}

/// True if white space starts at text[at]. `length` becomes the
/// number of bytes of the code point there, 1 if it is not UTF-8.
inline bool blank_at(std::string_view text, std::size_t at, std::size_t& length) {
  length = utf8_length(text, at);
  if (length == 0) {
    length = 1;
    return false;
  }
  return class_of(decode_code_point(text.data() + at, length)) == char_class::space;
}

/// The words between white space of any kind (not just spaces and tabs). Views into `text`.
inline std::vector<std::string_view> split_blank(std::string_view text) {
  std::vector<std::string_view> words;
  std::size_t length = 0, begin = 0;
  for (std::size_t at = 0; at < text.size(); at += length) {
    if (!blank_at(text, at, length)) continue;
    if (at > begin) words.push_back(text.substr(begin, at - begin));
    begin = at + length;
  }
  if (begin < text.size()) words.push_back(text.substr(begin));
  return words;
}

/// The text without white space at its end.
inline std::string_view without_end_blanks(std::string_view text) {
  std::size_t end = 0, length = 0;
  for (std::size_t at = 0; at < text.size(); at += length) {
    if (!blank_at(text, at, length)) end = at + length;
  }
  return text.substr(0, end);
}

// The four substitutions of 13a. Each runs over the whole text before the next one, and matches
// do not overlap. They search for ASCII characters only, so they can process UTF-8 byte by byte.

/// Adds spaces around printable ASCII characters, except letters, digits, apostrophe, comma, hyphen, period.
inline std::string separate_punctuation(std::string_view text) {
  std::string result;
  result.reserve(2 * text.size());
  for (const char c : text) {
    const bool match = (c >= '{' && c <= '~') || (c >= '[' && c <= '`') || (c >= ' ' && c <= '&') ||
                       (c >= '(' && c <= '+') || (c >= ':' && c <= '@') || c == '/';
    if (match) result += ' ';
    result += c;
    if (match) result += ' ';
  }
  return result;
}

inline bool ascii_digit(char c) { return c >= '0' && c <= '9'; }

/// Replaces each match of two characters, `first` and then `second`, by before + first + between + second +
/// after.
template <class First, class Second>
std::string separate_pairs(std::string_view text, First&& first, Second&& second, const char* before,
                           const char* between, const char* after) {
  std::string result;
  result.reserve(2 * text.size());
  std::size_t at = 0;
  while (at < text.size()) {
    if (at + 1 < text.size() && first(text[at]) && second(text[at + 1])) {
      result.append(before).append(1, text[at]).append(between).append(1, text[at + 1]).append(after);
      at += 2;
    } else {
      result += text[at++];
    }
  }
  return result;
}

}  // namespace detail

/// The tokens of a segment under "13a", separated by one space. The caller must remove white
/// space at the end of the segment (corpus BLEU does so). Bytes that are not UTF-8 are kept.
/// Never throws for any bytes.
/// \code
///   tokenize_13a("Hello, world-wide \"1,000.5\"!");  // Hello , world-wide " 1,000.5 " !
/// \endcode
inline std::string tokenize_13a(std::string_view segment) {
  std::string text(segment);
  detail::replace_all(text, "<skipped>", "");
  detail::replace_all(text, "-\n", "");
  detail::replace_all(text, "\n", " ");
  detail::replace_all(text, "&quot;", "\"");
  detail::replace_all(text, "&amp;", "&");
  detail::replace_all(text, "&lt;", "<");
  detail::replace_all(text, "&gt;", ">");
  text.insert(text.begin(), ' ');
  text += ' ';
  const auto digit = [](char c) { return detail::ascii_digit(c); };
  const auto no_digit = [](char c) { return !detail::ascii_digit(c); };
  const auto stop = [](char c) { return c == '.' || c == ','; };
  text = detail::separate_punctuation(text);
  text = detail::separate_pairs(text, no_digit, stop, "", " ", " ");
  text = detail::separate_pairs(text, stop, no_digit, " ", " ", "");
  text = detail::separate_pairs(
      text, digit, [](char c) { return c == '-'; }, "", " ", " ");
  std::string result;
  for (const std::string_view word : detail::split_blank(text)) {
    if (!result.empty()) result += ' ';
    result += word;
  }
  return result;
}

}  // namespace examples
