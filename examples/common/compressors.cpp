// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "compressors.hpp"

#include <algorithm>
#include <utility>

#include <pufferfish/compress/compression.hpp>
#include <pufferfish/core/number_text.hpp>

namespace examples {
namespace {

/// The settings that were given, as text: "--compress-rank 2".
std::vector<std::pair<std::string, std::string>> given(const compressor_settings& settings) {
  const auto& [rank, ratio, bits, bucket, sparsity, start_step, route, memory, interval, threshold] =
      settings;
  std::vector<std::pair<std::string, std::string>> all;
  const auto add = [&](const char* name, const auto& value) {
    if (value) all.emplace_back(name, pufferfish::detail::message({*value}));
  };
  add("rank", rank);
  add("ratio", ratio);
  add("bits", bits);
  add("bucket", bucket);
  add("sparsity", sparsity);
  add("start-step", start_step);
  add("interval", interval);
  add("threshold", threshold);
  const char *const routes[] = {"gather", "two-hop", "sparse"}, *const memories[] = {"none", "feedback",
                                                                                     "rescaled"};
  if (route) all.emplace_back("route", routes[static_cast<int>(*route)]);
  if (memory) all.emplace_back("memory", memories[static_cast<int>(*memory)]);
  return all;
}

template <class Value>
void take(const std::optional<Value>& given, auto& option) {
  if (given) option = *given;
}
}  // namespace

/// To add a compressor, add an entry here.
const std::vector<named_compressor>& named_compressors() {
  using options = pufferfish::compression_options;
  using settings = compressor_settings;
  static const auto power = [](const settings& s, pufferfish::error_feedback feedback) {
    pufferfish::power_sgd_options o;
    take(s.rank, o.rank);
    take(s.start_step, o.start_step);
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
  static const auto accordion = [](const settings& s, pufferfish::accordion_options o) {
    take(s.interval, o.interval);
    take(s.threshold, o.threshold);
    o.validate();
    return o;
  };
  static const std::vector<named_compressor> all{
      {"none", {}, [](const settings&) -> options { return pufferfish::no_compression{}; }},
      {"powersgd",
       {"rank", "start-step"},
       [](const settings& s) -> options { return power(s, pufferfish::error_feedback::local); }},
      {"powersgd-aggregated",
       {"rank", "start-step"},
       [](const settings& s) -> options { return power(s, pufferfish::error_feedback::aggregated); }},
      {"accordion",
       {"rank", "interval", "threshold"},
       [](const settings& s) -> options {
         pufferfish::power_sgd_options low;
         take(s.rank, low.rank);
         return accordion(s, {.low = low});
       }},
      {"accordion-topk",
       {"ratio", "interval", "threshold"},
       [](const settings& s) -> options {
         pufferfish::top_k_options low{.ratio = 0.99};
         take(s.ratio, low.ratio);
         return accordion(s, {.low = low, .high = pufferfish::top_k_options{.ratio = 0.1}});
       }},
      {"signum",
       {"route"},
       [](const settings& s) -> options {
         if (s.route == pufferfish::code_route::two_hop) return pufferfish::two_hop_signum_options{};
         return pufferfish::signum_options{};
       }},
      {"topk",
       {"ratio", "memory", "route"},
       [](const settings& s) -> options {
         pufferfish::top_k_options o;
         take(s.ratio, o.ratio);
         take(s.memory, o.memory);
         take(s.route, o.route);
         return o;
       }},
      {"blocktopk",
       {"memory", "route"},
       [](const settings& s) -> options {
         pufferfish::block_top_k_options o;
         take(s.memory, o.memory);
         take(s.route, o.route);
         return o;
       }},
      {"randomk", {"ratio", "rank", "memory"}, [](const settings& s) -> options { return random(s, false); }},
      {"randomblock",
       {"ratio", "rank", "memory"},
       [](const settings& s) -> options { return random(s, true); }},
      {"dgc",
       {"ratio", "route"},
       [](const settings& s) -> options {
         pufferfish::dgc_options o;
         take(s.ratio, o.ratio);
         take(s.route, o.route);
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
       {"ratio", "route"},
       [](const settings& s) -> options {
         pufferfish::entry_atomo_options o;
         take(s.ratio, o.ratio);
         take(s.route, o.route);
         return o;
       }},
  };
  return all;
}

pufferfish::compression_options compression_of(const std::string& name, const compressor_settings& settings,
                                               const std::string& shown) {
  const auto& all = named_compressors();
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.name == name; });
  const bool known = found != all.end();
  for (const auto& [setting, value] : given(settings)) {
    if (known && std::count(found->settings.begin(), found->settings.end(), setting) > 0) continue;
    pufferfish::detail::throw_error<pufferfish::value_error>({"--compress-", setting, " ", value,
                                                              " means nothing for --compress ",
                                                              name == "none" ? shown : name});
  }
  if (known) return found->make(settings);
  pufferfish::detail::throw_error<pufferfish::value_error>({"no compressor is called ", name});
}

}  // namespace examples
