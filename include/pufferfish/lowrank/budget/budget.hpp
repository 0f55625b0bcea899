// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `allocate`: chooses the ranks of all layers of a network under one budget.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/lowrank/budget/budget_layer.hpp>
#include <pufferfish/lowrank/budget/budget_search.hpp>
#include <pufferfish/lowrank/budget/network_budget.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Throws value_error, naming the layer, unless `value` is a finite number of at least 0.
inline void check_amount(const budget_layer& layer, const char* what, double value) {
  if (value >= 0.0 && std::isfinite(value)) return;
  throw_error<value_error>({"allocate: ", layer.name, ": ", what, " ", value, " is not a cost"});
}

/// Throws value_error, naming the layer, unless the gains of a group are finite, not negative, not ascending,
/// and at least min(rows, cols) in number.
inline void check_gains(const budget_layer& layer, const budget_group& group) {
  const auto full = static_cast<std::size_t>(std::min(group.size.rows, group.size.cols));
  if (group.gains.size() < full) {
    throw_error<value_error>({"allocate: ", layer.name, ": ", group.gains.size(), " gains for a ",
                              group.size.rows, " x ", group.size.cols, " matrix; it has ", full,
                              " components"});
  }
  double before = std::numeric_limits<double>::max();
  for (std::size_t i = 0; i < full; ++i) {
    const double gain = group.gains[i];
    if (gain >= 0.0 && gain <= before) {
      before = gain;
      continue;
    }
    if (gain > before && std::isfinite(gain)) {
      throw_error<value_error>({"allocate: ", layer.name, ": gain ", i, " is ", gain, " after ", before,
                                "; gains must not ascend"});
    }
    throw_error<value_error>(
        {"allocate: ", layer.name, ": gain ", i, " is ", gain, "; gains must be finite and not negative"});
  }
}

/// Throws value_error, naming the layer, unless `layer` has at least one group and its sizes, gains and costs
/// are valid. `timed`: the budget limits milliseconds, so the layer must have a measured time.
inline void check_budget_layer(const budget_layer& layer, bool timed) {
  if (layer.groups.empty()) throw_error<value_error>({"allocate: ", layer.name, " has no matrices"});
  for (const budget_group& group : layer.groups) {
    if (group.size.rows < 0 || group.size.cols < 0 || group.count < 1 || group.extra_parameters < 0) {
      throw_error<value_error>({"allocate: ", layer.name, ": ", group.count, " matrices of ", group.size.rows,
                                " x ", group.size.cols, " with ", group.extra_parameters,
                                " extra parameters"});
    }
    check_gains(layer, group);
    check_amount(layer, "products", group.products);
    check_amount(layer, "lookups", group.lookups);
    check_amount(layer, "ms_per_rank", group.ms_per_rank);
  }
  check_amount(layer, "dense_ms", layer.dense_ms);
  check_amount(layer, "low_rank_ms", layer.low_rank_ms);
  if (timed && !(layer.dense_ms > 0.0)) {
    throw_error<value_error>(
        {"allocate: ", layer.name, ": the budget limits milliseconds, but the layer has no measured time"});
  }
}

/// Throws value_error, naming the layer, for input that `allocate` cannot use.
inline void check_budget_input(std::span<const budget_layer> layers, const network_cost& rest,
                               const network_budget& budget, const budget_options& options) {
  std::vector<const std::string*> names;
  for (const budget_layer& layer : layers) {
    check_budget_layer(layer, budget.milliseconds.has_value());
    names.push_back(&layer.name);
  }
  std::sort(names.begin(), names.end(), [](const auto* a, const auto* b) { return *a < *b; });
  const auto twice =
      std::adjacent_find(names.begin(), names.end(), [](const auto* a, const auto* b) { return *a == *b; });
  if (twice != names.end()) throw_error<value_error>({"allocate: two layers are called ", **twice});
  const budget_layer others{"the rest of the network", {}, 0.0, 0.0};
  check_amount(others, "parameters", rest.parameters);
  check_amount(others, "macs", rest.macs);
  check_amount(others, "milliseconds", rest.milliseconds);
  if (options.floor < 1) throw_error<value_error>({"allocate: floor ", options.floor, " is below 1"});
  if (!(options.bytes_per_parameter > 0.0) || !std::isfinite(options.bytes_per_parameter)) {
    throw_error<value_error>(
        {"allocate: bytes_per_parameter ", options.bytes_per_parameter, " is not a positive number"});
  }
}

/// Throws rank_error, naming the budget, if a limit is exceeded even with all layers at their floors.
inline void check_reachable(const budget_problem& problem, const network_cost& rest,
                            std::span<const budget_limit> limits, const budget_options& options) {
  const budget_vector others = to_vector(rest);
  for (const budget_limit& limit : limits) {
    const auto k = static_cast<std::size_t>(limit.resource);
    const double least = others[k] + problem.least(k);
    if (least <= limit.most()) continue;
    throw_error<rank_error>({"allocate: ", limit.asked, " cannot be met: the least that can be reached is ",
                             limit.per_unit > 0.0 ? least / limit.per_unit : least,
                             " (ranks at the floor of ", options.floor, ", or dense where that costs less)"});
  }
}

}  // namespace detail

/// Chooses ranks for `layers` that minimize the predicted loss (the sum of dropped gains), while the whole
/// network, with `rest` for everything except these layers, stays within all limits of `budget`. Returns one
/// choice per layer, in the order given.
///
///     network_budget budget;
///     budget.fraction = 0.3;
///     for (const budget_choice& choice : allocate(layers, rest, budget)) ...  // choice.ranks
///
/// Each matrix starts at rank `options.floor`. Components of all layers are then added in the order of gain /
/// cost. A layer stays dense (loss 0) if the gains lost by its factors exceed the gains that the saved costs
/// could buy in other layers. It also stays dense if factors at the floor do not have fewer parameters or,
/// under a limit of time, do not take less time. Budget left at the end is spent on the next best components
/// that fit. If the dense network is within the limits, all layers stay dense.
///
/// Under several limits, the cost of a component is the weighted sum of its shares of the limits. A (nested)
/// bisection finds weights for which all limits hold, those of positive weight with equality as far as whole
/// ranks allow. For a fixed set of dense layers this is the Lagrangian (surrogate) relaxation of a knapsack
/// problem. A branch and bound search chooses that set; it stops after a fixed amount of work.
///
/// With one limit, the predicted loss exceeds the minimum by less than the gain of one component, unless the
/// search stopped early. The result depends neither on the order of the layers nor on the number of threads;
/// ties are broken by name, then by group.
///
/// Runs in the calling thread; the search stops branching after 5 to 20 ms. `layers` and `rest` are read
/// during the call only.
///
/// Throws value_error, naming the layer, for gains that are too few, negative, not finite or ascending; for
/// costs that are negative or not finite; for a layer without groups; for a duplicate name; and for a limit
/// of time without a measured time. Also throws value_error for limits that are not positive numbers, and for
/// a budget without limits. Throws rank_error for a limit that cannot be met even at the floor, with the
/// least reachable value, and for limits that cannot be met at once.
PUFFERFISH_COLD inline std::vector<budget_choice> allocate(std::span<const budget_layer> layers,
                                                           const network_cost& rest,
                                                           const network_budget& budget,
                                                           const budget_options& options = {}) {
  using namespace detail;
  check_budget_input(layers, rest, budget, options);
  const std::vector<budget_limit> limits =
      limits_of(budget, cost_of(layers, rest), options.bytes_per_parameter);
  const budget_problem problem(layers, options, budget.milliseconds.has_value());
  check_reachable(problem, rest, limits, options);

  budget_search search(problem, to_vector(rest), limits);
  std::optional<budget_problem::state> found = problem.all_dense();
  const bool fits = search.holds(found->cost);
  if (!fits) found = search();
  if (!found) {
    throw_error<rank_error>(
        {"allocate: ", describe(budget), " cannot be met: each limit can be reached, but not all at once"});
  }

  std::vector<budget_choice> choices(layers.size());
  for (std::size_t i = 0; i < problem.layers().size(); ++i) {
    const budget_problem::layer& layer = problem.layers()[i];
    budget_choice& choice = choices[layer.index];
    if (found->dense[i] != 0) {
      choice.reason = fits ? budget_reason::fits : layer.low_rank ? budget_reason::worth : layer.otherwise;
      continue;
    }
    bool floor = true;
    for (std::size_t g = layer.first; g < layer.first + layer.groups; ++g) {
      choice.ranks.push_back(found->ranks[g]);
      floor = floor && found->ranks[g] == problem.groups()[g].floor;
    }
    choice.predicted_loss = problem.lost(layer, *found);
    const double all = problem.all_gains(layer);
    choice.weighted_energy = all > 0.0 ? std::max(0.0, 1.0 - choice.predicted_loss / all) : 1.0;
    choice.reason = choice.predicted_loss == 0.0 ? budget_reason::lossless
                    : floor                      ? budget_reason::floor
                                                 : budget_reason::budget;
  }
  return choices;
}

PUFFERFISH_NAMESPACE_END
