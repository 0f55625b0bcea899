// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Validation of UTF-8.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace detail {

/// Length in bytes (1 to 4) of the code point that starts at text[at], or 0 if its bytes are not well-formed
/// by table 3-7 of the Unicode standard. Overlong forms, surrogates and code points above U+10FFFF are not
/// well-formed. `at` must be less than text.size().
inline std::size_t utf8_length(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[at + i]); };
  const std::size_t left = text.size() - at;
  const std::uint8_t first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || left < length) return 0;
  const std::uint8_t low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  const std::uint8_t high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  if (byte(1) < low || byte(1) > high) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xbf) return 0;
  }
  return length;
}

}  // namespace detail

/// Offset of the first byte that is not part of well-formed UTF-8; text.size() if there is none.
/// Overlong forms, surrogates and code points above U+10FFFF are not well-formed.
/// \code
///   const bool is_utf8 = first_invalid_utf8(text) == text.size();
/// \endcode
inline std::size_t first_invalid_utf8(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t length = detail::utf8_length(text, at);
    if (length == 0) return at;
    at += length;
  }
  return at;
}

PUFFERFISH_NAMESPACE_END
