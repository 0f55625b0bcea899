// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::factorize`: replaces dense layers in a tree of libtorch modules by low-rank ones, in place.

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/torch/module_places.hpp>
#include <pufferfish/lowrank/budget/network_ranks.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {

/// A layer that stayed dense although the policy chose it, and the reason.
struct kept_layer {
  std::string name;    ///< path of the layer in the tree
  std::string reason;  ///< in words, for a report
};

/// Report of factorize.
struct factorization : pufferfish::factorization {
  /// Every layer that stayed dense although the policy chose it. `kept_dense` names those whose
  /// factors would have been larger.
  std::vector<kept_layer> kept;
  /// The module's present parameters, for a new optimizer: an old one still refers to replaced tensors.
  std::vector<Tensor> parameters;
};

namespace detail {

/// Returns the description of a place's layer for `select`. For a layer that cannot be factorized, sets
/// place.obstacle to the reason and describes the size of the first weight.
inline layer_info info_of(module_place& place) {
  layer_info info{place.name, {}};
  with_dense_layer(*place.layer, [&]<class Dense>(const Dense& dense) {
    using traits = module_traits<Dense>;
    if (traits::kind == layer_kind::embedding) info.place = layer_place::embedding;
    try {
      for (std::int64_t l = 0; l < traits::layers(dense); ++l) {
        const scalar_view<Dense, float> sizes(dense, l, contents::sizes);
        for (const matrix_group& group :
             pufferfish::detail::groups_of(pufferfish::detail::weights_of(sizes, place.name))) {
          info.groups.push_back(group);
        }
      }
    } catch (const value_error& e) {
      place.obstacle = e.what();
      const Tensor first = dense.parameters().front();
      info.groups = {{{first.size(0), first.numel() / std::max<std::int64_t>(first.size(0), 1)}, 1}};
    }
  });
  return info;
}

/// The factorization of one place. measure() and run() may be called for several places at the same time,
/// because neither changes the tree.
struct place_factorization {
  layer_gains gains;   ///< result of measure()
  decomposition made;  ///< result of run()
  bool grows = false;  ///< whether the factors are not smaller than the layer

  /// Computes the gains of the place's ranks, for a budget.
  void measure(const module_place& place, const factorize_options& options) {
    with_dense_layer(*place.layer, [&](const auto& dense) { gains = gains_of(dense, options); });
  }
  /// Decomposes the place's layer at the chosen ranks.
  void run(const module_place& place, const layer_choice& choice, const factorize_options& options) {
    with_dense_layer(*place.layer, [&](const auto& dense) { made = decompose(dense, choice, options); });
    grows = options.allow_growth && !pufferfish::detail::shrinks(made.reports);
  }
};

/// Applies the policy to all places. Adds to `kept` the places that the policy chooses
/// but that have an obstacle.
inline std::vector<layer_choice> choose(const std::vector<module_place>& places,
                                        const std::vector<layer_info>& infos, factorize_policy policy,
                                        std::vector<kept_layer>& kept) {
  std::map<std::string, const std::string*> obstacles;
  for (const module_place& place : places) obstacles[place.name] = &place.obstacle;
  // `select` calls also_if after its rules about places and before those about ranks.
  policy.also_if = [&, asked = policy.also_if](const std::string& name, matrix_size size) {
    if (asked && !asked(name, size)) return false;
    const std::string& obstacle = *obstacles.at(name);
    if (!obstacle.empty()) kept.push_back({name, obstacle});
    return obstacle.empty();
  };
  return select(infos, policy, "host_torch::factorize");
}

/// Returns a module's parameters, each tensor once.
inline std::vector<Tensor> parameters_of(const torch::nn::Module& m) {
  std::vector<Tensor> found;
  std::set<const void*> seen;
  for (const Tensor& t : m.parameters()) {
    if (seen.insert(t.unsafeGetTensorImpl()).second) found.push_back(t);
  }
  return found;
}
/// Number of elements of a module's parameters, each tensor once.
inline index_t parameter_count(const torch::nn::Module& m) {
  index_t count = 0;
  for (const Tensor& t : parameters_of(m)) count += t.numel();
  return count;
}

}  // namespace detail

/// Replaces Linear, Conv2d, Embedding, LSTM and MultiheadAttention layers below `root` that `policy` chooses
/// by low-rank ones, in place: in Sequential, ModuleList and ModuleDict, in slots (slot.hpp), and elsewhere
/// if only the tree itself refers to the layer. Layers are numbered in the order of registration, including
/// those that are low-rank already, without embeddings. Policy rules about shortcuts have no effect, because
/// libtorch's modules do not show which of them are shortcuts (use also_if).
///
///     auto report = host_torch::factorize(*net);
///     torch::optim::SGD optimizer(report.parameters, 0.1);
///
/// Names, devices, scalars, requires_grad and the training mode stay. `kept` lists, with the reason, the
/// layers that the policy chose but that stay dense: a typed member holds the layer, factors would be larger
/// or over the budget, the layer shares a tensor with another module, or its options have no low-rank form
/// (two directions, padding other than zeros, sparse gradients).
///
/// `statistics`, if given, are those of a statistics_recorder, by layer names. Truncations, and ranks under
/// policy.budget or policy.share, then minimize the estimated increase of the loss. Layers without statistics
/// get a plain truncation and cannot share a budget with others.
///
/// Throws value_error for a weight that is not finite and for a first_layer beyond the last one, rank_error
/// if the policy asks for it or for an impossible rank, and state_error if no layer can be replaced and a
/// typed member holds one of them. The module is unchanged if anything is thrown. No other thread may use the
/// module meanwhile. Decompositions run on policy.threads threads.
inline factorization factorize(torch::nn::Module& root, const factorize_policy& policy = {},
                               const network_statistics* statistics = nullptr) {
  const detail::keep_random_state keep;
  factorization result;
  result.parameters_before = detail::parameter_count(root);
  detail::place_finder finder(root);
  std::vector<detail::module_place>& places = finder.places;
  std::vector<layer_info> infos;
  for (detail::module_place& place : places) infos.push_back(detail::info_of(place));
  std::vector<layer_choice> choices = detail::choose(places, infos, policy, result.kept);
  const auto held = std::find_if(result.kept.begin(), result.kept.end(), [](const kept_layer& k) {
    return k.reason == detail::place_finder::held_elsewhere;
  });
  const bool any = std::any_of(choices.begin(), choices.end(), [](const layer_choice& one) {
    return one.factorize() || one.reason == dense_because::growth;
  });
  if (!any && held != result.kept.end()) {
    PUFFERFISH_THROW(
        state_error("host_torch::factorize: no layer can be replaced; " + held->name + ": " + held->reason));
  }
  std::vector<detail::place_factorization> work(places.size());
  const std::vector<std::size_t> order = pufferfish::detail::decomposition_order(infos);
  const auto for_each_chosen = [&](const auto& call) {
    thread_pool(policy.threads).run(static_cast<index_t>(order.size()), [&](index_t task, int) {
      const std::size_t i = order[static_cast<std::size_t>(task)];
      if (choices[i].factorize()) {
        call(i, pufferfish::detail::options_for(places[i].name, policy, statistics));
      }
    });
  };
  const auto budget =
      pufferfish::detail::find_budget(infos, choices, policy, statistics, result.parameters_before);
  if (budget) {
    for_each_chosen([&](std::size_t i, const factorize_options& options) {
      if (choices[i].by_budget) work[i].measure(places[i], options);
    });
    std::vector<std::optional<truncation>> kinds(work.size());
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      if (choices[i].factorize() && choices[i].by_budget) kinds[i] = work[i].gains.kind;
    }
    pufferfish::detail::check_one_truncation("host_torch::factorize", infos, kinds);
  }
  result.rows = pufferfish::detail::share_budget(infos, choices, budget, statistics, result.parameters_before,
                                                 [&](std::size_t i) { return work[i].gains.groups; });
  for_each_chosen(
      [&](std::size_t i, const factorize_options& options) { work[i].run(places[i], choices[i], options); });

  // A layer that is in two places stays one shared layer.
  std::map<const torch::nn::Module*, std::shared_ptr<torch::nn::Module>> made;
  for (std::size_t i = 0; i < work.size(); ++i) {
    detail::place_factorization& done = work[i];
    const torch::nn::Module* dense = places[i].layer.get();
    if (done.grows || choices[i].reason == dense_because::growth) {
      result.kept_dense.push_back(places[i].name);
      result.kept.push_back({places[i].name, "no fewer parameters as factors"});
    } else if (choices[i].reason == dense_because::budget) {
      result.kept.push_back({places[i].name, "the budget is better spent on other layers"});
    } else if (choices[i].factorize() && made.find(dense) == made.end()) {
      made[dense] = done.made.build();
      made[dense]->train(dense->is_training());
      for (layer_rank& rank : done.made.ranks) result.low_rank.push_back(std::move(rank));
      for (factor_report& report : done.made.reports) result.layers.push_back(std::move(report));
    }
  }
  for (std::size_t i = 0; i < work.size(); ++i) {
    if (choices[i].factorize() && !work[i].grows) places[i].put(made[places[i].layer.get()]);
  }
  result.parameters_after = detail::parameter_count(root);
  result.parameters = detail::parameters_of(root);
  return result;
}

/// Sets an optimizer's parameters to those of a factorized module and clears its state (momentum etc.). The
/// optimizer must have one parameter group, whose options stay; throws value_error for more groups.
///
///     torch::optim::SGD optimizer(net->parameters(), 0.1);
///     ... training of the dense network ...
///     host_torch::renew(optimizer, host_torch::factorize(*net));
inline void renew(torch::optim::Optimizer& optimizer, const factorization& report) {
  if (optimizer.param_groups().size() != 1) {
    detail::throw_error<value_error>({"host_torch::renew: an optimizer of ", optimizer.param_groups().size(),
                                      " groups of parameters; make a new one of what is in the report"});
  }
  optimizer.param_groups()[0].params() = report.parameters;
  optimizer.state().clear();
}

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
