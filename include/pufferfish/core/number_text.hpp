// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: conversion between floating-point numbers and text. The decimal separator is always a point.
/// printf, strtod and std::to_string use the locale set by the host program, which made records unreadable.

#include <charconv>
#include <cstddef>
#include <string>
#include <string_view>
#include <system_error>

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Writes a number as the shortest text that reads back as the same number: "0.1", "1e-09", "nan".
inline std::string shortest_number(double value) {
  char text[40];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

/// Writes a number with `digits` digits (at most 20) after the point, as printf's "%.*f" does.
inline std::string fixed_number(double value, int digits) {
  char text[340];  // the largest double has 309 digits before the point
  return {text, std::to_chars(text, text + sizeof text, value, std::chars_format::fixed, digits).ptr};
}

/// Writes a number in hexadecimal, as printf's "%a" does: "0x1.8p+1", "-inf". The text reads back as the same
/// bits.
inline std::string hexadecimal_number(double value) {
  char text[40];
  std::string result(text, std::to_chars(text, text + sizeof text, value, std::chars_format::hex).ptr);
  const std::size_t digits = result.front() == '-' ? 1 : 0;
  if (result[digits] != 'i' && result[digits] != 'n') result.insert(digits, "0x");
  return result;
}

/// Reads a decimal or hexadecimal number as the functions of this file write it. Returns false and leaves
/// `value` unchanged unless all of `text` is one number within the range of double.
inline bool read_number(std::string_view text, double& value) {
  const bool negative = text.substr(0, 1) == "-";
  const std::string_view digits = text.substr(negative ? 1 : 0);
  const bool hexadecimal = digits.substr(0, 2) == "0x";
  const std::string_view bare = hexadecimal ? digits.substr(2) : digits;
  if (bare.empty() || bare.front() == '-') return false;
  double read = 0.0;
  const auto [end, problem] =
      std::from_chars(bare.data(), bare.data() + bare.size(), read,
                      hexadecimal ? std::chars_format::hex : std::chars_format::general);
  if (problem != std::errc() || end != bare.data() + bare.size()) return false;
  value = negative ? -read : read;
  return true;
}

/// Writes a number as printf's "%.15g" does, or with 16 or 17 digits if fewer do not read back as the same
/// number: "0.1", "0.0001", "0.30000000000000004".
inline std::string exact_number(double value) {
  char text[40];
  for (int digits = 15;; ++digits) {
    const std::string_view written(
        text,
        static_cast<std::size_t>(
            std::to_chars(text, text + sizeof text, value, std::chars_format::general, digits).ptr - text));
    double read = 0.0;
    if (digits == 17 || (read_number(written, read) && read == value)) return std::string(written);
  }
}

/// Rewrites numbers with a point and 17 digits by exact_number. Files of earlier versions have them:
/// "0.10000000000000001" for 0.1.
inline std::string shorten_numbers(std::string_view text) {
  constexpr std::string_view characters = "0123456789.e+-";
  std::string result;
  while (!text.empty()) {
    const bool in_number = characters.find(text.front()) != std::string_view::npos;
    const std::string_view word =
        text.substr(0, in_number ? text.find_first_not_of(characters) : text.find_first_of(characters));
    double value = 0.0;
    const bool is_long = in_number && word.size() > 17 && word.find('.') != std::string_view::npos;
    result += is_long && read_number(word, value) ? exact_number(value) : std::string(word);
    text.remove_prefix(word.size());
  }
  return result;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
