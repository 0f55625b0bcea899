// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The forms of an ONNX model that factorize_onnx can write, and what a training step costs with them.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <pufferfish/adapters/onnx/factorize.hpp>
#include <pufferfish/weights/statistics.hpp>

#include "onnx_cost.hpp"
#include "session.hpp"
#include "training_form.hpp"

namespace examples {

/// The shapes of --input-shape, NAME=1x3x224x224 each. Throws value_error for other texts.
inline onnx_shapes input_shapes(const std::vector<std::string>& texts) {
  onnx_shapes shapes;
  for (const std::string& text : texts) {
    const std::size_t end = std::min(text.rfind('='), text.size());
    std::vector<index_t>& shape = shapes[text.substr(0, end)];
    for (const char* at = text.c_str() + end; *at != '\0';) {
      index_t extent = 0;
      const auto [next, problem] = std::from_chars(at + 1, text.c_str() + text.size(), extent);
      const bool ends = *next == '\0' || *next == 'x';
      if (problem != std::errc() || extent < 1 || !ends) shape.clear();
      if (problem != std::errc() || extent < 1 || !ends) break;
      shape.push_back(extent);
      at = next;
    }
    if (shape.empty()) throw pufferfish::value_error("--input-shape " + text + ": not NAME=1x3x224x224");
  }
  return shapes;
}

/// A form of a model in an ONNX file. Nodes are its layers; the last ones complete their gradients first.
inline form onnx_form(const step_options& o, const std::string& name, const std::string& path,
                      const onnx_shapes& shapes) {
  const onnx_cost cost = cost_of_onnx(path, shapes);
  sample_cost of{{}, cost.outputs / cost.samples};
  gradient_sizes gradients;
  for (const onnx_node_cost& node : cost.nodes) {
    pufferfish::layer_cost& layer = of.layers.layers.emplace_back();
    layer.macs = std::llround(node.macs / cost.samples);
    for (auto shape : node.constants) {
      while (shape.size() > 1 && shape[0] == 1) shape.erase(shape.begin());
      const index_t size = std::accumulate(shape.begin(), shape.end(), index_t{1}, std::multiplies<>());
      layer.parameters += size;
      gradients.push_back(as_matrix(shape.empty() ? 1 : shape[0], size));
    }
  }
  std::reverse(gradients.begin(), gradients.end());
  return form_of(o, name, gradients, of);
}

/// The forms of an ONNX model: dense, and those that factorize_onnx writes without options ("hybrid") and
/// with each budget, parts of the parameters. Each is written to a temporary folder and read again. Empty
/// `statistics`: none. Errors are those of factorize_onnx and cost_of_onnx.
inline std::vector<form> onnx_forms(const step_options& o, const std::string& path, const onnx_shapes& shapes,
                                    const std::string& statistics, const std::vector<double>& budgets) {
  using namespace pufferfish;
  std::optional<network_statistics> seen;
  if (!statistics.empty()) seen = read_statistics(statistics);
  const pufferfish::detail::work_folder folder((std::filesystem::temp_directory_path() / "plan").string());
  const std::string out = folder / "low.onnx";
  std::vector<form> forms{onnx_form(o, "dense", path, shapes)};
  const auto add = [&](const std::string& name, index_t budget) {
    weight_policy policy;
    policy.budget = budget;
    policy.statistics = seen ? &*seen : nullptr;
    policy.threads = threads_for(0, 1);
    const onnx_report report = factorize_onnx(path, out, policy);
    form& made = forms.emplace_back(onnx_form(o, name, out, shapes));
    if (!seen) return;
    made.predicted_loss = 0.0;
    made.kept = 1.0;
    for (const weight_result& one : report.tensors) {
      if (!one.factorized) continue;
      made.predicted_loss += one.predicted_loss;
      made.kept = std::min(made.kept, one.weighted_energy);
    }
  };
  add("hybrid", 0);
  const auto whole = static_cast<double>(forms.front().parameters);
  for (const double budget : budgets)
    add(format("budget %g", budget), std::max<index_t>(1, static_cast<index_t>(budget * whole)));
  return in_order(std::move(forms));
}

}  // namespace examples
