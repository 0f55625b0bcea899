// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `tokenizer`: splits English and German text into words, numbers and punctuation
/// marks, by rules. detokenizer.hpp joins the tokens again, for display and scoring.
///
/// The rules. Text is cut at white space; each piece is split into tokens from left to right:
/// - Words: letters with their marks, digits, '_', soft hyphens; also apostrophes, '&' and periods between
///   letters, as in "o'clock", "R&B", "U.S.". Numbers keep '.', ',', ':' and '/' between digits ("1,000.5").
/// - Hyphens and slashes between words, and dashes between numbers, are joints: "T-shirt" becomes
///   "T @-@ shirt", so that the detokenizer can tell them from dashes. A hyphen at the end of a word stays
///   ("Damen- und Herrenrad").
/// - English and German clitics are split off: "n't", "'s", "'re", "'ve", "'ll", "'d", "'m" (also U+2019).
/// - A period stays with abbreviations ("z.B.", "Dr."), with initials ("J. Smith") and, in German, with
///   numbers of one or two digits before a word ("am 3. Mai"). Else it is a token; several are one token.
/// - Web and mail addresses, "#tags" and "@names" are words. Any other character is a token, together with
///   its marks.
/// Only white space is lost, and tokens joined by spaces are split into the same tokens again.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lines.hpp"
#include "unicode.hpp"

namespace examples {

/// Language of a text, which decides on its abbreviations and on periods after numbers.
enum class language : std::uint8_t { english, german };

struct tokenizer_options {
  language of = language::english;
  bool lower_case = false;  ///< convert tokens to lower case; the rules still use the original case
};

namespace detail {

inline bool is_quote(char32_t c) { return c == '\'' || c == 0x2019; }
inline bool is_hyphen(char32_t c) { return c == '-' || c == '/' || c == 0x2010; }
inline bool is_digit(char32_t c) { return c >= '0' && c <= '9'; }

/// True for letters, marks, numbers, '_' and the soft hyphen.
inline bool is_word_part(char32_t c) {
  const char_class of = class_of(c);
  return of == char_class::letter || of == char_class::mark || of == char_class::number || c == '_' ||
         c == 0xad;
}

/// True for a known abbreviation. `word`: in lower case, without its last period.
inline bool is_abbreviation(language of, std::string_view word) {
  static constexpr std::array<std::string_view, 28> english{
      "mr", "mrs", "ms",  "dr",   "prof", "st",  "mt",  "vs",   "etc", "e.g", "i.e", "a.m", "p.m", "jr",
      "sr", "inc", "ltd", "corp", "gen",  "col", "sgt", "capt", "lt",  "rev", "hon", "gov", "sen", "approx"};
  static constexpr std::array<std::string_view, 32> german{
      "bzw",   "ca",  "dr",   "prof", "hr",  "fr",  "st",   "str", "nr",  "usw", "etc",
      "evtl",  "ggf", "inkl", "exkl", "z.b", "d.h", "u.a",  "o.ä", "u.ä", "s.o", "s.u",
      "i.d.r", "v.a", "z.t",  "bspw", "sog", "vgl", "mind", "max", "geb", "gest"};
  const std::span<const std::string_view> known =
      of == language::english ? std::span<const std::string_view>(english) : german;
  return std::find(known.begin(), known.end(), word) != known.end();
}

/// Splits a chunk, which is text without white space, into tokens.
class chunk_scanner {
 public:
  /// Stands for the end of the text, as no code point does.
  static constexpr char32_t nothing = 0x110000;

  /// `next`: the first code point after the white space after the chunk; `nothing` at the end of the text.
  chunk_scanner(std::u32string_view text, char32_t next, const tokenizer_options& options,
                std::vector<std::u32string>& tokens)
      : text_(text), next_(next), options_(options), tokens_(tokens) {}

  /// Appends the chunk's tokens. A chunk that is a joint ("@-@") stays whole.
  void run() {
    if (is_joint(text_)) {
      put(0, text_.size());
      return;
    }
    while (at_ < text_.size()) {
      if (starts_address()) {
        take_address();
      } else if (starts_word()) {
        take_word();
      } else {
        take_mark();
      }
    }
  }

  /// True for "@-@" and the like, the form of joint tokens.
  static bool is_joint(std::u32string_view token) {
    return token.size() == 3 && token[0] == '@' && token[2] == '@' &&
           class_of(token[1]) == char_class::punctuation;
  }

 private:
  char32_t peek(std::size_t i) const { return i < text_.size() ? text_[i] : nothing; }
  bool word_part(std::size_t i) const { return i < text_.size() && is_word_part(text_[i]); }
  bool letter(std::size_t i) const { return i < text_.size() && class_of(text_[i]) == char_class::letter; }
  bool digit(std::size_t i) const { return is_digit(peek(i)); }

  void put(std::size_t begin, std::size_t end) {
    if (begin < end) tokens_.emplace_back(text_.substr(begin, end - begin));
  }

  /// True for "www.", a scheme, a mailbox, and for "#" or "@" before a name.
  bool starts_address() {
    if ((text_[at_] == '#' || text_[at_] == '@') && letter(at_ + 1)) return true;
    // Before `looked_`, skip_names() ends where it ended for an earlier letter, which began no address.
    if (!letter(at_) || at_ < looked_) return false;
    if (text_.substr(at_, 4) == U"www." && letter(at_ + 4)) return true;
    looked_ = skip_names(at_);
    if (text_.substr(looked_, 3) == U"://" && word_part(looked_ + 3)) return true;
    if (peek(looked_) != '@' || !word_part(looked_ + 1)) return false;
    const std::size_t end = skip_names(looked_ + 1);
    return text_.substr(looked_, end - looked_).find('.') != std::u32string_view::npos;
  }

  /// The position after words with periods and hyphens between them.
  std::size_t skip_names(std::size_t i) const {
    while (word_part(i) || ((peek(i) == '.' || peek(i) == '-') && word_part(i + 1))) ++i;
    return i;
  }

  /// Takes a name after "#" or "@", or else the rest of the chunk without the punctuation at its end.
  void take_address() {
    std::size_t end = at_ + 1;
    if (text_[at_] == '#' || text_[at_] == '@') {
      while (word_part(end)) ++end;
    } else {
      end = text_.size();
      while (!word_part(end - 1) && text_[end - 1] != '/') --end;
    }
    put(at_, end);
    at_ = end;
  }

  /// True for a word, "-5", ".5", or a clitic that is the whole chunk.
  bool starts_word() const {
    if (word_part(at_)) return true;
    if (text_[at_] == '-') return at_ == 0 && word_part(1);
    if (text_[at_] == '.') return digit(at_ + 1) && (at_ == 0 || text_[at_ - 1] != '.');
    return is_quote(text_[at_]) && at_ == 0 && is_clitic(1, text_.size());
  }

  /// True if text_[i] belongs to the word text_[begin, i) and connects it with what follows.
  bool holds_together(std::size_t begin, std::size_t i) const {
    const char32_t c = peek(i);
    if (digit(i + 1) && i > begin && digit(i - 1)) return c == '.' || c == ',' || c == ':' || c == '/';
    if (!word_part(i + 1) || i == begin) return false;
    if (is_quote(c)) return letter(i + 1);
    if (c == '&') return letter(i - 1) && letter(i + 1);
    return c == '.' && dotted_letter(begin, i);
  }

  /// As in "U.S." and "z.B.": the letter before the period is alone, and so is the letter after it.
  bool dotted_letter(std::size_t begin, std::size_t i) const {
    const bool alone = letter(i - 1) && (i - 1 == begin || text_[i - 2] == '.');
    return alone && letter(i + 1) && !word_part(i + 2);
  }

  // Takes a word with a period or hyphen that belongs to it, or else without its clitics, and the joint after
  // it.
  void take_word() {
    const std::size_t begin = at_;
    std::size_t end = at_ + (word_part(at_) ? 0 : 1);
    while (word_part(end) || holds_together(begin, end)) ++end;
    at_ = end;
    if (period_stays(begin, end) || hyphen_stays(end)) {
      put(begin, ++at_);
    } else {
      put_with_clitics(begin, end);
    }
    take_joint();
  }

  bool hyphen_stays(std::size_t end) const {
    return peek(end) == '-' && letter(end - 1) && peek(end + 1) != '-' && !word_part(end + 1);
  }

  // Puts the word and its clitics, which are found from the end, in the order of the text.
  void put_with_clitics(std::size_t begin, std::size_t end) {
    const std::size_t place = tokens_.size();
    for (std::size_t cut = find_clitic(begin, end); cut > begin; cut = find_clitic(begin, end)) {
      put(cut, end);
      end = cut;
    }
    put(begin, end);
    std::reverse(tokens_.begin() + static_cast<std::ptrdiff_t>(place), tokens_.end());
  }

  /// A hyphen or slash between the last token and a word, without white
  /// space, becomes a token of its own; so does a dash between numbers.
  void take_joint() {
    const char32_t c = peek(at_);
    const bool dash = c == 0x2013 && digit(at_ - 1) && digit(at_ + 1);
    if ((!is_hyphen(c) && !dash) || !word_part(at_ + 1)) return;
    tokens_.push_back({U'@', c, U'@'});
    ++at_;
  }

  // Whether the period at `end` belongs to the word: initials, dotted letters, abbreviations, German
  // ordinals.
  bool period_stays(std::size_t begin, std::size_t end) const {
    if (peek(end) != '.' || peek(end + 1) == '.') return false;
    const std::u32string_view word = text_.substr(begin, end - begin);
    const bool last = end + 1 == text_.size() && next_ == nothing;
    if (word.size() == 1 && !last && is_upper_case(word[0])) return true;
    if (word.size() > 2 && word[word.size() - 2] == '.' && letter(end - 1)) return true;
    if (is_abbreviation(options_.of, to_lower(encode_utf8(word)))) return true;
    return options_.of == language::german && word.size() <= 2 && end + 1 == text_.size() &&
           std::all_of(word.begin(), word.end(), is_digit) && class_of(next_) == char_class::letter;
  }

  /// True if text_[begin, end) is a clitic without its apostrophe.
  bool is_clitic(std::size_t begin, std::size_t end) const {
    const char32_t first = lower_case(peek(begin));
    if (end == begin + 1) return first == 's' || first == 'd' || first == 'm';
    if (end != begin + 2) return false;
    const char32_t second = lower_case(peek(begin + 1));
    return second == 'e' ? first == 'r' || first == 'v' : first == 'l' && second == 'l';
  }

  /// The position of the clitic at the end of a word; `begin` if there is none.
  std::size_t find_clitic(std::size_t begin, std::size_t end) const {
    for (std::size_t length = 2; length <= 3 && begin + length < end; ++length) {
      if (is_quote(text_[end - length]) && is_clitic(end - length + 1, end)) return end - length;
    }
    const bool negation = end - begin > 3 && lower_case(text_[end - 1]) == 't' && is_quote(text_[end - 2]) &&
                          lower_case(text_[end - 3]) == 'n' && word_part(end - 4);
    return negation ? end - 3 : begin;
  }

  /// Takes one character with its marks; periods or hyphens in a row are one token.
  void take_mark() {
    const std::size_t begin = at_++;
    const char32_t c = text_[begin];
    if (c == '.' || c == '-') {
      while (peek(at_) == c) ++at_;
    }
    constexpr char32_t joiner = 0x200d;  // holds emoji together
    while (at_ < text_.size() &&
           (class_of(text_[at_]) == char_class::mark || text_[at_] == joiner || text_[at_ - 1] == joiner)) {
      ++at_;
    }
    put(begin, at_);
    if (c != '.' && !is_hyphen(c)) take_joint();
  }

  std::u32string_view text_;
  char32_t next_;
  const tokenizer_options& options_;
  std::vector<std::u32string>& tokens_;
  std::size_t at_ = 0;
  std::size_t looked_ = 0;  // no address starts at a letter before this
};

}  // namespace detail

/// Splits text into tokens by the rules at the top of this file. Holds options only.
/// Const members may be called by several threads at once.
/// \code
///   const tokenizer english;
///   english.line("Mr. Smith's T-shirt, isn't it?");  // "Mr. Smith 's T @-@ shirt , is n't it ?"
///   detokenize(english("Mr. Smith's T-shirt"), language::english);  // "Mr. Smith's T-shirt"
/// \endcode
class tokenizer {
 public:
  explicit tokenizer(const tokenizer_options& options = {}) : options_(options) {}

  const tokenizer_options& options() const { return options_; }

  /// The tokens of a text. Throws value_error, naming the byte, where it is not UTF-8.
  std::vector<std::string> operator()(std::string_view text) const {
    const std::u32string codes = decode_utf8(text);
    const auto blank = [&](std::size_t i) { return class_of(codes[i]) == char_class::space; };
    std::vector<std::u32string> found;
    std::size_t begin = 0;
    while (begin < codes.size() && blank(begin)) ++begin;
    while (begin < codes.size()) {
      std::size_t end = begin;
      while (end < codes.size() && !blank(end)) ++end;
      std::size_t next = end;
      while (next < codes.size() && blank(next)) ++next;
      detail::chunk_scanner(std::u32string_view(codes).substr(begin, end - begin),
                            next < codes.size() ? codes[next] : detail::chunk_scanner::nothing, options_,
                            found)
          .run();
      begin = next;
    }
    std::vector<std::string> tokens;
    tokens.reserve(found.size());
    for (const std::u32string& token : found) {
      tokens.push_back(options_.lower_case ? to_lower(encode_utf8(token)) : encode_utf8(token));
    }
    return tokens;
  }

  /// The tokens of a text, separated by one space. split_words splits the result into the same tokens.
  std::string line(std::string_view text) const {
    std::string result;
    for (const std::string& token : (*this)(text)) result += (result.empty() ? "" : " ") + token;
    return result;
  }

 private:
  tokenizer_options options_;
};

}  // namespace examples
