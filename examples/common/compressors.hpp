// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

// Compressors by name, with their settings, for command lines.

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <pufferfish/compress/compression.hpp>
#include <pufferfish/core/number_text.hpp>

namespace examples {

/// What a command line may say of a compressor; nothing: the compressor's own default.
struct compressor_settings {
  std::optional<pufferfish::index_t> rank = {};
  std::optional<double> ratio = {};
  std::optional<int> bits = {};
  std::optional<pufferfish::index_t> bucket = {};
  std::optional<double> sparsity = {};
  std::optional<pufferfish::code_route> route = {};
  std::optional<pufferfish::code_memory> memory = {};

  /// The settings that were given: "--compress-rank 2".
  std::vector<std::pair<std::string, std::string>> given() const {
    std::vector<std::pair<std::string, std::string>> all;
    const auto add = [&](const char* name, const auto& value) {
      if (value) all.emplace_back(name, pufferfish::detail::message({*value}));
    };
    add("rank", rank);
    add("ratio", ratio);
    add("bits", bits);
    add("bucket", bucket);
    add("sparsity", sparsity);
    if (route) all.emplace_back("route", *route == pufferfish::code_route::gather ? "gather" : "two-hop");
    if (memory) all.emplace_back("memory", *memory == pufferfish::code_memory::none ? "none" : "feedback");
    return all;
  }
};

/// A name, the settings that it takes, and the options that it stands for.
struct named_compressor {
  std::string name;
  std::vector<std::string> settings;
  pufferfish::compression_options (*make)(const compressor_settings&);
};

template <class Value>
void take(const std::optional<Value>& given, auto& option) {
  if (given) option = *given;
}

/// All of them. A new one is a line here.
inline const std::vector<named_compressor>& named_compressors() {
  using options = pufferfish::compression_options;
  using settings = compressor_settings;
  static const auto power = [](const settings& s, pufferfish::error_feedback feedback) {
    pufferfish::power_sgd_options o;
    take(s.rank, o.rank);
    o.feedback = feedback;
    return o;
  };
  static const auto signs = [](const settings& s, pufferfish::code_route route) {
    pufferfish::sign_codec_options o;
    o.route = route;
    take(s.route, o.route);
    take(s.memory, o.memory);
    return o;
  };
  static const auto random = [](const settings& s, bool block) {
    pufferfish::random_k_options o;
    o.block = block;
    take(s.ratio, o.ratio);
    take(s.rank, o.rank);
    take(s.memory, o.memory);
    return o;
  };
  static const std::vector<named_compressor> all{
      {"none", {}, [](const settings&) -> options { return pufferfish::no_compression{}; }},
      {"powersgd",
       {"rank"},
       [](const settings& s) -> options { return power(s, pufferfish::error_feedback::local); }},
      {"powersgd-aggregated",
       {"rank"},
       [](const settings& s) -> options { return power(s, pufferfish::error_feedback::aggregated); }},
      {"signum",
       {"route"},
       [](const settings& s) -> options {
         if (s.route == pufferfish::code_route::two_hop) return pufferfish::two_hop_signum_options{};
         return pufferfish::signum_options{};
       }},
      {"topk",
       {"ratio", "memory"},
       [](const settings& s) -> options {
         pufferfish::top_k_options o;
         take(s.ratio, o.ratio);
         take(s.memory, o.memory);
         return o;
       }},
      {"randomk", {"ratio", "rank", "memory"}, [](const settings& s) -> options { return random(s, false); }},
      {"randomblock",
       {"ratio", "rank", "memory"},
       [](const settings& s) -> options { return random(s, true); }},
      {"dgc",
       {"ratio"},
       [](const settings& s) -> options {
         pufferfish::dgc_options o;
         take(s.ratio, o.ratio);
         return o;
       }},
      {"efsign",
       {"memory", "route"},
       [](const settings& s) -> options { return signs(s, pufferfish::code_route::gather); }},
      {"doublesqueeze",
       {},
       [](const settings& s) -> options { return signs(s, pufferfish::code_route::two_hop); }},
      {"onebit",
       {"memory", "route"},
       [](const settings& s) -> options {
         pufferfish::one_bit_options o;
         take(s.memory, o.memory);
         take(s.route, o.route);
         return o;
       }},
      {"qsgd",
       {"bits", "bucket", "route"},
       [](const settings& s) -> options {
         pufferfish::qsgd_options o;
         take(s.bits, o.bits);
         take(s.bucket, o.bucket);
         take(s.route, o.route);
         return o;
       }},
      {"terngrad",
       {"route"},
       [](const settings& s) -> options {
         pufferfish::tern_grad_options o;
         take(s.route, o.route);
         return o;
       }},
      {"binary",
       {"route"},
       [](const settings& s) -> options {
         pufferfish::stochastic_binary_options o;
         take(s.route, o.route);
         return o;
       }},
      {"atomo",
       {"sparsity"},
       [](const settings& s) -> options {
         pufferfish::atomo_options o;
         take(s.sparsity, o.sparsity);
         return o;
       }},
      {"atomo-entry",
       {"ratio"},
       [](const settings& s) -> options {
         pufferfish::entry_atomo_options o;
         take(s.ratio, o.ratio);
         return o;
       }},
  };
  return all;
}

/// The options of a name; "none" is one. Throws value_error for an unknown name, and for a setting that the
/// compressor does not have, which is then called `shown`.
inline pufferfish::compression_options compression_of(const std::string& name,
                                                      const compressor_settings& settings = {},
                                                      const std::string& shown = "none") {
  const auto& all = named_compressors();
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.name == name; });
  const bool known = found != all.end();
  for (const auto& [setting, value] : settings.given()) {
    if (known && std::count(found->settings.begin(), found->settings.end(), setting) > 0) continue;
    pufferfish::detail::throw_error<pufferfish::value_error>({"--compress-", setting, " ", value,
                                                              " means nothing for --compress ",
                                                              name == "none" ? shown : name});
  }
  if (known) return found->make(settings);
  pufferfish::detail::throw_error<pufferfish::value_error>({"no compressor is called ", name});
}

}  // namespace examples
