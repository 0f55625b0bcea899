// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `compression_options`: which compressor a training run's exchange has, and with which options.

#include <optional>
#include <string>
#include <variant>

#include <pufferfish/compress/atomo.hpp>
#include <pufferfish/compress/dgc.hpp>
#include <pufferfish/compress/entry_atomo.hpp>
#include <pufferfish/compress/one_bit.hpp>
#include <pufferfish/compress/power_sgd.hpp>
#include <pufferfish/compress/qsgd.hpp>
#include <pufferfish/compress/random_k.hpp>
#include <pufferfish/compress/sign_codec.hpp>
#include <pufferfish/compress/signum.hpp>
#include <pufferfish/compress/stochastic_binary.hpp>
#include <pufferfish/compress/tern_grad.hpp>
#include <pufferfish/compress/top_k.hpp>
#include <pufferfish/compress/two_hop_signum.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Gradients travel as they are (or narrower, see exchange_wire), while the backward pass still runs.
struct no_compression {};

inline std::string describe(const no_compression&) { return "none"; }
template <class T>
std::optional<any_compressor<T>> new_compressor(const parameter_store<T>&, const no_compression&) {
  return std::nullopt;
}

/// The list of all compressors of the library. Each type of options has, in its own header,
/// `describe(options)` and `new_compressor(store, options)`.
using compression_options =
    std::variant<no_compression, power_sgd_options, signum_options, two_hop_signum_options, top_k_options,
                 random_k_options, dgc_options, sign_codec_options, one_bit_options, qsgd_options,
                 tern_grad_options, stochastic_binary_options, atomo_options, entry_atomo_options>;

/// Whether a compressor has a momentum of its own, in place of the optimizer's.
inline bool brings_momentum(const compression_options& options) {
  return std::visit(
      [](const auto& one) {
        if constexpr (requires { one.brings_momentum; }) return static_cast<bool>(one.brings_momentum);
        return false;
      },
      options);
}

/// In a line, for logs and to tell runs apart.
inline std::string describe(const compression_options& options) {
  return std::visit([](const auto& one) { return describe(one); }, options);
}

/// A new compressor for the arenas of a network, nothing for no_compression. Errors as new_compressor of the
/// options.
template <class T>
std::optional<any_compressor<T>> make_compressor(const parameter_store<T>& store,
                                                 const compression_options& options) {
  return std::visit(
      [&](const auto& one) { return std::optional<any_compressor<T>>(new_compressor(store, one)); }, options);
}

PUFFERFISH_NAMESPACE_END
