// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Converts whole networks from dense to low rank (`factorize`) and back (`merge`).
///
/// \code
/// network<float> net = small_resnet<float>({});
/// ...                                                    // train for some epochs
/// const factorization made = factorize(net, factorize_policy::paper());  // ratio 1/4, plain truncation
/// std::printf("%td -> %td parameters", made.parameters_before, made.parameters_after);
/// SGD<float> optimizer(make_optimizer_target(net.store()), options);  // the old optimizer is of no use
/// ...                                                    // train on
/// merge(net);                                            // if a dense network is needed
/// \endcode

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/parallel.hpp>
#include <pufferfish/lowrank/budget/network_ranks.hpp>
#include <pufferfish/lowrank/factorization/factorize.hpp>
#include <pufferfish/nn/merge.hpp>
#include <pufferfish/nn/network.hpp>
#include <pufferfish/nn/slot_finder.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Result of factorizing a network.
struct factorization {
  std::vector<factor_report> layers;    ///< each matrix of the factorized layers, in execution order
  std::vector<layer_rank> low_rank;     ///< the factorized layers
  std::vector<std::string> kept_dense;  ///< layers that the policy chose, but that would have grown
  std::vector<rank_row> rows;           ///< for rank_table: all layers, with ranks, costs and reasons
  index_t parameters_before = 0;        ///< of the whole network
  /// Of the whole network; at the switch of a training run with the batch norms inserted between factors.
  index_t parameters_after = 0;

  /// Over all factorized layers together: sum of kept sigma^2 / sum of ||A||_F^2, A the weight matrices. 1 if
  /// no layer was factorized.
  double kept_energy() const {
    double kept = 0.0, all = 0.0;
    for (const factor_report& layer : layers) {
      kept += layer.squared_norm * layer.kept_energy;
      all += layer.squared_norm;
    }
    return all > 0.0 ? kept / all : 1.0;
  }

  /// Predicted growth of the mean loss, to second order, summed over all layers. NaN: not known for
  /// some layer.
  double predicted_loss() const {
    double sum = 0.0;
    for (const factor_report& layer : layers) sum += layer.predicted_loss;
    return sum;
  }

  /// Ranks from which apply_ranks builds the same structure on another rank of a distributed run.
  std::vector<layer_rank> ranks() const { return low_rank; }

  /// Adds a factorized layer. Layers are added in execution order.
  void add(const std::string& name, const rank_list& ranks, std::vector<factor_report> reports) {
    low_rank.push_back({name, ranks});
    for (factor_report& report : reports) layers.push_back(std::move(report));
  }
};

namespace detail {

/// Options with which the layer `name` is factorized: the policy's truncation, method, seed and rule for
/// factors that would be larger, and the layer's statistics if there are any. `statistics` may be nullptr.
inline factorize_options options_for(const std::string& name, const factorize_policy& policy,
                                     const network_statistics* statistics) {
  factorize_options options{name, policy.keep_dense_if_larger, policy.method, policy.seed};
  options.truncate = policy.truncate;
  if (statistics != nullptr) options.statistics = statistics->find(name);
  return options;
}

/// The low-rank layer with the shape, settings and biases of `dense`, and `made` as factors of its matrices.
/// weights: those of `dense`; made[i] replaces weights.matrices[i]. Matrices of one rank group have one rank.
template <class T, class Device>
any_layer<T, Device> with_factors(const any_layer<T, Device>& dense,
                                  const layer_weights<parameter_t<T>>& weights,
                                  const std::vector<factors<parameter_t<T>>>& made) {
  any_layer<T, Device> layer = dense.twin(ranks_of(weights, made));
  store_factors(made, weights.biases, layer.low_rank());
  return layer;
}

/// Makes low-rank layers to replace the layers that a policy chooses. The network itself is not changed.
template <class T, class Device>
class network_factorizer {
  using P = parameter_t<T>;
  using layer = any_layer<T, Device>;

 public:
  /// Selects the layers. The arguments must outlive the object; `statistics` may be nullptr. Throws the
  /// errors of select().
  network_factorizer(const slot_finder<T, Device>& found, const factorize_policy& policy,
                     const network_statistics* statistics)
      : found_(found),
        policy_(policy),
        statistics_(statistics),
        choices_(select(found.layers, policy)),
        decomposed_(choices_.size()) {}

  /// Returns the new layer of each slot; empty: the slot stays as it is. `parameters`: of the whole network.
  /// Sets the reports, ranks, rows and kept_dense of `result`. With a budget, the layers whose ranks it
  /// decides are decomposed first, since their gains decide the ranks; the factors then come from these
  /// decompositions.
  std::vector<std::optional<layer>> make(index_t parameters, factorization& result) {
    const std::optional<budget_request> budget =
        find_budget(found_.layers, choices_, policy_, statistics_, parameters);
    if (budget) decompose();
    result.rows = share_budget(found_.layers, choices_, budget, statistics_, parameters,
                               [this](std::size_t i) { return decomposed_[i]->gains(); });
    std::vector<std::optional<layer>> made(choices_.size());
    std::vector<std::vector<factor_report>> reports(choices_.size());
    for_each_chosen([&](std::size_t i) {
      const layer_weights<P> weights = found_.slots[i]->weights(found_.layers[i].name);
      const std::vector<factors<P>> parts = factorize_one(i, weights);
      reports[i] = reports_of(parts);
      if (!policy_.keep_dense_if_larger || shrinks(reports[i])) {
        made[i] = with_factors(*found_.slots[i], weights, parts);
      }
      decomposed_[i].reset();
    });
    report(made, std::move(reports), result);
    return made;
  }

 private:
  // Calls work(i) for each layer i that is to be factorized, on policy.threads threads. The largest layer is
  // first, so that no thread begins with a large one when the others are finished.
  template <class Work>
  void for_each_chosen(const Work& work) {
    const std::vector<std::size_t> order = decomposition_order(found_.layers);
    thread_pool(policy_.threads).run(static_cast<index_t>(order.size()), [&](index_t task, int) {
      const std::size_t i = order[static_cast<std::size_t>(task)];
      if (choices_[i].factorize()) work(i);
    });
  }

  // Options of the decomposition of layer i, with its statistics.
  factorize_options options(std::size_t i) const {
    return options_for(found_.layers[i].name, policy_, statistics_);
  }

  // Gains come from the most exact truncation that the statistics allow, even if policy.truncate is another.
  void decompose() {
    for_each_chosen([&](std::size_t i) {
      if (!choices_[i].by_budget) return;
      factorize_options how = options(i);
      how.truncate.reset();
      decomposed_[i].emplace(found_.slots[i]->weights(how.name), how);
    });
    std::vector<std::optional<truncation>> kinds(decomposed_.size());
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      if (decomposed_[i]) kinds[i] = decomposed_[i]->kind();
    }
    check_one_truncation("factorize", found_.layers, kinds);
  }

  // Factors of layer i: from the decomposition of the budget if it is of the kind of the policy, otherwise
  // computed now, at the ranks of the choice or by its rank policy.
  std::vector<factors<P>> factorize_one(std::size_t i, const layer_weights<P>& weights) const {
    const layer_choice& choice = choices_[i];
    const factorize_options how = options(i);
    if (decomposed_[i] && decomposed_[i]->kind() == chosen_truncation(how)) {
      return decomposed_[i]->make(choice.ranks);
    }
    if (choice.ranks.empty()) return factorize_weights(weights, {&choice.rank, 1}, how);
    return factorize_weights(weights, fixed_ranks(choice.ranks), how);
  }

  // Adds the made layers to `result` in execution order, and the names of chosen layers that stay dense
  // because their factors would have at least as many parameters.
  void report(const std::vector<std::optional<layer>>& made, std::vector<std::vector<factor_report>> reports,
              factorization& result) const {
    for (std::size_t i = 0; i < made.size(); ++i) {
      const std::string& name = found_.layers[i].name;
      if (made[i]) {
        result.add(name, made[i]->ranks(), std::move(reports[i]));
      } else if (choices_[i].factorize() || choices_[i].reason == dense_because::growth) {
        result.kept_dense.push_back(name);
      }
    }
    add_reports(result.rows, result.layers);
  }

  const slot_finder<T, Device>& found_;
  const factorize_policy& policy_;
  const network_statistics* statistics_;
  std::vector<layer_choice> choices_;
  std::vector<std::optional<layer_truncation<P>>> decomposed_;  // of layers whose ranks a budget decides
};

/// `factorize` with all decompositions on the host, for networks on any device.
template <class Root, class Device>
factorization factorize_on_host(model<Root, Device>& net, const factorize_policy& policy,
                                const network_statistics* statistics) {
  factorization result;
  result.parameters_before = net.parameter_count();
  net.modify([&](Root& root) {
    slot_finder<typename Root::value_type, Device> found;
    root.visit_layers(found);
    auto made = network_factorizer(found, policy, statistics).make(result.parameters_before, result);
    for (std::size_t i = 0; i < made.size(); ++i) {
      if (made[i]) *found.slots[i] = std::move(*made[i]);
    }
  });
  result.parameters_after = net.parameter_count();
  return_free_memory();
  return result;
}

}  // namespace detail

/// Replaces the layers that `policy` chooses by low-rank layers. All other layers, parameters and buffers are
/// carried over bit for bit. New arenas, a new generation: optimizers and exchanges of the old generation
/// throw from now on.
///
/// `statistics`, if given, are statistics of the network's training (nn/measure/collect_statistics.hpp). The
/// truncations and, with policy.budget or policy.share, the ranks of the layers depend on them. A layer
/// without statistics gets a plain truncation, and cannot share a budget with layers that have statistics.
///
/// policy.threads layers are decomposed at once, the largest first; the result does not depend on the number.
/// The new layers and the old ones both exist until all are made.
///
/// Throws the errors of select for an invalid policy, those of svd_factorize for weights, naming the layer,
/// and those of allocate for a budget. The network is unchanged if an exception is thrown.
template <class Root, class Device>
factorization factorize(model<Root, Device>& net, const factorize_policy& policy,
                        const network_statistics* statistics = nullptr) {
  return detail::factorize_on_host(net, policy, statistics);
}

/// The device's form: <pufferfish/gpu.hpp>.
template <class Root>
factorization factorize(model<Root, device::gpu>& net, const factorize_policy& policy);

/// Gives a dense network the structure that factorize() would: the listed layers become low-rank layers of
/// the listed ranks, with all parameters zero. No weight is decomposed. For loading checkpoints, and for
/// processes of a distributed run that receive the parameters from another process. The network gets new
/// arenas and a new generation (model::generation), so optimizers must be made again. Throws state_error for
/// a name that is not a dense layer of the network or is listed twice; rank_error for an impossible rank, or
/// if the number of ranks is not that of the layer's rank groups (matrices that share one rank). The network
/// is then unchanged.
///
///     apply_ranks(other, made.ranks());  // made: the result of factorize() in another process
///     copy_state(net, other);            // or a broadcast of net.store().values()
template <class Root, class Device>
void apply_ranks(model<Root, Device>& net, const std::vector<layer_rank>& ranks) {
  using layer = any_layer<typename Root::value_type, Device>;
  net.rearrange([&](Root& root) {
    detail::slot_finder<typename Root::value_type, Device> found;
    root.visit_layers(found);
    std::vector<std::pair<layer*, layer>> replacements;
    for (const layer_rank& wanted : ranks) {
      const auto at = std::find_if(found.layers.begin(), found.layers.end(), [&](const layer_info& one) {
        return one.name == wanted.name && !one.groups.empty();
      });
      if (at == found.layers.end()) {
        PUFFERFISH_THROW(state_error("apply_ranks: the network has no dense layer called " + wanted.name));
      }
      detail::check_ranks(*at, wanted.ranks);
      layer* const slot = found.slots[static_cast<std::size_t>(at - found.layers.begin())];
      if (std::any_of(replacements.begin(), replacements.end(),
                      [slot](const auto& one) { return one.first == slot; })) {
        PUFFERFISH_THROW(state_error("apply_ranks: the list has two entries for layer " + wanted.name));
      }
      replacements.emplace_back(slot, slot->twin(wanted.ranks));
    }
    for (auto& [slot, replacement] : replacements) *slot = std::move(replacement);
  });
}

/// Returns the layers that factorize would replace without statistics, and their ranks, without decomposing
/// any weight. Throws value_error for a policy that needs a decomposition (energy_kept, a budget). Also
/// throws the errors of select.
template <class Root, class Device>
std::vector<layer_rank> planned_ranks(const model<Root, Device>& net, const factorize_policy& policy) {
  const auto found = detail::find_slots(net);
  const std::vector<layer_choice> choices = select(found.layers, policy);
  std::vector<layer_rank> result;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (!choices[i].factorize()) continue;
    if (choices[i].ranks.empty()) {
      PUFFERFISH_THROW(value_error("planned_ranks: this policy needs the values of the weights"));
    }
    result.push_back({found.layers[i].name, choices[i].ranks});
  }
  return result;
}

/// For runs that factorize later: throws the errors of select, such as a first_layer that the network does
/// not have; and rank_error, with the smallest values that can be reached, if the network cannot meet the
/// limits of policy.budget on parameters or bytes at any ranks. Limits on multiply-adds and milliseconds need
/// measurements and are not checked. Does nothing with policy.ranks.
template <class Root, class Device>
void check_reachable(const model<Root, Device>& net, factorize_policy policy) {
  if (policy.ranks) return;
  if (!policy.budget) {
    select(detail::find_slots(net).layers, policy);
    return;
  }
  for (auto* const limit :
       {&policy.budget->macs, &policy.budget->mac_fraction, &policy.budget->milliseconds}) {
    limit->reset();
  }
  if (policy.budget->empty()) return;
  const auto found = detail::find_slots(net);
  std::vector<layer_choice> choices = select(found.layers, policy);
  const detail::budget_request request{*policy.budget, {}};
  detail::share_budget(found.layers, choices, request, nullptr, net.parameter_count(), [&](std::size_t i) {
    std::vector<std::vector<double>> gains;
    for (const matrix_group& group : found.layers[i].groups) {
      gains.emplace_back(static_cast<std::size_t>(std::min(group.size.rows, group.size.cols)), 0.0);
    }
    return gains;
  });
}

PUFFERFISH_NAMESPACE_END
