// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

// Compressors by name, with their settings, for command lines. compressors.cpp compiles them once for all
// programs.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <pufferfish/compress/two_hop_codes.hpp>
#include <pufferfish/dist/compression_options.hpp>

namespace examples {

/// What a command line may say of a compressor; nothing: the compressor's own default.
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

/// A name, the settings that it takes, and the options that it stands for.
struct named_compressor {
  std::string name;
  std::vector<std::string> settings;
  pufferfish::compression_options (*make)(const compressor_settings&);
};

/// All of them.
const std::vector<named_compressor>& named_compressors();

/// The options of a name; "none" is one. Throws value_error for an unknown name, and for a setting that the
/// compressor does not have, which is then called `shown`.
pufferfish::compression_options compression_of(const std::string& name,
                                               const compressor_settings& settings = {},
                                               const std::string& shown = "none");

}  // namespace examples
