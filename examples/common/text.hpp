// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Text helpers of the examples: formatted strings, durations, aligned tables.

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace examples {

/// printf into a string.
[[gnu::format(printf, 1, 2)]] inline std::string format(const char* pattern, ...) {
  std::va_list arguments;
  va_start(arguments, pattern);
  std::va_list again;
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, pattern, arguments);
  va_end(arguments);
  std::string text(static_cast<std::size_t>(std::max(0, length)), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(again);
  return text;
}

/// A number of things: "1 rank", "2 ranks".
inline std::string counted(std::int64_t count, const char* thing) {
  return std::to_string(count) + " " + thing + (count == 1 ? "" : "s");
}

/// 1234567 as "1,234,567".
inline std::string grouped(std::int64_t value) {
  const std::string digits = std::to_string(value);
  const std::size_t sign = value < 0 ? 1 : 0;
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > sign && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

/// Seconds as "0:07", "12:34" or "1:02:03".
inline std::string clock_text(double seconds) {
  const auto all = static_cast<long>(std::lround(std::clamp(seconds, 0.0, 3.6e6)));
  if (all < 3600) return format("%ld:%02ld", all / 60, all % 60);
  return format("%ld:%02ld:%02ld", all / 3600, all / 60 % 60, all % 60);
}

/// The middle value; the upper of the two for an even number of values. 0 for no values.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

inline double mean(const std::vector<double>& values) {
  double sum = 0.0;
  for (double value : values) sum += value;
  return values.empty() ? 0.0 : sum / static_cast<double>(values.size());
}

/// Sample standard deviation; 0 for fewer than two values.
inline double standard_deviation(const std::vector<double>& values) {
  if (values.size() < 2) return 0.0;
  const double centre = mean(values);
  double squares = 0.0;
  for (double value : values) squares += (value - centre) * (value - centre);
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

/// Rows of cells, aligned in columns: the first column to the left, the others to the right.
class text_table {
 public:
  explicit text_table(std::vector<std::string> head) : rows_{std::move(head)} {}

  void add(std::vector<std::string> row) {
    row.resize(rows_.front().size());
    rows_.push_back(std::move(row));
  }

  /// One line per row, each with its line end, and a rule below the head.
  std::string str() const {
    std::vector<std::size_t> widths(rows_.front().size(), 0);
    for (const auto& row : rows_) {
      for (std::size_t c = 0; c < widths.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
    }
    std::string text;
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      for (std::size_t c = 0; c < widths.size(); ++c) {
        const std::string fill(widths[c] - rows_[r][c].size(), ' ');
        text += c == 0 ? rows_[r][c] + (widths.size() > 1 ? fill : "") : "  " + fill + rows_[r][c];
      }
      text += '\n';
      if (r > 0) continue;
      std::size_t total = widths[0];
      for (std::size_t c = 1; c < widths.size(); ++c) total += 2 + widths[c];
      text += std::string(total, '-') + '\n';
    }
    return text;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace examples
