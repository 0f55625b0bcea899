// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Names and shapes from files, formatted for the error messages of this folder.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A shape as text: "[2 x 8 x 8]".
inline std::string shape_text(const std::vector<index_t>& shape) {
  std::string text = "[";
  for (const index_t extent : shape) text += (text.size() > 1 ? " x " : "") + std::to_string(extent);
  return text + "]";
}

/// A name from a file in quotes. At most 80 bytes are shown, and control characters are replaced by '?', so
/// that a hostile file can neither fill a log nor control a terminal.
inline std::string quote_name(std::string_view name) {
  std::string text = "'";
  for (const char c : name.substr(0, 80)) text += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  return text + (name.size() > 80 ? "...'" : "'");
}

/// Number of bytes at the start of a file that foreign_format examines.
inline constexpr std::size_t format_bytes = 256;

/// Guesses the format of a file that is not safetensors from its first bytes. `start`: at least the first
/// format_bytes bytes of the file, or all of a shorter file. Returns text for the end of an error message,
/// with the format and how to convert it; empty if the format is unknown.
inline std::string foreign_format(std::span<const std::uint8_t> start) {
  const std::string_view text(reinterpret_cast<const char*>(start.data()),
                              std::min(start.size(), format_bytes));
  const auto begins = [&](std::string_view with) { return text.substr(0, with.size()) == with; };
  const char* const torch =
      "a .pt or .pth file of PyTorch, not safetensors; in Python, "
      "safetensors.torch.save_file(torch.load(FILE, "
      "weights_only=True), \"FILE.safetensors\") converts its state_dict (docs/weight_files.md)";
  const char* what = "";
  if (begins("PK\x03\x04")) {
    // The name of the archive's first file is stored at byte 30, its length at byte 26.
    const std::string_view first =
        text.size() < 30 ? "" : text.substr(30, start[26] + std::size_t{256} * start[27]);
    what = first.ends_with(".npy")
               ? "an .npz file of NumPy, not safetensors; in Python, "
                 "safetensors.numpy.save_file({n: a.copy() for n, a in numpy.load(FILE).items()}, "
                 "\"FILE.safetensors\") converts it (docs/weight_files.md)"
           : first.ends_with(".pkl")
               ? torch
               : "a zip archive, not safetensors; .npz files of NumPy and .pt and .pth files of PyTorch are "
                 "such archives (docs/weight_files.md converts them)";
  } else if (text.size() > 1 && text[0] == '\x80' && text[1] >= 2 && text[1] <= 5) {
    what = torch;  // files of Python's pickle begin with these bytes
  } else if (begins("\x1f\x8b")) {
    what = "a gzip file, not safetensors; unpack it with gunzip";
  } else if (begins("\x93NUMPY")) {
    what =
        "an .npy file of NumPy, not safetensors; in Python, "
        "safetensors.numpy.save_file({\"NAME\": numpy.load(FILE).copy()}, \"FILE.safetensors\") converts it";
  } else if (begins("\x89HDF")) {
    what = "an HDF5 file, not safetensors; convert it in Python (docs/weight_files.md)";
  } else if (begins("version https://git-lfs")) {
    what = "a pointer of Git LFS, not the file itself; `git lfs pull` fetches it";
  } else if (!text.empty() && (text[0] == '{' || text[0] == '[') &&
             std::all_of(text.begin(), text.end(), [](char c) {
               return (c >= 0x20 && c < 0x7f) || c == '\n' || c == '\r' || c == '\t' ||
                      static_cast<signed char>(c) < 0;
             })) {
    what =
        "JSON, not safetensors (in which JSON follows eight bytes with its length); if it is an index "
        "(model.safetensors.index.json), open the files that it lists";
  }
  return *what == '\0' ? "" : std::string("; this looks like ") + what;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
