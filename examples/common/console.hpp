// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The output of an example: only rank 0 prints. If JSON is written to standard output, everything else is
/// written to standard error.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>

#include <nlohmann/json.hpp>

#include <pufferfish/io/file.hpp>

namespace examples {

/// Display of progress: a bar that redraws itself, one line per epoch, or nothing. `automatic`: a bar if
/// standard error is a terminal. Under MPI launchers it is a pipe, so bars must be asked for there.
enum class progress_style { automatic, bar, lines, none };

class console {
 public:
  console() = default;
  console(int rank, const std::string& json_target, progress_style style)
      : speaks_(rank == 0), out_(json_target == "-" ? stderr : stdout), style_(style) {
    if (style_ == progress_style::automatic) {
      style_ = ::isatty(STDERR_FILENO) != 0 ? progress_style::bar : progress_style::lines;
    }
    if (!speaks_) style_ = progress_style::none;
  }

  bool speaks() const { return speaks_; }
  progress_style style() const { return style_; }

  /// Prints a text unchanged.
  void write(const std::string& text) const {
    if (!speaks_) return;
    std::fputs(text.c_str(), out_);
    std::fflush(out_);
  }
  void line(const std::string& text) const { write(text + "\n"); }

 private:
  bool speaks_ = true;
  FILE* out_ = stdout;
  progress_style style_ = progress_style::lines;
};

/// Throws io_error if no file can be written at `path`: better before the work than after. An empty path is
/// not checked. Call it on one rank.
inline void check_writable(const std::string& path) {
  if (!path.empty() && path != "-") pufferfish::atomic_writer{path};
}

/// Throws io_error if the file exists and may not be replaced: unlike JSON and pictures, weights and
/// checkpoints take hours to make again. `instead`: what else the user can do. Call it on one rank.
inline void check_new(const std::string& path, bool overwrite, const std::string& instead = "") {
  if (overwrite || path.empty() || !pufferfish::detail::is_regular_file(path)) return;
  throw pufferfish::io_error(path + ": exists already; " + instead + "--overwrite replaces it");
}

/// Writes a document to a file, completely or not at all, or to standard output ("-"). Does nothing for an
/// empty target. Call it on one rank.
inline void write_json(const std::string& target, const nlohmann::ordered_json& document) {
  if (target.empty()) return;
  const std::string text = document.dump(2) + "\n";
  if (target != "-") {
    pufferfish::write_file_atomically(target,
                                      {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
    return;
  }
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw pufferfish::io_error("standard output: cannot write " + std::to_string(text.size()) + " bytes");
  }
}

}  // namespace examples
