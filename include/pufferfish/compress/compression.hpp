// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `compression_options`: which compressor a training run's exchange has, and how.

#include <optional>
#include <string>
#include <variant>

#include <pufferfish/compress/power_sgd.hpp>
#include <pufferfish/compress/signum.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Gradients travel as they are (or narrower, see exchange_wire), while the backward pass still runs.
struct no_compression {};

using compression_options = std::variant<no_compression, power_sgd_options, signum_options>;

/// In a line, for logs and to tell runs apart.
inline std::string describe(const compression_options& options) {
  if (const auto* power = std::get_if<power_sgd_options>(&options)) return describe(*power);
  if (const auto* signs = std::get_if<signum_options>(&options)) return describe(*signs);
  return "none";
}

/// A new compressor for the arenas of a network, nothing for no_compression. Errors as power_sgd, signum.
template <class T>
std::optional<any_compressor<T>> make_compressor(const parameter_store<T>& store,
                                                 const compression_options& options) {
  if (const auto* power = std::get_if<power_sgd_options>(&options)) return power_sgd<T>(store, *power);
  if (const auto* signs = std::get_if<signum_options>(&options)) return signum<T>(store, *signs);
  return std::nullopt;
}

PUFFERFISH_NAMESPACE_END
