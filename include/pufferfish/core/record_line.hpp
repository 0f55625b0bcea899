// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: writes and reads lines of words for names and numbers. Ranks send such lines to each other and
/// compare them; checkpoints store them. Names come from the user and may contain any character.

#include <algorithm>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <pufferfish/core/config.hpp>
#include <pufferfish/core/number_text.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Writes a name as one word that has no spaces or newlines outside of quotes. A name of printable characters
/// is unchanged. Any other name is quoted: "" for an empty name, "a b", "a\x0ab" for a newline, "\"" and
/// "\\". Bytes from 0x80 on are unchanged, so that UTF-8 stays readable.
inline std::string quote_word(std::string_view name) {
  const auto plain = [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte > 0x20 && byte != 0x7f && c != '"' && c != '\\';
  };
  bool all_plain = !name.empty();
  for (const char c : name) all_plain = all_plain && plain(c);
  if (all_plain) return std::string(name);
  constexpr const char* digits = "0123456789abcdef";
  std::string text = "\"";
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (plain(c) || c == ' ') {
      text += c;
    } else if (c == '"' || c == '\\') {
      text.append(1, '\\').append(1, c);
    } else {
      text.append("\\x").append(1, digits[byte >> 4]).append(1, digits[byte & 15]);
    }
  }
  return text + '"';
}

/// Calls f(line) for every line of a text.
/// Lines end with a newline, which is not part of the argument; the last line may lack it.
template <class F>
void for_each_line(std::string_view text, F&& f) {
  while (!text.empty()) {
    const std::size_t length = std::min(text.find('\n'), text.size());
    f(text.substr(0, length));
    text.remove_prefix(std::min(text.size(), length + 1));
  }
}

// A space, then a value as a word; see add_line.
inline void add_word(std::string& text, std::string_view name) { text.append(" ").append(quote_word(name)); }
inline void add_word(std::string& text, double value) { text.append(" ").append(hexadecimal_number(value)); }
template <std::integral Integer>
void add_word(std::string& text, Integer value) {
  text.append(" ").append(std::to_string(value));
}
template <class Value>
void add_word(std::string& text, const std::vector<Value>& values) {
  for (const Value& value : values) add_word(text, value);
}

/// Appends a line that record_line reads: `first` unchanged, then each value as a word: a name in
/// quote_word's format, an integer in decimal, bool as 0 or 1, double in hexadecimal; of a vector all values.
///
/// \code
/// std::string text;
/// add_line(text, "layer", "conv1", 0.5, 16);  // "layer conv1 0x1p-1 16\n"
/// \endcode
template <class... Values>
void add_line(std::string& text, std::string_view first, const Values&... values) {
  text += first;
  (add_word(text, values), ...);
  text += "\n";
}

/// Reads the words of a line from left to right; words are separated by one space. After the first word of an
/// unexpected form, nothing more is read and complete() stays false.
/// The text must exist as long as the object. Values after a failure are unspecified, so a caller tests
/// complete() before it uses any.
///
/// \code
/// record_line line("conv1 0.5 16");
/// std::string name;
/// double milliseconds = 0.0;
/// index_t rank = 0;
/// if (!line.read(name, milliseconds, rank).complete()) ...  // not a line of this form
/// \endcode
class record_line {
 public:
  /// `text`: a line without its end.
  explicit record_line(std::string_view text) : rest_(text) {}

  /// Whether every read has succeeded and the whole line was read.
  bool complete() const { return good_ && rest_.empty(); }

  /// Reads names (std::string, in quote_word's format), integers, bool (0 or 1) and double.
  template <class... Values>
  record_line& read(Values&... values) {
    (read_one(values), ...);
    return *this;
  }
  /// Reads the rest of the line into `values`: at least one value.
  template <class Value>
  record_line& read_rest(std::vector<Value>& values) {
    do {
      read_one(values.emplace_back());
    } while (good_ && !rest_.empty());
    return *this;
  }

 private:
  // Read one word each, and set good_ to false if it has another form.
  void read_one(std::string& name) {
    next_word();
    if (rest_.substr(0, 1) == "\"") return read_quoted(name);
    name = take(rest_.find(' '));
    good_ = good_ && !name.empty();
  }
  void read_one(double& value) {
    next_word();
    const std::string_view word = take(rest_.find(' '));
    good_ = good_ && read_number(word, value);
  }
  void read_one(bool& value) {
    int digit = 0;
    read_one(digit);
    good_ = good_ && (digit == 0 || digit == 1);
    value = digit == 1;
  }
  template <std::integral Integer>
  void read_one(Integer& value) {
    next_word();
    const std::string_view word = take(rest_.find(' '));
    const auto [end, problem] = std::from_chars(word.data(), word.data() + word.size(), value);
    good_ = good_ && problem == std::errc() && end == word.data() + word.size();
  }

  // Skips the space before every word except the first.
  void next_word() {
    if (first_) {
      first_ = false;
      return;
    }
    good_ = good_ && rest_.substr(0, 1) == " ";
    if (!rest_.empty()) rest_.remove_prefix(1);
  }

  // Removes the next `count` characters, or all that are left, and returns them.
  std::string_view take(std::size_t count) {
    const std::string_view word = rest_.substr(0, count);
    rest_.remove_prefix(word.size());
    return word;
  }

  // Reads a quoted name up to its closing quote.
  void read_quoted(std::string& name) {
    rest_.remove_prefix(1);
    name.clear();
    while (!rest_.empty() && rest_.front() != '"') {
      char c = take(1).front();
      if (c == '\\') c = read_escaped();
      name += c;
    }
    good_ = good_ && !rest_.empty();
    take(1);
  }
  // Reads the rest of an escape after its backslash: a quote, a backslash, or x and two hexadecimal digits.
  char read_escaped() {
    const std::string_view kind = take(1);
    if (kind == "\"" || kind == "\\") return kind.front();
    const std::string_view digits = kind == "x" ? take(2) : std::string_view();
    unsigned value = 0;
    const auto [end, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    good_ = good_ && digits.size() == 2 && problem == std::errc() && end == digits.data() + 2;
    return static_cast<char>(value);
  }

  std::string_view rest_;
  bool first_ = true;
  bool good_ = true;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
