// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <cstdlib>
#include <string>

#include <doctest/doctest.h>

#include <pufferfish/io/file.hpp>

namespace io_test {

/// $PUFFERFISH_DATA/name, or "" with a message where that is not there.
inline std::string real_data(const std::string& name, const std::string& file) {
  const char* const base = std::getenv("PUFFERFISH_DATA");
  if (base == nullptr) {
    MESSAGE("skipped: PUFFERFISH_DATA does not name a folder with " << name << "/");
    return "";
  }
  const std::string folder = std::string(base) + "/" + name;
  if (pufferfish::detail::is_regular_file(folder + "/" + file) ||
      pufferfish::detail::is_regular_file(folder + "/" + file + ".gz")) {
    return folder;
  }
  MESSAGE("skipped: neither " << folder << "/" << file << " nor " << file << ".gz exists");
  return "";
}

}  // namespace io_test
