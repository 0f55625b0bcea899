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

/// Writes a number with 17 significant digits, as printf's "%.17g" does: "0.10000000000000001".
inline std::string exact_number(double value) {
  char text[40];
  return {text, std::to_chars(text, text + sizeof text, value, std::chars_format::general, 17).ptr};
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

}  // namespace detail
PUFFERFISH_NAMESPACE_END
