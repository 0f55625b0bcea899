// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Joins tokens into ordinary text: the inverse of `tokenizer`, as far as there is one.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "tokenizer.hpp"

namespace examples {

namespace detail {

/// Joins tokens from left to right, and tracks which quotation marks are open.
class token_joiner {
 public:
  token_joiner(std::span<const std::string> tokens, language of) : tokens_(tokens), language_(of) {}

  std::string run() {
    for (std::size_t i = 0; i < tokens_.size(); ++i) add(i);
    return std::move(text_);
  }

 private:
  // Appends token i, with a space before it unless one of the two tokens attaches to the other.
  void add(std::size_t i) {
    const std::u32string token = decode_utf8(tokens_[i]);
    if (token.empty()) return;
    if (chunk_scanner::is_joint(token)) {
      append_utf8(text_, token[1]);
      glued_ = true;
      return;
    }
    const bool quote = token.size() == 1 && (token[0] == '"' || token[0] == '\'');
    const bool closes = quote ? closes_quote(i, token[0]) : attaches_left(token);
    const bool opens = quote ? !closes : attaches_right(i, token);
    if (!text_.empty() && !glued_ && !closes) text_ += ' ';
    text_ += tokens_[i];
    glued_ = opens;
  }

  /// Straight quotation marks are opening and closing ones alternately. An apostrophe without
  /// an open mark, and without another apostrophe after it, ends a plural ("the dogs' owner").
  bool closes_quote(std::size_t i, char32_t mark) {
    bool& open = mark == '"' ? double_open_ : single_open_;
    if (mark == '\'' && !open && i > 0) {
      bool alone = true;
      for (std::size_t k = i + 1; k < tokens_.size(); ++k) alone = alone && tokens_[k] != "'";
      if (alone) return true;
    }
    open = !open;
    return !open;
  }

  // Whether a token that is no straight quotation mark has no space before it: punctuation, closing marks,
  // clitics.
  bool attaches_left(const std::u32string& token) const {
    if (is_quote(token[0])) return token.size() > 1 || token[0] == 0x2019;  // clitics; a closing mark
    if (token.size() == 3 && is_quote(token[1]) && lower_case(token[0]) == 'n' && lower_case(token[2]) == 't')
      return true;
    if (token[0] == '.') return token.find_first_not_of(U'.') == std::u32string::npos;
    if (token.size() > 1) return false;
    static constexpr std::u32string_view both = U",;:!?)]}%\u2026\u203a";
    static constexpr std::u32string_view english = U"\u201d\u00bb", german = U"\u201c\u2018\u201d\u00ab";
    return both.find(token[0]) != both.npos ||
           (language_ == language::english ? english : german).find(token[0]) != english.npos;
  }

  // Whether token i has no space after it: opening marks, and currencies before a number.
  bool attaches_right(std::size_t i, const std::u32string& token) const {
    if (token.size() > 1) return false;
    static constexpr std::u32string_view both = U"([{\u00bf\u00a1\u201e\u201a\u2039";
    static constexpr std::u32string_view english = U"\u201c\u2018\u00ab", german = U"\u00bb";
    static constexpr std::u32string_view currency = U"$\u00a3\u20ac\u00a5#";
    const bool number = i + 1 < tokens_.size() && !tokens_[i + 1].empty() &&
                        is_digit(static_cast<std::uint8_t>(tokens_[i + 1][0]));
    return both.find(token[0]) != both.npos ||
           (language_ == language::english ? english : german).find(token[0]) != english.npos ||
           (number && currency.find(token[0]) != currency.npos);
  }

  std::span<const std::string> tokens_;
  language language_;
  std::string text_;
  bool glued_ = false;  // no space before the next token
  bool double_open_ = false;
  bool single_open_ = false;
};

}  // namespace detail

/// The text of tokens, separated by spaces except where the language has none (before
/// a comma, inside brackets and quotation marks, before clitics, around joints such
/// as "@-@"). Restores a text that `tokenizer` has split exactly, unless it had
/// spaces in unusual places. Throws value_error for tokens that are not UTF-8.
/// `of` decides which quotation marks open and close. Time is linear in the number of tokens, except for
/// apostrophes without an opening mark, each of which reads the tokens after it.
inline std::string detokenize(std::span<const std::string> tokens, language of) {
  return detail::token_joiner(tokens, of).run();
}

}  // namespace examples
