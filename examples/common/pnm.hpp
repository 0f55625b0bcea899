// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Binary PGM (P5, grey) and PPM (P6, red green blue), one byte per value: the simplest formats for a single
/// picture. Source: the netpbm manual.

#include <cctype>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/core/error.hpp>
#include <pufferfish/core/view.hpp>

namespace examples {

struct picture {
  pufferfish::index_t height = 0;
  pufferfish::index_t width = 0;
  pufferfish::index_t channels = 0;
  int maximum = 255;                 ///< the value of white
  std::vector<std::uint8_t> pixels;  ///< height x width x channels
};

inline bool is_pnm(std::span<const std::uint8_t> bytes) {
  return bytes.size() >= 2 && bytes[0] == 'P' && (bytes[1] == '5' || bytes[1] == '6');
}

namespace pnm {

/// The next number of a header, after white space and comments.
inline pufferfish::index_t number(std::span<const std::uint8_t> bytes, std::size_t& at,
                                  const std::string& name) {
  const auto space = [&] { return at < bytes.size() && std::isspace(bytes[at]) != 0; };
  while (space() || (at < bytes.size() && bytes[at] == '#')) {
    if (bytes[at] == '#') {
      while (at < bytes.size() && bytes[at] != '\n') ++at;
    } else {
      ++at;
    }
  }
  pufferfish::index_t value = 0;
  const std::size_t begin = at;
  for (; at < bytes.size() && std::isdigit(bytes[at]) != 0 && at - begin < 9; ++at) {
    value = 10 * value + (bytes[at] - '0');
  }
  if (at == begin) {
    throw pufferfish::io_error(name + ": no number at byte " + std::to_string(at) + " of its header");
  }
  return value;
}

}  // namespace pnm

/// Parses one picture. Throws io_error, naming the file and the numbers.
inline picture parse_pnm(std::span<const std::uint8_t> bytes, const std::string& name) {
  if (!is_pnm(bytes)) throw pufferfish::io_error(name + ": is neither a P5 (PGM) nor a P6 (PPM) file");
  picture result;
  std::size_t at = 2;
  result.channels = bytes[1] == '5' ? 1 : 3;
  result.width = pnm::number(bytes, at, name);
  result.height = pnm::number(bytes, at, name);
  const pufferfish::index_t maximum = pnm::number(bytes, at, name);
  if (maximum < 1 || maximum > 255) {
    throw pufferfish::io_error(name + ": a largest value of " + std::to_string(maximum) +
                               " is not in 1 .. 255");
  }
  result.maximum = static_cast<int>(maximum);
  ++at;  // one white space ends the header
  const std::size_t found = at < bytes.size() ? bytes.size() - at : 0;
  const auto expected = static_cast<std::uint64_t>(result.width) * static_cast<std::uint64_t>(result.height) *
                        static_cast<std::uint64_t>(result.channels);
  if (expected == 0 || expected != found) {
    throw pufferfish::io_error(name + ": " + std::to_string(result.width) + " x " +
                               std::to_string(result.height) + " pixels need " + std::to_string(expected) +
                               " values, the file has " + std::to_string(found));
  }
  const auto values = bytes.subspan(at);
  result.pixels.assign(values.begin(), values.end());
  return result;
}

}  // namespace examples
