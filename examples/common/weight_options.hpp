// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Options that the programs share which factorize the weights of a file.

#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <pufferfish/weights/statistics.hpp>

#include "console.hpp"
#include "session.hpp"
#include "weight_table.hpp"

namespace examples {

struct weight_options {
  std::string in, out, json, statistics, truncation, include, exclude;
  std::optional<double> ratio, energy;
  index_t keep_first = 1;
  bool keep_last = true, overwrite = false;
  int threads = 0;
};

/// Adds the options that choose layers, ranks and errors, and returns them with `budget`, the --budget of the
/// program, which excludes other ranks.
inline std::vector<CLI::Option*> add_choices(CLI::App& app, weight_options& o, CLI::Option* budget) {
  CLI::Option* const ratio =
      app.add_option("--rank-ratio", o.ratio,
                     "Rank: this part of a matrix's smaller side; 0.25 if nothing is said")
          ->check(CLI::Range(0.0, 1.0))
          ->excludes(budget);
  CLI::Option* const energy =
      app.add_option("--energy", o.energy, "Rank: the least that keeps this part of ||A||^2")
          ->check(CLI::Range(0.0, 1.0))
          ->excludes(ratio)
          ->excludes(budget);
  return {
      ratio,
      energy,
      budget,
      app.add_option("--keep-first", o.keep_first, "Layers at the start that stay dense")
          ->check(CLI::Range(0, 1000000))
          ->capture_default_str(),
      app.add_flag("--keep-last,!--factorize-last", o.keep_last, "The last layer stays dense (it does)"),
      app.add_option("--include", o.include, "Only weights whose name matches this regex"),
      app.add_option("--exclude", o.exclude, "No weight whose name matches this regex"),
      app.add_option("--statistics", o.statistics,
                     "Safetensors with statistics of the weights' rows; factors then keep the loss small"),
      app.add_option("--truncation", o.truncation,
                     "What factors keep; else the most that --statistics allows")
          ->check(CLI::IsMember({"plain", "data-aware", "two-sided"}))};
}

inline void add_output_options(CLI::App& app, weight_options& o) {
  app.add_flag("--overwrite", o.overwrite, "Replace the output if it exists already");
  app.add_option("--threads", o.threads, "Threads; 0: all cores")->check(CLI::Range(0, 4096));
  app.add_option("--json", o.json, "Write what was done to this file; - is standard output");
}

/// Checks the names of the files to write, and reads those of --statistics.
inline std::optional<pufferfish::network_statistics> begin(const weight_options& o) {
  check_new(o.out, o.overwrite);
  check_writable(o.json);
  if (o.statistics.empty()) return std::nullopt;
  return pufferfish::read_statistics(o.statistics);
}

/// The policy without a budget. `statistics`: see begin.
inline pufferfish::weight_policy policy_of(const weight_options& o,
                                           const std::optional<pufferfish::network_statistics>& statistics) {
  pufferfish::weight_policy policy;
  if (statistics) policy.statistics = &*statistics;
  for (const auto kind : {pufferfish::truncation::plain, pufferfish::truncation::data_aware,
                          pufferfish::truncation::two_sided}) {
    if (o.truncation == to_string(kind)) policy.truncate = kind;
  }
  if (o.ratio) policy.rank = pufferfish::rank_ratio{*o.ratio};
  if (o.energy) policy.rank = pufferfish::energy_kept{*o.energy};
  policy.keep_first = o.keep_first;
  policy.keep_last = o.keep_last;
  policy.include = matcher("--include", o.include);
  policy.exclude = matcher("--exclude", o.exclude);
  policy.threads = threads_for(o.threads, 1);
  return policy;
}

/// Parameters before and after, and the time, as the end of a line. Report: a weight_report or an
/// onnx_report.
template <class Report>
std::string sizes_text(const Report& report) {
  const auto share = report.parameters_before > 0 ? 100.0 * static_cast<double>(report.parameters_after) /
                                                        static_cast<double>(report.parameters_before)
                                                  : 100.0;
  return format("%s -> %s parameters (%.1f %%) in %.1f s", grouped(report.parameters_before).c_str(),
                grouped(report.parameters_after).c_str(), share, report.seconds);
}

}  // namespace examples
