// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Replaces the weights of an ONNX model by low-rank factors, each node by two:
//   factorize_onnx resnet50.onnx small.onnx --rank-ratio 0.25 --explain
//   factorize_onnx resnet50.onnx small.onnx --budget 0.5 --statistics statistics.safetensors

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include <CLI/CLI.hpp>

#include <pufferfish/adapters/onnx/factorize.hpp>
#include <pufferfish/weights/statistics.hpp>

#include "common/console.hpp"
#include "common/session.hpp"
#include "common/weight_table.hpp"

namespace {

using namespace examples;

struct options {
  std::string in, out, json, statistics, truncation, include, exclude;
  std::optional<double> ratio, energy, budget;
  index_t keep_first = 1;
  bool keep_last = true, overwrite = false, explain = false;
  int threads = 0;
};

/// Floating-point elements in the constants of a model.
double elements_of(const std::string& path) {
  const onnx::ModelProto model = pufferfish::detail::read_onnx_model(path);
  double sum = 0.0;
  for (const auto& [name, tensor] : pufferfish::detail::constants_of(model.graph())) {
    const auto dtype = pufferfish::detail::floating_dtype(*tensor);
    if (!dtype) continue;
    const auto elements = pufferfish::detail::byte_size(*tensor, *dtype, path) / size_of(*dtype);
    sum += static_cast<double>(elements);
  }
  return sum;
}

pufferfish::weight_policy policy_of(const options& o, const pufferfish::network_statistics* statistics) {
  pufferfish::weight_policy policy;
  policy.statistics = statistics;
  for (const auto kind : {pufferfish::truncation::plain, pufferfish::truncation::data_aware,
                          pufferfish::truncation::two_sided}) {
    if (o.truncation == to_string(kind)) policy.truncate = kind;
  }
  if (o.ratio) policy.rank = pufferfish::rank_ratio{*o.ratio};
  if (o.energy) policy.rank = pufferfish::energy_kept{*o.energy};
  if (o.budget) {
    const double most = *o.budget <= 1.0 ? std::floor(*o.budget * elements_of(o.in)) : *o.budget;
    policy.budget = std::max<index_t>(1, static_cast<index_t>(most));
  }
  policy.keep_first = o.keep_first;
  policy.keep_last = o.keep_last;
  policy.include = matcher("--include", o.include);
  policy.exclude = matcher("--exclude", o.exclude);
  policy.threads = threads_for(o.threads, 1);
  return policy;
}

void work(const options& o) {
  check_new(o.out, o.overwrite);
  check_writable(o.json);
  const console out(0, o.json, progress_style::automatic);
  std::optional<pufferfish::network_statistics> statistics;
  if (!o.statistics.empty()) statistics = pufferfish::read_statistics(o.statistics);
  pufferfish::onnx_report report;
  {
    bar show(out);
    report =
        pufferfish::factorize_onnx(o.in, o.out, policy_of(o, statistics ? &*statistics : nullptr),
                                   [&show](const weight_result& one, double share) { show(one, share); });
  }
  const table_options shown{false, statistics.has_value(), true};
  std::size_t count = 0;
  weight_report table;
  for (const weight_result& r : report.tensors) {
    count += r.factorized ? 1 : 0;
    if (r.factorized || o.explain) table.tensors.push_back(r);
  }
  out.write(table_of(shown, table));
  if (!report.checked) out.line("The opset is newer than the installed ONNX: its checker was not run.");
  out.line(format("%zu of %zu weights factorized: %s -> %s parameters (%.1f %%) in %.1f s", count,
                  report.tensors.size(), grouped(report.parameters_before).c_str(),
                  grouped(report.parameters_after).c_str(),
                  100.0 * static_cast<double>(report.parameters_after) /
                      static_cast<double>(std::max<index_t>(1, report.parameters_before)),
                  report.seconds));
  nlohmann::ordered_json json = to_json(shown, o.in, o.out, report);
  json["checked"] = report.checked;
  write_json(o.json, json);
}

}  // namespace

int main(int argc, char** argv) {
  options o;
  CLI::App app("Replaces the weights of an ONNX model by low-rank factors, each node by two",
               "factorize_onnx");
  app.add_option("input", o.in, "The model; its external data are looked for in its folder")->required();
  app.add_option("output", o.out, "The model to write; external data go to OUTPUT.data")->required();
  CLI::Option* ratio = app.add_option("--rank-ratio", o.ratio,
                                      "Rank: this part of a matrix's smaller side; 0.25 if nothing is said")
                           ->check(CLI::Range(0.0, 1.0));
  CLI::Option* energy =
      app.add_option("--energy", o.energy, "Rank: the least that keeps this part of ||A||^2")
          ->check(CLI::Range(0.0, 1.0));
  CLI::Option* budget = app.add_option("--budget", o.budget,
                                       "Ranks: the best for this number of parameters in the whole model; up "
                                       "to 1: for this part of them")
                            ->check(CLI::Range(0.0, 1e18));
  ratio->excludes(energy)->excludes(budget);
  energy->excludes(budget);
  app.add_option("--keep-first", o.keep_first, "Layers at the start that stay dense")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  app.add_flag("--keep-last,!--factorize-last", o.keep_last, "The last layer stays dense (it does)");
  app.add_option("--include", o.include, "Only weights whose name matches this regex");
  app.add_option("--exclude", o.exclude, "No weight whose name matches this regex");
  app.add_option("--statistics", o.statistics,
                 "Safetensors with what the weights met; factors then keep the loss small");
  app.add_option("--truncation", o.truncation, "What factors keep; else the most that --statistics allows")
      ->check(CLI::IsMember({"plain", "data-aware", "two-sided"}));
  app.add_flag("--explain", o.explain, "Show the weights that stay, too, and why");
  app.add_flag("--overwrite", o.overwrite, "Replace the output if it exists already");
  app.add_option("--threads", o.threads, "Threads; 0: all cores")->check(CLI::Range(0, 4096));
  app.add_option("--json", o.json, "Write what was done to this file; - is standard output");
  return run_on_first(app, argc, argv, [&o] { work(o); });
}
