// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `share_budget`: computes the ranks of layers from a policy's budget and the gains of the layers'
/// components. Networks, the device, adapters and weight files call this function after `select`.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/lowrank/budget/budget.hpp>
#include <pufferfish/lowrank/budget/rank_table.hpp>
#include <pufferfish/lowrank/selection.hpp>
#include <pufferfish/lowrank/statistics/layer_times.hpp>
#include <pufferfish/lowrank/statistics/network_statistics.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Throws value_error, naming two layers, if layers in one budget have gains of different truncations,
/// because the units of such gains differ. kinds[i] is the truncation of layer i, or empty if layer i is not
/// in the budget. `caller`: name of the calling function, for the error.
inline void check_one_truncation(const char* caller, const std::vector<layer_info>& layers,
                                 const std::vector<std::optional<truncation>>& kinds) {
  std::size_t first = 0;
  while (first < kinds.size() && !kinds[first]) ++first;
  for (std::size_t i = first; i < kinds.size(); ++i) {
    if (!kinds[i] || kinds[i] == kinds[first]) continue;
    throw_error<value_error>({caller, ": one budget for ", layers[first].name, ", whose statistics allow a ",
                              to_string(*kinds[first]), " truncation, and ", layers[i].name,
                              ", whose allow a ", to_string(*kinds[i]), " one"});
  }
}

/// Converts a layer to the input of `allocate` and rank_rows, without gains: sizes; products and lookups per
/// sample, from the statistics; measured times; `extra_parameters` of each group. Products are NaN if the
/// layer has no statistics.
inline budget_layer to_budget_layer(const layer_info& layer, const network_statistics* statistics,
                                    index_t extra_parameters) {
  budget_layer made;
  made.name = layer.name;
  const layer_statistics* const seen = statistics == nullptr ? nullptr : statistics->find(layer.name);
  const layer_time* const time = statistics == nullptr ? nullptr : statistics->times.find(layer.name);
  if (time != nullptr && time->ms_per_rank.size() != layer.groups.size()) {
    throw_error<rank_error>(
        {layer.name, ": times of ", time->ms_per_rank.size(), " ranks where it has ", layer.groups.size()});
  }
  for (std::size_t g = 0; g < layer.groups.size(); ++g) {
    budget_group& group = made.groups.emplace_back();
    group.size = layer.groups[g].size;
    group.count = layer.groups[g].count;
    group.extra_parameters = extra_parameters;
    group.products = unknown_number;
    if (seen != nullptr && !seen->matrices.empty() && seen->matrices.front().has_samples()) {
      const output_statistics& rows = seen->matrices.front();
      const bool table = layer.place == layer_place::embedding;
      group.products = table ? rows.tied_rows_of_sample() : rows.rows_of_sample();
      group.lookups = table ? rows.rows_of_sample() : 0.0;
    }
    if (time != nullptr) group.ms_per_rank = time->ms_per_rank[g];
  }
  if (time != nullptr) {
    made.dense_ms = time->dense_ms;
    made.low_rank_ms = time->low_rank_ms;
  }
  return made;
}

/// Whether all layers that are to be factorized have statistics of their rows and of their gradients.
inline bool have_gradients(const std::vector<layer_info>& layers, const std::vector<layer_choice>& choices,
                           const network_statistics* statistics) {
  if (statistics == nullptr) return false;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!choices[i].factorize()) continue;
    const layer_statistics* const seen = statistics->find(layers[i].name);
    const auto has = [](const output_statistics& one) { return one.has_rows() && one.has_gradients(); };
    if (seen == nullptr || seen->matrices.empty()) return false;
    if (!std::all_of(seen->matrices.begin(), seen->matrices.end(), has)) return false;
  }
  return true;
}

/// A budget and the smallest rank allowed in it.
struct budget_request {
  network_budget limits;
  budget_options options;
};

/// The budget of a network with `parameters` parameters. If policy.budget is set, the result is that budget.
/// If the layers are to share parameters (factorize_policy::share), the result is the number of parameters
/// that policy.rank would result in; the choices concerned are then marked by_budget, and their ranks are
/// cleared. Otherwise the result is empty, and each layer has the rank of its own policy.
inline std::optional<budget_request> find_budget(const std::vector<layer_info>& layers,
                                                 std::vector<layer_choice>& choices,
                                                 const factorize_policy& policy,
                                                 const network_statistics* statistics, index_t parameters) {
  if (policy.ranks) return {};
  if (policy.budget) return budget_request{*policy.budget, {}};
  if (!policy.share || needs_spectrum(policy.rank) || !have_gradients(layers, choices, statistics)) return {};
  bool any = false;
  budget_request request;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const bool own = layers[i].place == layer_place::embedding && policy.embedding_rank;
    if (!choices[i].factorize() || own) continue;
    parameters += parameters_as_factors(layers[i], choices[i].ranks, choices[i].extra_parameters) -
                  parameters_as_dense(layers[i]);
    for (const index_t rank : choices[i].ranks) {
      request.options.floor = std::min(request.options.floor, rank);
    }
    choices[i].ranks.clear();
    choices[i].by_budget = any = true;
  }
  if (!any) return {};
  request.limits.parameters = parameters;
  return request;
}

/// Sets the products of each group to 1 where they are unknown (NaN). If the budget limits multiply-adds, an
/// unknown number throws value_error instead, naming the layer.
inline void settle_products(const network_budget& budget, budget_layer& layer) {
  for (budget_group& group : layer.groups) {
    if (std::isfinite(group.products)) continue;
    if (budget.macs || budget.mac_fraction) {
      throw_error<value_error>({layer.name, ": the budget limits multiply-adds (", describe(budget),
                                "), but no statistics say how many rows a sample shows this layer"});
    }
    group.products = 1.0;
  }
}

/// Stands for the argument `gains_of` of share_budget if no layer is in a budget.
inline std::vector<std::vector<double>> no_gains(std::size_t) { return {}; }

/// Sets the ranks of all choices that are marked by_budget, or their reason to stay dense (`allocate`).
/// Returns the rows of rank_table for all layers. `parameters`: number of parameters of the whole dense
/// network. gains_of(i): gains of layer i, one list per rank group. Throws the errors of `allocate`, and
/// value_error for a budget of multiply-adds without statistics of a layer.
template <class GainsOf>
std::vector<rank_row> share_budget(const std::vector<layer_info>& layers, std::vector<layer_choice>& choices,
                                   const std::optional<budget_request>& budget,
                                   const network_statistics* statistics, index_t parameters,
                                   GainsOf&& gains_of) {
  std::vector<budget_layer> all, asked;
  std::vector<std::size_t> places;
  network_cost rest{static_cast<double>(parameters), 0.0, 0.0};
  for (std::size_t i = 0; i < layers.size(); ++i) {
    budget_layer& layer =
        all.emplace_back(to_budget_layer(layers[i], statistics, choices[i].extra_parameters));
    rest.parameters -= cost_of(layer).parameters;
    if (!choices[i].factorize() || !choices[i].by_budget) {
      const network_cost kept = cost_of(layer, choices[i].factorize() ? choices[i].ranks : rank_list{});
      rest = rest + network_cost{kept.parameters, std::isfinite(kept.macs) ? kept.macs : 0.0, 0.0};
      continue;
    }
    const std::vector<std::vector<double>> gains = gains_of(i);
    for (std::size_t g = 0; g < gains.size(); ++g) layer.groups[g].gains = gains[g];
    settle_products(budget->limits, asked.emplace_back(layer));
    places.push_back(i);
  }
  std::vector<budget_choice> answers;
  if (!asked.empty()) answers = allocate(asked, rest, budget->limits, budget->options);
  for (std::size_t k = 0; k < answers.size(); ++k) {
    layer_choice& choice = choices[places[k]];
    choice.ranks = answers[k].ranks;
    if (answers[k].dense()) choice.reason = dense_because::budget;
  }
  std::vector<rank_row> rows = rank_rows(all, choices);
  std::size_t row = 0, answer = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const bool own = answer < places.size() && places[answer] == i;
    for (std::size_t g = 0; g < std::max<std::size_t>(1, layers[i].groups.size()); ++g, ++row) {
      if (own) rows[row].why = to_string(answers[answer].reason);
    }
    if (own) ++answer;
  }
  return rows;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
