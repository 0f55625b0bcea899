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

#include "common/weight_options.hpp"

namespace {

using namespace examples;

struct options : weight_options {
  std::optional<double> budget;
  bool explain = false;
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

pufferfish::weight_policy policy_of(const options& o,
                                    const std::optional<pufferfish::network_statistics>& statistics) {
  pufferfish::weight_policy policy = examples::policy_of(o, statistics);
  if (o.budget) {
    const double most = *o.budget <= 1.0 ? std::floor(*o.budget * elements_of(o.in)) : *o.budget;
    policy.budget = std::max<index_t>(1, static_cast<index_t>(most));
  }
  return policy;
}

void work(const options& o) {
  const auto statistics = begin(o);
  const console out(0, o.json, progress_style::automatic);
  pufferfish::onnx_report report;
  {
    bar show(out);
    report =
        pufferfish::factorize_onnx(o.in, o.out, policy_of(o, statistics),
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
  out.line(
      format("%zu of %zu weights factorized: %s", count, report.tensors.size(), sizes_text(report).c_str()));
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
  add_choices(app, o,
              app.add_option("--budget", o.budget,
                             "Ranks: the best for this number of parameters in the whole model; up to 1: for "
                             "this part of them")
                  ->check(CLI::Range(0.0, 1e18)));
  app.add_flag("--explain", o.explain, "Show the weights that stay, too, and why");
  add_output_options(app, o);
  return run_on_first(app, argc, argv, [&o] { work(o); });
}
