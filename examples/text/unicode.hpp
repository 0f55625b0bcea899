// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Code points: conversion from and to UTF-8, character classes, lower-case forms. Unicode 14.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "library.hpp"
#include "unicode_tables.hpp"

namespace examples {

/// Unicode's general categories by their first letter: L, M, N, P, S; white space (the property, and Z); C.
/// The values are those of the tables in unicode_tables.hpp.
enum class char_class : std::uint8_t { letter, mark, number, punctuation, symbol, space, control };

namespace detail {

/// The code point in `length` well-formed bytes (1 .. 4).
inline char32_t decode_code_point(const char* bytes, std::size_t length) {
  const auto first = static_cast<std::uint8_t>(bytes[0]);
  if (length == 1) return first;
  char32_t code = first & (0x7fU >> length);
  for (std::size_t i = 1; i < length; ++i) code = code << 6 | (static_cast<std::uint8_t>(bytes[i]) & 0x3fU);
  return code;
}

}  // namespace detail

/// The code points of UTF-8 text. Throws value_error, with the number of the byte, if it is not UTF-8.
/// The inverse of encode_utf8 for valid code points.
inline std::u32string decode_utf8(std::string_view text) {
  std::u32string result;
  result.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = detail::utf8_length(text, at);
    if (length == 0) detail::throw_error<value_error>({"text is not UTF-8 at its byte ", at});
    result += detail::decode_code_point(text.data() + at, length);
    at += length;
  }
  return result;
}

/// Appends a code point as UTF-8. Invalid ones (surrogates, above U+10FFFF) become U+FFFD.
inline void append_utf8(std::string& text, char32_t code) {
  if (code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) code = 0xfffd;
  const auto put = [&text](char32_t byte) { text += static_cast<char>(static_cast<std::uint8_t>(byte)); };
  if (code < 0x80) {
    put(code);
    return;
  }
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  put((0xff00U >> (more + 1) & 0xffU) | code >> (6 * more));
  for (int i = more - 1; i >= 0; --i) put(0x80U | (code >> (6 * i) & 0x3fU));
}

/// Code points as UTF-8.
inline std::string encode_utf8(std::u32string_view text) {
  std::string result;
  result.reserve(text.size());
  for (const char32_t code : text) append_utf8(result, code);
  return result;
}

/// The class of a code point; `control` for values that are no code points.
/// O(log n) in the number of runs of the table; so is lower_case.
inline char_class class_of(char32_t code) {
  if (code >= 'a' && code <= 'z') return char_class::letter;
  if (code > 0x10ffff) return char_class::control;
  const auto& runs = detail::unicode_class_runs;
  const auto after = std::upper_bound(runs.begin(), runs.end(), static_cast<std::uint32_t>(code) * 8 + 7);
  return static_cast<char_class>(*(after - 1) & 7U);
}

/// The lower-case form of one code point, itself if it has none (the simple mapping of Unicode).
inline char32_t lower_case(char32_t code) {
  if (code < 0x80) return code >= 'A' && code <= 'Z' ? code + 32 : code;
  const auto value = static_cast<std::int32_t>(code);
  const auto& runs = detail::lower_case_runs;
  const auto after = std::upper_bound(runs.begin(), runs.end(), value,
                                      [](std::int32_t v, const auto& run) { return v < run.first; });
  const detail::lower_case_run& run = *(after - 1);  // the first run begins at 'A', before `code`
  const bool inside = value <= run.last && (value - run.first) % run.stride == 0;
  return inside ? static_cast<char32_t>(value + run.distance) : code;
}

/// True if the code point has a lower-case form other than itself.
inline bool is_upper_case(char32_t code) { return code == 0x130 || lower_case(code) != code; }

namespace detail {

/// True for characters that do not end a word in the rule of the final sigma: marks, format characters,
/// and characters within words (Unicode's Case_Ignorable, except for rare modifier letters).
inline bool is_case_ignorable(char32_t code) {
  static constexpr std::u32string_view inside =
      U"'.:^`\u00a8\u00af\u00b4\u00b7\u00b8\u0387\u055f\u05f4\u2018\u2019\u2024\u2027\ufe13\ufe52\ufe55\uff07"
      U"\uff0e\uff1a";
  const char_class of = class_of(code);
  return of == char_class::mark || inside.find(code) != inside.npos ||
         (of == char_class::control && code >= 0xad);
}

}  // namespace detail

/// UTF-8 text in lower case, by Unicode's rules for all languages. Code points are converted one by one,
/// except that U+0130 becomes two, and a capital sigma at the end of a word becomes a final one (a letter
/// before it, none after it, ignoring marks and periods within words). Throws value_error as decode_utf8.
/// \code
///   to_lower("STRASSE \xc3\x84");  // "strasse \xc3\xa4"
/// \endcode
inline std::string to_lower(std::string_view text) {
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<std::uint8_t>(c) < 0x80; })) {
    std::string result(text);
    for (char& c : result) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
    return result;
  }
  const std::u32string codes = decode_utf8(text);
  const auto letter_beyond = [&codes](std::size_t from, std::size_t step) {
    std::size_t at = from + step;
    while (at < codes.size() && detail::is_case_ignorable(codes[at])) at += step;
    return at < codes.size() && class_of(codes[at]) == char_class::letter;
  };
  std::string result;
  result.reserve(text.size());
  for (std::size_t i = 0; i < codes.size(); ++i) {
    if (codes[i] == 0x130) {
      result += "i\xcc\x87";
    } else if (codes[i] == 0x3a3 && letter_beyond(i, static_cast<std::size_t>(-1)) && !letter_beyond(i, 1)) {
      append_utf8(result, 0x3c2);
    } else {
      append_utf8(result, lower_case(codes[i]));
    }
  }
  return result;
}

}  // namespace examples
