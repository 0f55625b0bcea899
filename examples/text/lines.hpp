// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Text files, plain or gzip, as lines and words. UTF-8 is checked, not changed.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <pufferfish/io/gzip.hpp>

#include "library.hpp"

namespace examples {

/// Default size limit of read_lines: 256 MiB. It is lower than that for
/// images, because a text of empty lines takes 32 times its size as strings.
inline constexpr std::uint64_t default_text_limit = std::uint64_t{1} << 28;

/// Splits text into lines, without their ends ("\n" or "\r\n"). The last line needs no end, and an end of
/// the last line starts no further line. A UTF-8 byte order mark at the start is dropped. `name`: used in
/// error messages. Throws io_error, with line number (from 1) and byte, if the text is not UTF-8.
/// An empty text has no lines; a line "" is kept. Of several carriage returns at the end of a line only the
/// last is removed.
inline std::vector<std::string> parse_lines(std::span<const std::uint8_t> bytes, const std::string& name) {
  std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const std::size_t invalid = first_invalid_utf8(text);
  if (invalid < text.size()) {
    const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(invalid), '\n');
    detail::throw_error<io_error>(
        {name, ": line ", line, " is not UTF-8 (byte ", invalid, " of the text is ", bytes[invalid], ")"});
  }
  if (text.substr(0, 3) == "\xef\xbb\xbf") text.remove_prefix(3);
  std::vector<std::string> lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    lines.emplace_back(line);
  }
  return lines;
}

/// The lines of a text file, plain or gzip. `limit` bounds the file and its decompressed size, in bytes.
/// Throws io_error as parse_lines and read_plain_or_gzip do.
inline std::vector<std::string> read_lines(const std::string& path,
                                           std::uint64_t limit = default_text_limit) {
  return parse_lines(pufferfish::read_plain_or_gzip(path, limit), path);
}

/// The words of a line, which are separated by spaces and tabs. The views point into `line`.
/// Empty for a line of blanks. Other white space of Unicode is part of words.
/// \code
///   for (const std::string& line : read_lines("train.en")) {
///     for (const std::string_view word : split_words(line)) counts.add(word);
///   }
/// \endcode
inline std::vector<std::string_view> split_words(std::string_view line) {
  constexpr std::string_view blanks = " \t";
  std::vector<std::string_view> words;
  for (;;) {
    const std::size_t begin = line.find_first_not_of(blanks);
    if (begin == std::string_view::npos) return words;
    const std::size_t end = std::min(line.find_first_of(blanks, begin), line.size());
    words.push_back(line.substr(begin, end - begin));
    line.remove_prefix(end);
  }
}

}  // namespace examples
