// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>

#include <pufferfish/core/error.hpp>

/// An empty folder of its own for a test, removed with what is in it.
class scratch_folder {
 public:
  scratch_folder() {
    path_ = (std::filesystem::temp_directory_path() / ("pufferfish-test-" + std::string(6, 'X'))).string();
    if (::mkdtemp(path_.data()) == nullptr) throw pufferfish::io_error("mkdtemp failed for " + path_);
  }
  scratch_folder(const scratch_folder&) = delete;
  scratch_folder& operator=(const scratch_folder&) = delete;
  ~scratch_folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};
