// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Predicts, before any training, what a step costs with each form of a network and each way to send its
// gradients:
//   build/examples/plan --model resnet18_cifar --ranks 8 64 --gbit 1
//   build/examples/plan --model resnet18_cifar --weights trained.safetensors --statistics seen.safetensors
//   build/examples/plan --model resnet50.onnx --statistics seen.safetensors

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/transformer.hpp>
#include <pufferfish/models/weights.hpp>
#include <pufferfish/weights/statistics.hpp>

#include "common/console.hpp"
#include "common/models.hpp"
#include "common/plot.hpp"
#include "common/session.hpp"
#include "common/training_form.hpp"
#ifdef PUFFERFISH_EXAMPLES_ONNX
#include "common/onnx_forms.hpp"
#endif

namespace {

using namespace examples;
using pufferfish::factorize_policy;

struct options : step_options {
  model_choice model{.name = "resnet18_cifar"};
  std::vector<index_t> image{32, 32, 3};
  index_t classes = 10;
  std::string weights, statistics, json, plot;
  std::vector<std::string> input_shapes;
  std::vector<double> budgets{0.7, 0.5, 0.35, 0.25};
  std::vector<std::string> compressors{"none", "bf16", "powersgd", "signum"};
  std::vector<int> ranks{2, 8, 64};
  double gbit = 1.0, latency_us = 50.0, speedup = 2.0;
};

/// The ranks of the largest rank ratio with which the network has at most `most` parameters. Throws
/// rank_error if rank 1 in all layers is too much.
template <class Net>
std::vector<pufferfish::layer_rank> even_ranks(const Net& net, factorize_policy policy, double most) {
  const auto found = pufferfish::detail::find_slots(net);
  const auto parameters = [&](const std::vector<pufferfish::layer_rank>& ranks) {
    double sum = static_cast<double>(net.parameter_count());
    for (const pufferfish::layer_rank& one : ranks) {
      for (const pufferfish::layer_info& layer : found.layers) {
        if (layer.name != one.name) continue;
        sum += static_cast<double>(pufferfish::detail::parameters_as_factors(layer, one.ranks, 0) -
                                   pufferfish::detail::parameters_as_dense(layer));
      }
    }
    return sum;
  };
  double low = 1e-6, high = 1.0;
  const auto ranks_at = [&](double ratio) {
    policy.rank = pufferfish::rank_ratio{ratio};
    return planned_ranks(net, policy);
  };
  const double least = parameters(ranks_at(low));
  if (least > most) {
    throw pufferfish::rank_error(
        format("--budgets: rank 1 in all layers leaves %.4f of the parameters",
               std::ceil(1e4 * least / static_cast<double>(net.parameter_count())) / 1e4));
  }
  for (int step = 0; step < 30; ++step) {
    const double middle = (low + high) / 2.0;
    (parameters(ranks_at(middle)) <= most ? low : high) = middle;
  }
  return ranks_at(low);
}

/// All forms of a network, the largest first: dense, `hybrid`, and one for each budget. With trained weights,
/// their decompositions distribute a budget among the layers; otherwise all layers get the same rank ratio.
template <class Net, class Cost>
std::vector<form> forms_of(const options& o, Net dense, const factorize_policy& hybrid,
                           const factorize_policy& budgets, const Cost& cost) {
  std::optional<pufferfish::network_statistics> seen;
  if (!o.weights.empty()) load_weights(dense, pufferfish::safetensors_file::read(o.weights));
  if (!o.statistics.empty()) {
    seen = pufferfish::read_statistics(o.statistics);
    for (pufferfish::layer_statistics& layer : seen->layers) {
      if (layer.name.ends_with(".weight")) layer.name.resize(layer.name.size() - 7);
    }
  }
  std::vector<form> forms{form_of(o, "dense", sizes_of(dense.store()), cost(dense))};
  const auto add = [&](const std::string& name, const factorize_policy& policy, bool decompose, auto ranks) {
    Net net = dense;
    double loss = not_counted;
    if (decompose) {
      loss = factorize(net, policy, seen ? &*seen : nullptr).predicted_loss();
    } else {
      apply_ranks(net, ranks());
    }
    forms.push_back(form_of(o, name, sizes_of(net.store()), cost(net)));
    forms.back().predicted_loss = loss;
  };
  add("hybrid", hybrid, !o.weights.empty(), [&] { return planned_ranks(dense, hybrid); });
  for (const double budget : o.budgets) {
    factorize_policy policy = budgets;
    policy.budget.emplace().fraction = budget;
    add(format("budget %g", budget), policy, !o.weights.empty(),
        [&] { return even_ranks(dense, budgets, budget * static_cast<double>(dense.parameter_count())); });
  }
  return in_order(std::move(forms));
}

bool is_onnx(const options& o) { return o.model.name.ends_with(".onnx"); }

std::vector<form> forms_of(const options& o) {
  using namespace pufferfish;
#ifdef PUFFERFISH_EXAMPLES_ONNX
  if (is_onnx(o)) return onnx_forms(o, o.model.name, input_shapes(o.input_shapes), o.statistics, o.budgets);
#endif
  if (o.model.name == "lstm_wikitext2") {
    return forms_of(o, model<lstm_lm<float>>(lstm_lm<float>(lstm_lm_options{})), lstm_lm_policy(),
                    lstm_lm_policy(), [](const auto& net) {
                      return sample_cost{net.root().cost(1), not_counted};
                    });
  }
  if (o.model.name == "transformer_multi30k") {
    return forms_of(o, model<transformer<float>>(transformer<float>(transformer_options{})),
                    transformer_policy(), transformer_policy(), [](const auto& net) {
                      return sample_cost{net.root().cost(20, 20), not_counted};
                    });
  }
  extents<4> image{1, o.image[0], o.image[1], o.image[2]};
  index_t classes = o.classes;
  factorize_policy hybrid = factorize_policy::paper();
  for (const auto& model : zoo<float>()) {
    if (model.name != o.model.name) continue;
    image = model.image;
    classes = model.classes;
    hybrid = model.hybrid();
  }
  return forms_of(o, build_model(o.model, image, classes), hybrid, {}, [&](const network<float>& net) {
    sample_cost cost{cost_of(net, image), 0.0};
    for (const layer_summary& layer : net.summary(image))
      cost.outputs += static_cast<double>(volume<4>(layer.output));
    return cost;
  });
}

/// One way to train: a form of the network and a way to send its gradients.
struct way {
  const form* network;
  std::string compressor;
  std::vector<double> seconds;  ///< of a step, for each number of ranks

  std::string name() const { return network->name + (compressor == "none" ? "" : " with " + compressor); }
};

std::vector<way> ways_of(const options& o, const std::vector<form>& forms) {
  std::vector<way> ways;
  for (const form& network : forms) {
    for (const std::string& compressor : o.compressors) {
      way& one = ways.emplace_back(way{&network, compressor, {}});
      for (const int ranks : o.ranks) {
        const link_times to(1e-6 * o.latency_us, o.gbit * 1e9 / 8.0, ranks);
        one.seconds.push_back(step_seconds(network.work, compressor, to));
      }
    }
  }
  return ways;
}

/// The first way, in the order of the table, whose step is `speedup` times as fast as the dense network's;
/// the fastest if there is none.
const way& chosen(const options& o, const std::vector<way>& ways, std::size_t column) {
  const double most = ways.front().seconds[column] / o.speedup;
  const auto found =
      std::find_if(ways.begin(), ways.end(), [&](const way& one) { return one.seconds[column] <= most; });
  return found != ways.end() ? *found
                             : *std::min_element(ways.begin(), ways.end(), [&](const way& a, const way& b) {
                                 return a.seconds[column] < b.seconds[column];
                               });
}

std::string table_of(const options& o, const std::vector<way>& ways) {
  std::vector<std::string> head{"network", "compressor", "parameters",  "of dense",
                                "MACs",    "memory, MB", "bytes a step"};
  for (const int ranks : o.ranks) head.push_back("ms, " + counted(ranks, "rank"));
  // Statistics of outputs only say how much of them factors keep.
  const bool kept = std::any_of(ways.begin(), ways.end(), [](const way& one) {
    return !std::isnan(one.network->kept) && std::isnan(one.network->predicted_loss);
  });
  if (!o.statistics.empty()) head.emplace_back(kept ? "least of outputs" : "predicted loss");
  text_table table(head);
  const form& dense = *ways.front().network;
  const form* before = nullptr;
  for (const way& one : ways) {
    const form& net = *one.network;
    std::vector<std::string> row{"", one.compressor, "", "", "", ""};
    if (before != &net) {
      row = {net.name,
             one.compressor,
             grouped(net.parameters),
             format("%.1f %%",
                    100.0 * static_cast<double>(net.parameters) / static_cast<double>(dense.parameters)),
             grouped(net.macs),
             std::isnan(net.memory) ? "" : format("%.0f", net.memory / 1e6)};
    }
    row.push_back(grouped(std::llround(payload(net.work, one.compressor))));
    for (const double seconds : one.seconds) row.push_back(format("%.1f", 1e3 * seconds));
    const double shown = kept ? net.kept : net.predicted_loss;
    if (before != &net && !std::isnan(shown)) row.push_back(format(kept ? "%.4f" : "%.3g", shown));
    before = &net;
    table.add(row);
  }
  return table.str();
}

std::string advice(const options& o, const std::vector<way>& ways, std::size_t column) {
  const way& one = chosen(o, ways, column);
  const double reached = ways.front().seconds[column] / one.seconds[column];
  return format("%s, %g Gbit/s: %s, %.1f ms a step, %.2f times as fast as the first row; %s.",
                counted(o.ranks[column], "rank").c_str(), o.gbit, one.name().c_str(),
                1e3 * one.seconds[column], reached,
                reached >= o.speedup ? format("the least change for %g times", o.speedup).c_str()
                                     : format("no row reaches %g times", o.speedup).c_str());
}

/// Draws the time of a step against the share of the parameters, a line for each compressor.
std::string plot(const options& o, const std::vector<way>& ways) {
  return plotting::draw(o.plot, true, [&](const std::string& path) {
    std::string text = plotting::output(path, "1000,420");
    text += format(
        "set multiplot layout 1,%zu\nset xlabel 'parameters / %%'\nset ylabel 'ms a step'\nset yrange "
        "[0:*]\nset key top left\n",
        o.ranks.size());
    for (std::size_t column = 0; column < o.ranks.size(); ++column) {
      std::string lines;
      for (const std::string& compressor : o.compressors) {
        const std::string block = format("$%s%zu", compressor.c_str(), column);
        text += block + " << EOD\n";
        for (const way& one : ways) {
          if (one.compressor != compressor || one.network->name == "hybrid") continue;
          text += format("%g %g\n",
                         100.0 * static_cast<double>(one.network->parameters) /
                             static_cast<double>(ways.front().network->parameters),
                         1e3 * one.seconds[column]);
        }
        text += "EOD\n";
        lines += format("%s%s with linespoints lw 2 pt 7 ps 0.5 title '%s'", lines.empty() ? "plot " : ", ",
                        block.c_str(), compressor.c_str());
      }
      text += format("set title '%s, %g Gbit/s'\n", counted(o.ranks[column], "rank").c_str(), o.gbit) +
              lines + "\n";
    }
    return text + "unset multiplot\nunset output\n";
  });
}

nlohmann::ordered_json to_json(const options& o, const std::vector<way>& ways) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array(), advised = rows;
  for (const way& one : ways) {
    nlohmann::ordered_json buckets = nlohmann::ordered_json::array();
    for (const bucket& each : one.network->work.buckets) buckets.push_back({each.bytes, each.done});
    rows.push_back({{"network", one.network->name},
                    {"compressor", one.compressor},
                    {"parameters", one.network->parameters},
                    {"macs", one.network->macs},
                    {"memory_bytes", one.network->memory},
                    {"predicted_loss", one.network->predicted_loss},
                    {"outputs_kept", one.network->kept},
                    {"payload_bytes", payload(one.network->work, one.compressor)},
                    {"compute_seconds", one.network->work.compute},
                    {"seconds", one.seconds},
                    {"buckets", buckets}});
  }
  for (std::size_t column = 0; column < o.ranks.size(); ++column)
    advised.push_back(chosen(o, ways, column).name());
  return {{"model", o.model.name}, {"batch", o.batch}, {"gbit", o.gbit},     {"latency_us", o.latency_us},
          {"gmacs", o.gmacs},      {"ranks", o.ranks}, {"advised", advised}, {"ways", rows}};
}

void work(const options& o) {
  if (!o.statistics.empty() && o.weights.empty() && !is_onnx(o))
    throw pufferfish::value_error("--statistics needs --weights");
  check_writable(o.json);
  const console out(0, o.json, progress_style::none);
  const std::vector<form> forms = forms_of(o);
  const std::vector<way> ways = ways_of(o, forms);
  out.line(table_of(o, ways));
  for (std::size_t column = 0; column < o.ranks.size(); ++column) out.line(advice(o, ways, column));
  if (!o.plot.empty()) out.line(plot(o, ways));
  write_json(o.json, to_json(o, ways));
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Predicts what a training step costs, dense, factorized and compressed", "plan");
  options o;
  add_model_options(app, o.model);
  std::vector<std::string> names = pufferfish::model_names();
  names.insert(names.end(), {"lstm_wikitext2", "transformer_multi30k"});
  CLI::Option* const name = app.get_option("--model");
  name->get_validator(0)->active(false);  // knows image models only
#ifdef PUFFERFISH_EXAMPLES_ONNX
  const CLI::Validator onnx_file(
      [](const std::string& text) { return text.ends_with(".onnx") ? "" : "not FILE.onnx"; }, "FILE.onnx");
  name->check(CLI::IsMember(names) | onnx_file);
  app.add_option("--input-shape", o.input_shapes, "NAME=1x3x224x224: shape of an input of an ONNX model");
#else
  name->check(CLI::IsMember(names));
#endif
  app.add_option("--image", o.image, "Height, width and channels of the images of a small model")
      ->expected(3)
      ->check(CLI::Range(1, 65536));
  app.add_option("--classes", o.classes, "Classes of a small model")->check(CLI::Range(1, 1 << 20));
  app.add_option("--weights", o.weights, "Trained weights, whose decompositions distribute the budgets");
  app.add_option("--statistics", o.statistics,
                 "Statistics of these weights, for two-sided factors and predicted losses");
  app.add_option("--budgets", o.budgets, "Parts of the parameters")->check(CLI::Range(1e-6, 1.0));
  app.add_option("--compressors", o.compressors, "Ways to send gradients")
      ->check(CLI::IsMember({"none", "bf16", "powersgd", "signum"}));
  app.add_option("--compress-rank", o.compress_rank, "Rank of PowerSGD")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--ranks", o.ranks, "Numbers of ranks")->check(CLI::Range(1, 1 << 20));
  app.add_option("--gbit", o.gbit, "Rate of a rank's link in Gbit/s, each way")
      ->check(CLI::Range(1e-6, 1e6))
      ->capture_default_str();
  app.add_option("--latency-us", o.latency_us, "Latency of a message in microseconds")
      ->check(CLI::Range(0.0, 1e9))
      ->capture_default_str();
  app.add_option("--batch", o.batch, "Samples of a rank in a step: images, tokens, pairs of 20 + 20 tokens")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  app.add_option("--gmacs", o.gmacs, "Billions of multiply-adds that a rank computes in a second of training")
      ->check(CLI::Range(1e-3, 1e7))
      ->capture_default_str();
  app.add_option("--speedup", o.speedup, "Least speedup over the dense step of the row to recommend")
      ->check(CLI::Range(1.0, 1e6))
      ->capture_default_str();
  app.add_option("--plot", o.plot, "Draw the time of a step against the budget (.svg or .png; needs gnuplot)")
      ->check(check_plot_name);
  app.add_option("--json", o.json, "Write results to a file, or - for standard output");
  return run_on_first(app, argc, argv, [&] {
    for (const char* own :
         {"--weights", "--width", "--blocks", "--stem-stride", "--no-batch-norm", "--image", "--classes"}) {
      if (is_onnx(o) && app.count(own) > 0)
        throw pufferfish::value_error(format("%s is for networks by name, not for ONNX models", own));
    }
    work(o);
  });
}
