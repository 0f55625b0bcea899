// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Every model of the zoo, dense, hybrid and purely low-rank: parameters, buffers, multiply-accumulates.
// Nothing is trained or decomposed: ranks follow from the policies.
//   build/examples/model_zoo
//   build/examples/model_zoo --model resnet50 --layers
//   build/examples/model_zoo --json zoo.json

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/transformer.hpp>
#include <pufferfish/models/zoo.hpp>

#include "common/console.hpp"
#include "common/session.hpp"
#include "common/text.hpp"

namespace {

using namespace examples;
using pufferfish::factor_mode;
using pufferfish::index_t;
using pufferfish::layer_cost;
using pufferfish::layer_number;
using pufferfish::model_cost;

/// The cost of a model's forward pass, and the numbers of its layers that policies refer to.
struct counted_model {
  model_cost cost;
  std::vector<layer_number> numbers;

  /// The number of a row of the costs; 0 if the row has none.
  index_t number_of(const std::string& row) const {
    const auto found = std::find_if(numbers.begin(), numbers.end(),
                                    [&row](const layer_number& layer) { return layer.name == row; });
    return found == numbers.end() ? 0 : found->number;
  }
};

/// One model in one mode.
struct zoo_row {
  std::string model;
  factor_mode mode;
  std::string input;  ///< input of the pass
  counted_model counted;
};

struct options {
  std::string model;  ///< empty: all models
  std::string json;
  bool layers = false;

  bool wants(std::string_view name) const { return model.empty() || model == name; }
};

/// A model whose input is tokens, not images.
struct token_model {
  const char* name;
  const char* input;
  counted_model (*count)(factor_mode mode);
};

template <class Root, class... Tokens>
counted_model count_with(Root root, factor_mode mode, const pufferfish::factorize_policy& hybrid,
                         const pufferfish::factorize_policy& lowrank, Tokens... tokens) {
  pufferfish::model<Root> net(std::move(root));
  if (mode != factor_mode::dense) {
    apply_ranks(net, planned_ranks(net, mode == factor_mode::hybrid ? hybrid : lowrank));
  }
  return {net.root().cost(tokens...), numbered_layers(net)};
}

/// The hybrid language model already has low-rank factors for all recurrent matrices.
counted_model count_language_model(factor_mode mode) {
  using namespace pufferfish;
  return count_with(lstm_lm<float>(lstm_lm_options{}), mode, lstm_lm_policy(), lstm_lm_policy(), index_t{1});
}

counted_model count_translation_model(factor_mode mode) {
  using namespace pufferfish;
  return count_with(transformer<float>(transformer_options{}), mode, transformer_policy(),
                    transformer_low_rank_policy(), index_t{20}, index_t{20});
}

constexpr std::array<token_model, 2> token_models{{
    {"lstm_wikitext2", "1 token", &count_language_model},
    {"transformer_multi30k", "20 + 20 tokens", &count_translation_model},
}};

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& model : pufferfish::zoo<float>()) names.emplace_back(model.name);
  for (const token_model& model : token_models) names.emplace_back(model.name);
  return names;
}

std::vector<zoo_row> rows_of(const options& o) {
  std::vector<zoo_row> rows;
  for (const factor_mode mode : pufferfish::factor_modes) {
    for (const auto& model : pufferfish::zoo<float>()) {
      if (!o.wants(model.name)) continue;
      const std::string image = format("%tdx%td", model.image[1], model.image[2]);
      const pufferfish::network<float> net = model.make(mode);
      rows.push_back({std::string(model.name), mode, image, {model.cost(net), numbered_layers(net)}});
    }
    for (const token_model& model : token_models) {
      if (o.wants(model.name)) rows.push_back({model.name, mode, model.input, model.count(mode)});
    }
  }
  const std::vector<std::string> order = model_names();
  const auto place = [&](const zoo_row& row) { return std::find(order.begin(), order.end(), row.model); };
  std::stable_sort(rows.begin(), rows.end(),
                   [&](const zoo_row& a, const zoo_row& b) { return place(a) < place(b); });
  return rows;
}

std::string table_of(const std::vector<zoo_row>& rows) {
  text_table table({"model", "mode", "input", "parameters", "of dense", "buffers", "MACs", "MACs (paper)"});
  double dense = 1.0;
  for (const zoo_row& row : rows) {
    const layer_cost total = row.counted.cost.total();
    if (row.mode == factor_mode::dense) dense = static_cast<double>(total.parameters);
    table.add({row.model, to_string(row.mode), row.input, grouped(total.parameters),
               format("%.1f %%", 100.0 * static_cast<double>(total.parameters) / dense),
               grouped(total.buffers), grouped(total.macs), grouped(total.macs_paper)});
  }
  return table.str();
}

/// Layers with parameters or multiply-accumulates.
std::vector<layer_cost> working_layers(const model_cost& cost) {
  std::vector<layer_cost> layers;
  for (const layer_cost& layer : cost.layers) {
    if (layer.parameters > 0 || layer.macs > 0) layers.push_back(layer);
  }
  return layers;
}

std::string layer_table_of(const zoo_row& row) {
  text_table table({row.model + ", " + to_string(row.mode), "layer", "rank", "parameters", "MACs"});
  for (const layer_cost& layer : working_layers(row.counted.cost)) {
    const index_t number = row.counted.number_of(layer.name);
    table.add({layer.name, number > 0 ? std::to_string(number) : "",
               layer.rank > 0 ? std::to_string(layer.rank) : "", grouped(layer.parameters),
               grouped(layer.macs)});
  }
  return table.str();
}

nlohmann::ordered_json to_json(const zoo_row& row) {
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  for (const layer_cost& layer : working_layers(row.counted.cost)) {
    layers.push_back({{"name", layer.name},
                      {"number", row.counted.number_of(layer.name)},
                      {"parameters", layer.parameters},
                      {"macs", layer.macs},
                      {"rank", layer.rank}});
  }
  const layer_cost total = row.counted.cost.total();
  return {{"model", row.model}, {"mode", to_string(row.mode)},    {"parameters", total.parameters},
          {"macs", total.macs}, {"macs_paper", total.macs_paper}, {"buffers", total.buffers},
          {"layers", layers}};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Parameters, buffers and multiply-accumulates of every model of the zoo", "model_zoo");
  options o;
  app.add_option("--model", o.model, "One of them only")->check(CLI::IsMember(model_names()));
  app.add_flag("--layers", o.layers, "Layer by layer, too");
  app.add_option("--json", o.json, "Write results to a file, or - for standard output");
  return run_on_first(app, argc, argv, [&o] {
    check_writable(o.json);
    const console out(0, o.json, progress_style::none);
    const std::vector<zoo_row> rows = rows_of(o);
    if (o.layers) {
      for (const zoo_row& row : rows) out.line(layer_table_of(row));
    }
    out.write(table_of(rows));
    nlohmann::ordered_json document = nlohmann::ordered_json::array();
    for (const zoo_row& row : rows) document.push_back(to_json(row));
    write_json(o.json, document);
  });
}
