// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `project_softly`: moves dense weights closer to low rank during the warm-up, so that the later
/// factorization changes the network less.

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/parallel.hpp>
#include <pufferfish/nn/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// New values of a layer's matrices, each as [out][all other dimensions], and the reports of the truncations.
template <class T>
struct projected_layer {
  std::vector<tensor<T, 2>> matrices;  ///< in the order of the layer's weights
  std::vector<factor_report> reports;  ///< of each matrix
};

/// Computes w + strength (truncated w - w) in double for each matrix w of a layer; `made` has its truncation
/// as factors. Strength 0 gives w, strength 1 gives the truncated w.
template <class T>
projected_layer<T> project_layer(const layer_weights<T>& weights, const std::vector<factors<T>>& made,
                                 double strength) {
  projected_layer<T> result;
  stack_arena scratch;
  for (std::size_t i = 0; i < made.size(); ++i) {
    const auto widened = [](const tensor<T, 2>& from) {
      tensor<double, 2> to({from.extent(0), from.extent(1)});
      std::copy(from.flat().begin(), from.flat().end(), to.flat().begin());
      return to;
    };
    const tensor<double, 2> up = widened(made[i].up), down = widened(made[i].down);
    tensor<double, 2> truncated({up.extent(0), down.extent(1)});
    native_gemm(scratch).multiply<double>(up, down, truncated.view());
    tensor<T, 2>& matrix = result.matrices.emplace_back(unroll(weights.matrices[i].view));
    for (std::size_t j = 0; j < matrix.flat().size(); ++j) {
      const auto w = static_cast<double>(matrix.flat()[j]);
      matrix.flat()[j] = static_cast<T>(w + strength * (truncated.flat()[j] - w));
    }
    result.reports.push_back(made[i].report);
  }
  return result;
}

/// A slot to project: its weights, and the policy of each of its rank groups.
template <class Slot>
struct soft_target {
  Slot* slot = nullptr;               ///< layer; nullptr: it stays as it is
  factorize_options options;          ///< of the decompositions
  std::vector<rank_policy> policies;  ///< one for all rank groups, or one for each
  bool must_shrink = false;           ///< leaves the layer unchanged if its factors would not be smaller
};

/// Throws value_error unless 0 <= strength <= 1.
inline void check_strength(double strength) {
  if (strength >= 0.0 && strength <= 1.0) return;
  throw_error<value_error>({"project_softly: a strength of ", strength, "; it must be in 0 .. 1"});
}

/// Projects all targets, given in execution order, on `threads` threads. `order` has the indices of the
/// targets in the order in which they are decomposed (the largest first). Weights are written after all
/// decompositions, so that an error leaves the network unchanged. Returns the reports in execution order.
template <class Slot>
std::vector<factor_report> project_targets(const std::vector<soft_target<Slot>>& targets,
                                           const std::vector<std::size_t>& order, double strength,
                                           int threads) {
  using T = parameter_t<typename Slot::value_type>;
  std::vector<projected_layer<T>> work(targets.size());
  thread_pool(threads).run(static_cast<index_t>(order.size()), [&](index_t task, int) {
    const std::size_t i = order[static_cast<std::size_t>(task)];
    const soft_target<Slot>& target = targets[i];
    if (target.slot == nullptr) return;
    const layer_weights<T> weights = target.slot->weights(target.options.name);
    const std::vector<factors<T>> made = factorize_weights(weights, target.policies, target.options);
    if (target.must_shrink && !shrinks(reports_of(made))) return;
    work[i] = project_layer(weights, made, strength);
  });
  std::vector<factor_report> reports;
  for (std::size_t i = 0; i < work.size(); ++i) {
    if (work[i].matrices.empty()) continue;
    const layer_weights<T> weights = targets[i].slot->weights(targets[i].options.name);
    for (std::size_t m = 0; m < work[i].matrices.size(); ++m) {
      const tensor_view<T, 4> to = writable(weights.matrices[m].view);
      copy(tensor_view<const T, 4>(work[i].matrices[m].data(), to.shape()), to);
    }
    for (factor_report& report : work[i].reports) reports.push_back(std::move(report));
  }
  return reports;
}

}  // namespace detail

/// Soft truncation of the layers that factorize(net, policy, statistics) would replace if it were called now,
/// at the ranks that it would choose. Each weight matrix W of these layers becomes
///
///     W <- (1 - strength) W + strength trunc_r(W)
///
/// where trunc_r(W) is the truncation of W to rank r. With a plain truncation, singular values after the r-th
/// are multiplied by 1 - strength and the others stay. Called every few hundred steps of the warm-up, the
/// function makes the weights nearly low-rank at the switch (projected warm-up). All else stays bit for bit:
/// other layers, biases and the optimizer's state; parameters stay in their memory. Returns a report for each
/// projected matrix, about W before the projection: kept_energy tells how close to low rank W was.
///
/// The result depends on the values of the network alone, not on policy.threads. Ranks of a distributed run
/// whose parameters are equal get equal results on machines with the same instruction sets. On others the
/// last bits may differ, so that rank 0 has to broadcast its parameters, as after the switch.
///
/// A network on a device is projected on the host: its parameters are copied there and back. Throws
/// value_error unless 0 <= strength <= 1, and all errors of factorize(); the network is unchanged then.
///
/// \code
/// for (index_t step = 0; step < warmup_steps; ++step) {
///   ...                                                  // a training step of the dense network
///   if (step % 200 == 0) project_softly(net, policy, 0.5);
/// }
/// factorize(net, policy);
/// \endcode
template <class Root, class Device>
std::vector<factor_report> project_softly(model<Root, Device>& net, const factorize_policy& policy,
                                          double strength, const network_statistics* statistics = nullptr) {
  detail::check_strength(strength);
  std::vector<factor_report> reports;
  net.on_host([&](Root& root) {
    detail::slot_finder<typename Root::value_type, Device> found;
    root.visit_layers(found);
    const std::vector<layer_choice> choices = select(found.layers, policy);
    std::vector<detail::soft_target<any_layer<typename Root::value_type, Device>>> targets(choices.size());
    for (std::size_t i = 0; i < choices.size(); ++i) {
      if (!choices[i].factorize()) continue;
      targets[i].slot = found.slots[i];
      targets[i].options = detail::options_for(found.layers[i].name, policy, statistics);
      targets[i].policies = {choices[i].rank};
      targets[i].must_shrink = policy.keep_dense_if_larger;
    }
    reports =
        detail::project_targets(targets, detail::decomposition_order(found.layers), strength, policy.threads);
  });
  return reports;
}

/// Soft truncation of listed layers at listed ranks, for example those of a budget. Each weight matrix W of
/// these layers becomes (1 - strength) W + strength trunc_r(W), with trunc_r the plain truncation (SVD) to
/// rank r. `threads` layers are decomposed at the same time; the result does not depend on the number.
/// Returns a report for each matrix, about W before the projection. Throws state_error for a name that is not
/// a dense layer of the network or is listed twice, rank_error for impossible ranks or if there is not one
/// rank for each rank group of the layer, and value_error unless 0 <= strength <= 1. The network is unchanged
/// if anything is thrown.
template <class Root, class Device>
std::vector<factor_report> project_softly(model<Root, Device>& net, const std::vector<layer_rank>& ranks,
                                          double strength, int threads = 1) {
  detail::check_strength(strength);
  std::vector<factor_report> reports;
  net.on_host([&](Root& root) {
    detail::slot_finder<typename Root::value_type, Device> found;
    root.visit_layers(found);
    std::vector<detail::soft_target<any_layer<typename Root::value_type, Device>>> targets(
        found.slots.size());
    for (const layer_rank& wanted : ranks) {
      const auto at = std::find_if(found.layers.begin(), found.layers.end(), [&](const layer_info& one) {
        return one.name == wanted.name && !one.groups.empty();
      });
      if (at == found.layers.end()) {
        detail::throw_error<state_error>(
            {"project_softly: the network has no dense layer called ", wanted.name});
      }
      detail::check_ranks(*at, wanted.ranks);
      const auto i = static_cast<std::size_t>(at - found.layers.begin());
      if (targets[i].slot != nullptr) {
        detail::throw_error<state_error>(
            {"project_softly: the list has two entries for layer ", wanted.name});
      }
      targets[i].slot = found.slots[i];
      targets[i].options.name = wanted.name;
      targets[i].options.allow_growth = true;
      targets[i].policies = detail::fixed_ranks(wanted.ranks);
    }
    reports = detail::project_targets(targets, detail::decomposition_order(found.layers), strength, threads);
  });
  return reports;
}

PUFFERFISH_NAMESPACE_END
