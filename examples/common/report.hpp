// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Training results as tables, JSON and curves.

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <pufferfish/train/host_mirror.hpp>
#include <pufferfish/train/options.hpp>

#include "plot.hpp"
#include "text.hpp"

namespace examples {

/// The parameters' digest as text: equal for equal bits.
template <class Root, class Device>
std::string digest_text(const pufferfish::model<Root, Device>& net) {
  return format("%016llx", static_cast<unsigned long long>(pufferfish::parameter_digest(net)));
}

/// Costs of one network.
struct costs {
  pufferfish::index_t parameters = 0;
  pufferfish::index_t macs = 0;            ///< of the forward pass of one image
  pufferfish::index_t bytes_per_step = 0;  ///< payload of one gradient all-reduce
};

inline nlohmann::ordered_json to_json(const costs& c) {
  return {{"parameters", c.parameters}, {"macs", c.macs}, {"bytes_per_step", c.bytes_per_step}};
}

/// Report of the switch: each factorized matrix; with `explain`, every layer with its cost
/// and the reason for its rank.
inline std::string switch_table(const pufferfish::factorization& factors, bool explain = false) {
  if (explain) {
    pufferfish::network_cost rest{static_cast<double>(factors.parameters_before), 0.0, 0.0};
    for (const pufferfish::rank_row& row : factors.rows) rest.parameters -= row.before.parameters;
    return pufferfish::rank_table(factors.rows, rest);
  }
  text_table table({"layer", "matrix", "rank", "kept energy", "relative error", "weighted", "predicted loss",
                    "parameters", "after"});
  for (const pufferfish::factor_report& layer : factors.layers) {
    table.add({layer.name, format("%td x %td", layer.rows, layer.cols), std::to_string(layer.rank),
               format("%.4f", layer.kept_energy), format("%.4f", layer.relative_error),
               format("%.4f", layer.weighted_energy),
               std::isnan(layer.predicted_loss) ? "-" : format("%.2e", layer.predicted_loss),
               grouped(layer.parameters_before), grouped(layer.parameters_after)});
  }
  table.add({"whole network", "", "", format("%.4f", factors.kept_energy()), "", "",
             factors.layers.empty() || std::isnan(factors.predicted_loss())
                 ? "-"
                 : format("%.2e", factors.predicted_loss()),
             grouped(factors.parameters_before), grouped(factors.parameters_after)});
  return table.str();
}

inline nlohmann::ordered_json to_json(const pufferfish::epoch_result& epoch) {
  nlohmann::ordered_json j{{"epoch", epoch.epoch + 1},
                           {"low_rank", epoch.low_rank},
                           {"learning_rate", epoch.learning_rate},
                           {"train_loss", epoch.train_loss},
                           {"train_accuracy", epoch.train_accuracy},
                           {"test_loss", epoch.test_loss},
                           {"test_accuracy", epoch.test_accuracy},
                           {"seconds", epoch.seconds},
                           {"ms_per_step", epoch.step_ms},
                           {"exchange_ms", epoch.exchange_ms},
                           {"parameters", epoch.parameters},
                           {"macs", epoch.macs},
                           {"bytes_per_step", epoch.bytes_per_step}};
  if (epoch.test_top5 > 0.0) j["test_top5"] = epoch.test_top5;
  return j;
}

/// The rows of --explain. Numbers that are not known are null.
inline nlohmann::ordered_json to_json(const pufferfish::rank_row& row) {
  const auto whole = [](double value) -> nlohmann::ordered_json {
    if (!std::isfinite(value)) return nullptr;
    return std::llround(value);
  };
  nlohmann::ordered_json j = {{"name", row.name},
                              {"rows", row.size.rows},
                              {"cols", row.size.cols},
                              {"count", row.count},
                              {"full_rank", row.full_rank()},
                              {"dense", row.dense},
                              {"rank", nullptr},
                              {"parameters_before", whole(row.before.parameters)},
                              {"parameters_after", whole(row.after.parameters)},
                              {"macs_before", whole(row.before.macs)},
                              {"macs_after", whole(row.after.macs)},
                              {"weighted_energy", row.weighted_energy},
                              {"predicted_loss", row.predicted_loss},
                              {"why", row.why}};
  if (row.rank > 0) j["rank"] = row.rank;
  if (row.before.milliseconds > 0.0) {
    j["ms_before"] = row.before.milliseconds;
    j["ms_after"] = row.after.milliseconds;
  }
  return j;
}

inline nlohmann::ordered_json to_json(const pufferfish::switch_result& result) {
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  for (const pufferfish::factor_report& layer : result.factors.layers) {
    layers.push_back({{"name", layer.name},
                      {"rows", layer.rows},
                      {"cols", layer.cols},
                      {"rank", layer.rank},
                      {"kept_energy", layer.kept_energy},
                      {"truncation_error", layer.truncation_error},
                      {"relative_error", layer.relative_error},
                      {"weighted_energy", layer.weighted_energy},
                      {"predicted_loss", layer.predicted_loss},
                      {"parameters_before", layer.parameters_before},
                      {"parameters_after", layer.parameters_after}});
  }
  nlohmann::ordered_json j = {{"after_epochs", result.epoch},
                              {"why", result.why},
                              {"milliseconds", result.milliseconds},
                              {"kept_energy", result.factors.kept_energy()},
                              {"predicted_loss", result.factors.predicted_loss()},
                              {"parameters_before", result.factors.parameters_before},
                              {"parameters_after", result.factors.parameters_after},
                              {"layers", layers},
                              {"rows", nlohmann::ordered_json::array()}};
  for (const pufferfish::rank_row& row : result.factors.rows) j["rows"].push_back(to_json(row));
  const auto add_test = [&j](const std::string& name, const std::optional<pufferfish::evaluation>& tested) {
    if (!tested) return;
    j["accuracy_" + name] = tested->accuracy();
    j["loss_" + name] = tested->loss();
  };
  add_test("before", result.before);
  add_test("after", result.after);
  add_test("estimated", result.estimated);
  for (const pufferfish::stage_time& stage : result.stages) {
    j["stages"].push_back({{"first", stage.first},
                           {"last", stage.last},
                           {"dense_ms", stage.dense_ms},
                           {"low_rank_ms", stage.low_rank_ms},
                           {"gain", stage.gain()}});
  }
  return j;
}

/// The switch of a run, with the number of steps whose statistics it went by. Run: a pufferfish::training_run
/// that has switched.
template <class Run>
nlohmann::ordered_json switch_result_json(const Run& run) {
  nlohmann::ordered_json j = to_json(*run.switched());
  j["statistics_steps"] = std::min(run.options().switching.statistics_steps, run.steps_per_epoch());
  return j;
}

/// Median of the epochs' median step times, in ms, over the dense or low-rank epochs; 0 if there were none.
inline double step_ms(const std::vector<pufferfish::epoch_result>& history, bool low_rank) {
  std::vector<double> values;
  for (const pufferfish::epoch_result& epoch : history) {
    if (epoch.low_rank == low_rank) values.push_back(epoch.step_ms);
  }
  return median(values);
}

/// Facts of a run that a plot needs besides its history.
struct run_facts {
  std::optional<pufferfish::switch_result> switched;
  pufferfish::index_t steps_per_epoch = 0;
  pufferfish::index_t bytes_before = 0, bytes_after = 0;  ///< per step, before and after the switch
};

template <class Run>
run_facts facts_of(const Run& run, pufferfish::index_t bytes_before) {
  return {run.switched(), run.steps_per_epoch(), bytes_before, run.exchange_bytes()};
}

/// Share, from 0 to 1, of the steps' time on the clock in which a rank waited for the exchange after the
/// backward pass, over the dense or the low-rank epochs; 0 if there were none.
inline double waiting_share(const std::vector<pufferfish::epoch_result>& history, const run_facts& facts,
                            bool low_rank) {
  double waiting = 0.0, all = 0.0;
  for (const pufferfish::epoch_result& epoch : history) {
    if (epoch.low_rank != low_rank) continue;
    waiting += 1e-3 * epoch.exchange_ms * static_cast<double>(facts.steps_per_epoch);
    all += epoch.seconds;
  }
  return all > 0.0 ? waiting / all : 0.0;
}

/// `perplexity`: shows the perplexity of the test loss instead of the accuracy.
inline curve to_curve(const std::string& name, const std::vector<pufferfish::epoch_result>& history,
                      const run_facts& facts, bool perplexity = false) {
  curve c;
  c.name = name;
  double seconds = 0.0, bytes = 0.0;
  if (facts.switched) c.switch_epoch = static_cast<double>(facts.switched->epoch);
  for (const pufferfish::epoch_result& epoch : history) {
    seconds += epoch.seconds;
    if (facts.switched && epoch.epoch == facts.switched->epoch)
      seconds += 1e-3 * facts.switched->milliseconds;
    bytes += static_cast<double>(facts.steps_per_epoch) *
             static_cast<double>(epoch.low_rank ? facts.bytes_after : facts.bytes_before);
    c.accuracy.push_back(perplexity ? std::exp(epoch.test_loss) : epoch.test_accuracy);
    c.loss.push_back(epoch.test_loss);
    c.seconds.push_back(seconds);
    c.bytes.push_back(bytes);
  }
  return c;
}

}  // namespace examples
