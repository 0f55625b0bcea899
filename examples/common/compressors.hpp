// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

// Gradient compressors by name, with their settings, for command lines. compressors.cpp compiles
// them once for all programs.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <pufferfish/compress/codes/two_hop_codes.hpp>
#include <pufferfish/distributed/compression_options.hpp>

namespace examples {

/// Settings of a compressor on a command line; an empty field: the compressor's own default.
struct compressor_settings {
  std::optional<pufferfish::index_t> rank = {};
  std::optional<double> ratio = {};
  std::optional<int> bits = {};
  std::optional<pufferfish::index_t> bucket = {};
  std::optional<double> sparsity = {};
  std::optional<std::uint64_t> start_step = {};
  std::optional<pufferfish::code_route> route = {};
  std::optional<pufferfish::code_memory> memory = {};
  std::optional<pufferfish::index_t> interval = {};
  std::optional<double> threshold = {};
};

/// A compressor's name, the settings that it has, and a function that makes its options.
struct named_compressor {
  std::string name;
  std::vector<std::string> settings;
  pufferfish::compression_options (*make)(const compressor_settings&);
};

/// All compressors.
const std::vector<named_compressor>& named_compressors();

/// The options of the compressor `name`, which may be "none". Throws value_error for an unknown name, and for
/// a setting that the compressor does not have; the message then calls the compressor `shown`.
pufferfish::compression_options compression_of(const std::string& name,
                                               const compressor_settings& settings = {},
                                               const std::string& shown = "none");

}  // namespace examples
