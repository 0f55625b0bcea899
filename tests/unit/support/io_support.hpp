// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// What the tests of files share: a scratch folder, error texts, and ways to damage bytes.

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <pufferfish/core/error.hpp>

#include "scratch_folder.hpp"

namespace io_test {

using bytes = std::vector<std::uint8_t>;

inline bytes to_bytes(std::string_view text) { return {text.begin(), text.end()}; }
inline std::string to_text(std::span<const std::uint8_t> data) { return {data.begin(), data.end()}; }

/// Names in a folder, without "." and "..".
inline std::vector<std::string> list(const std::string& folder) {
  std::vector<std::string> names;
  DIR* const listing = ::opendir(folder.c_str());
  if (listing == nullptr) return names;
  while (const dirent* entry = ::readdir(listing)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  ::closedir(listing);
  return names;
}

using ::scratch_folder;

/// The text of the io_error that `f` throws; "" if it throws nothing. Other exceptions pass.
template <class F>
std::string io_error_of(F&& f) {
  try {
    f();
  } catch (const pufferfish::io_error& e) {
    return e.what();
  }
  return "";
}

inline bool mentions(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

/// Calls `parse` with every strict prefix of `good`; counts those accepted.
template <class Parse>
int accepted_prefixes(const bytes& good, Parse&& parse) {
  int accepted = 0;
  for (std::size_t n = 0; n < good.size(); ++n) {
    // A block of exactly n bytes, so that a sanitizer sees a read past the end.
    const bytes cut(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(n));
    if (io_error_of([&] { parse(cut); }).empty()) ++accepted;
  }
  return accepted;
}

/// Calls `parse` with `rounds` damaged copies: one to four bytes changed, sometimes cut or prolonged. Each
/// must be accepted or give an io_error; anything else passes up and fails the test. Returns how many were
/// refused.
template <class Parse>
int refused_damaged(const bytes& good, int rounds, unsigned seed, Parse&& parse) {
  std::mt19937 random(seed);
  int refused = 0;
  for (int round = 0; round < rounds; ++round) {
    bytes bad = good;
    const unsigned changes = 1 + random() % 4;
    for (unsigned c = 0; c < changes; ++c) {
      std::uint8_t& victim = bad[random() % bad.size()];
      victim = static_cast<std::uint8_t>(random() % 2 ? random() & 0xff : victim ^ (1U << random() % 8));
    }
    if (random() % 8 == 0) bad.resize(random() % (2 * good.size()));
    bad.shrink_to_fit();
    if (!io_error_of([&] { parse(bad); }).empty()) ++refused;
  }
  return refused;
}

}  // namespace io_test
