// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Names and shapes out of files, as the errors of this folder show them.

#include <string>
#include <string_view>
#include <vector>

#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// "[2 x 8 x 8]"
inline std::string shape_text(const std::vector<index_t>& shape) {
  std::string text = "[";
  for (const index_t extent : shape) text += (text.size() > 1 ? " x " : "") + std::to_string(extent);
  return text + "]";
}

/// In quotes, at most 80 bytes, control characters replaced: hostile files must not fill a log or drive a
/// terminal.
inline std::string quote_name(std::string_view name) {
  std::string text = "'";
  for (const char c : name.substr(0, 80)) text += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  return text + (name.size() > 80 ? "...'" : "'");
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
