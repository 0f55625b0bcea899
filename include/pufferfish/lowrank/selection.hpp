// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `select`: chooses which layers of a network to factorize, and their ranks, from a list of the layers'
/// matrix sizes. Used for networks, the device, adapters and weight files.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/linalg/svd/svd.hpp>
#include <pufferfish/lowrank/budget/network_budget.hpp>
#include <pufferfish/lowrank/factorization/factors.hpp>
#include <pufferfish/lowrank/layer_info.hpp>
#include <pufferfish/lowrank/rank.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Which layers of a network to factorize, and to what rank. By default the first and the last layer,
/// shortcuts and embeddings stay dense; other layers get a quarter of their full rank (Wang et al.,
/// Pufferfish, MLSys 2021, section 3). If factorize gets statistics of the network's training, factors
/// minimize the error of the loss or of the outputs at these ranks (see truncation), except with paper().
/// \code
/// factorize_policy policy;
/// policy.rank = rank_ratio{0.5};
/// policy.first_layer = 3;  // the first two layers stay dense
/// policy.also_if = [](const std::string&, matrix_size size) { return size.rows >= 64; };
/// factorize(net, policy);
/// \endcode
struct factorize_policy {
  rank_policy rank = rank_ratio{0.25};
  /// Limits for the whole network, which replace `rank`: `allocate` computes the ranks of all layers from the
  /// gains of the most exact truncation that the statistics allow (see truncation). Without statistics, gains
  /// are squared singular values, which are poorly comparable between layers. `allocate` may leave layers
  /// dense. embedding_rank still applies.
  std::optional<network_budget> budget = {};
  /// True: the budget is the number of parameters that `rank` would give all layers together, distributed for
  /// the least predicted loss. The number of multiply-adds changes. Applies only if there are gradient
  /// statistics, no other budget, and a `rank` that does not depend on singular values.
  bool share = false;
  /// True: the caller will insert batch norms between the factors of the convolutions on the main path
  /// (insert_factor_norms). A factorized matrix of rank r then has 2 r more parameters. They count for
  /// `budget`, for `share`, in the reports and for keep_dense_if_larger. factorize() itself inserts none.
  bool factor_norms = false;
  /// Explicit ranks of named layers, which replace `rank` and `budget`. Layers that are not listed stay
  /// dense, and so do layers that a rule below keeps dense.
  std::optional<std::vector<layer_rank>> ranks = {};
  /// Number of the first layer to factorize. Layers 1 .. first_layer - 1 stay dense (the hybrid network);
  /// only layers of the main path count, in execution order. The paper uses at least 2. `select` throws
  /// value_error if it is below 1, or above 2 and beyond the last layer.
  index_t first_layer = 2;
  /// Whether the last layer of the main path stays dense.
  bool last_layer_dense = true;
  /// Whether layers on the shortcuts of residual blocks stay dense.
  bool shortcuts_dense = true;
  /// Whether embeddings stay dense.
  bool embeddings_dense = true;
  /// The rank policy of embeddings; empty: `rank`.
  std::optional<rank_policy> embedding_rank = {};
  /// Called for each layer that the rules above would factorize, with the size of its first matrix; false
  /// keeps the layer dense. Empty: no further restriction.
  std::function<bool(const std::string& name, matrix_size size)> also_if = {};
  /// True: a layer stays dense if its factors together would not have fewer parameters. False: a layer with a
  /// matrix that would not become smaller is an error (rank_error).
  bool keep_dense_if_larger = true;
  /// Kind of truncation; empty: the most exact kind for which factorize got statistics.
  std::optional<truncation> truncate = {};
  svd_method method = svd_method::automatic;
  std::uint64_t seed = 0;
  /// Number of layers factorized concurrently. The result does not depend on it.
  int threads = 1;

  /// The settings of Wang et al. (Pufferfish, MLSys 2021): rank ratio 1/4 for each layer, and singular value
  /// decomposition of its weights.
  static factorize_policy paper() {
    factorize_policy policy;
    policy.truncate = truncation::plain;
    return policy;
  }
};

/// Reason why a layer stays dense; `nothing` if it is factorized.
enum class dense_because {
  nothing,       ///< none: the layer is factorized
  first_layers,  ///< its number is below first_layer
  last_layer,    ///< it is the last layer of the main path (last_layer_dense)
  shortcut,      ///< it is on a shortcut (shortcuts_dense)
  embedding,     ///< it is an embedding (embeddings_dense)
  caller,        ///< also_if or the list `ranks` excludes it
  growth,        ///< its factors would not have fewer parameters (keep_dense_if_larger)
  low_rank,      ///< it is low-rank already
  budget         ///< in the distribution of the budget, its singular components are worth their cost
};

/// Whether one layer is factorized, with which ranks, and the reason if it stays dense; a result of `select`,
/// which applies a factorize_policy to all layers of a network.
struct layer_choice {
  index_t number = 0;  ///< 1, 2, ... along the main path; 0 for a shortcut or an embedding
  dense_because reason = dense_because::nothing;
  rank_policy rank;              ///< rank policy of the layer's matrices
  rank_list ranks;               ///< one per rank group; empty if they depend on singular values
  bool by_budget = false;        ///< the ranks are computed from the network's budget
  index_t extra_parameters = 0;  ///< parameters more per rank of each matrix: 2 with factor_norms

  bool factorize() const { return reason == dense_because::nothing; }
};

namespace detail {

/// Whether a layer's factors together have fewer parameters than its matrices.
inline bool shrinks(const std::vector<factor_report>& reports) {
  index_t before = 0, after = 0;
  for (const factor_report& report : reports) {
    before += report.parameters_before;
    after += report.parameters_after;
  }
  return after < before;
}

/// The reason, if any, for which the rules that do not depend on ranks keep a layer dense.
inline dense_because place_rule(const layer_info& layer, index_t number, index_t last,
                                const factorize_policy& policy) {
  if (layer.groups.empty()) return dense_because::low_rank;
  if (layer.place == layer_place::shortcut && policy.shortcuts_dense) return dense_because::shortcut;
  if (layer.place == layer_place::embedding && policy.embeddings_dense) return dense_because::embedding;
  if (layer.place == layer_place::path && number < policy.first_layer) return dense_because::first_layers;
  if (layer.place == layer_place::path && policy.last_layer_dense && number == last) {
    return dense_because::last_layer;
  }
  if (policy.also_if && !policy.also_if(layer.name, layer.groups.front().size)) return dense_because::caller;
  return dense_because::nothing;
}

}  // namespace detail

/// The layer numbers used by factorize_policy::first_layer: 1, 2, ... for the layers of the main path in
/// the order given; 0 for all others. Layers that are already low-rank count, too, so that numbers do
/// not change after a switch.
inline std::vector<index_t> number_layers(const std::vector<layer_info>& layers) {
  std::vector<index_t> numbers;
  index_t last = 0;
  for (const layer_info& layer : layers) {
    numbers.push_back(layer.place == layer_place::path ? ++last : 0);
  }
  return numbers;
}

namespace detail {

/// The entry of policy.ranks for a layer, or nullptr.
inline const layer_rank* listed(const factorize_policy& policy, const std::string& name) {
  for (const layer_rank& one : *policy.ranks) {
    if (one.name == name) return &one;
  }
  return nullptr;
}

/// Sets the ranks that the policy determines without singular values. Throws rank_error for invalid ranks.
inline void set_known_ranks(layer_choice& choice, const layer_info& layer, const factorize_policy& policy) {
  const bool own = layer.place == layer_place::embedding && policy.embedding_rank;
  choice.rank = own ? *policy.embedding_rank : policy.rank;
  if (policy.ranks) {
    const layer_rank* const given = listed(policy, layer.name);
    if (given == nullptr) {
      choice.reason = dense_because::caller;
      return;
    }
    choice.ranks = given->ranks;
  } else if (policy.keep_dense_if_larger && cannot_shrink(layer)) {
    choice.reason = dense_because::growth;
    return;
  } else if (policy.budget && !own) {
    choice.by_budget = true;
    return;
  } else if (needs_spectrum(choice.rank)) {
    return;
  } else {
    for (const auto& [size, count] : layer.groups) {
      choice.ranks.push_back(choose_rank(choice.rank, size.rows, size.cols, {}, 0.0));
    }
  }
  check_ranks(layer, choice.ranks);
  if (!policy.keep_dense_if_larger) {
    check_all_shrink(layer, choice.ranks);
  } else if (parameters_as_factors(layer, choice.ranks, choice.extra_parameters) >=
             parameters_as_dense(layer)) {
    choice.reason = dense_because::growth;
  }
}

}  // namespace detail

/// Applies a policy to the layers of a network, given in execution order. Returns one choice per layer:
/// whether to factorize it, and its ranks, unless the policy needs singular values to determine them. Error
/// texts about policy.first_layer begin with `caller`.
///
/// Throws value_error for a first_layer that is not the number of a layer; for an invalid ratio,
/// fraction or budget, even if it applies to no layer; and for policy.ranks of layers that do not exist
/// or are not dense, or that are listed twice. Throws rank_error, naming the layer, for a fixed rank outside
/// 1 .. min(rows, cols) of a matrix; if keep_dense_if_larger is false, also for any rank whose factors do not
/// have fewer parameters than the matrix.
PUFFERFISH_COLD inline std::vector<layer_choice> select(const std::vector<layer_info>& layers,
                                                        const factorize_policy& policy,
                                                        const char* caller = "factorize") {
  choose_rank(policy.rank, 1, 1, {}, 0.0);  // throws for invalid fractions
  if (policy.budget) detail::check_budget(*policy.budget);
  if (policy.embedding_rank) choose_rank(*policy.embedding_rank, 1, 1, {}, 0.0);
  const std::vector<index_t> numbers = number_layers(layers);
  const index_t last = numbers.empty() ? 0 : *std::max_element(numbers.begin(), numbers.end());
  detail::check_first_layer((std::string(caller) + ": first_layer").c_str(), policy.first_layer, last);
  std::vector<layer_choice> choices;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const layer_info& layer = layers[i];
    layer_choice& choice = choices.emplace_back();
    choice.number = numbers[i];
    choice.reason = detail::place_rule(layer, numbers[i], last, policy);
    if (!choice.factorize()) continue;
    const bool normed = policy.factor_norms && layer.convolution && layer.place == layer_place::path;
    choice.extra_parameters = normed ? 2 : 0;
    detail::set_known_ranks(choice, layer, policy);
  }
  for (const layer_rank& one : policy.ranks.value_or(std::vector<layer_rank>())) {
    const auto same = [&](const layer_rank& other) { return other.name == one.name; };
    if (std::count_if(policy.ranks->begin(), policy.ranks->end(), same) > 1) {
      detail::throw_error<value_error>({caller, ": ranks of ", one.name, " are listed twice"});
    }
    const auto is = [&](const layer_info& layer) { return layer.name == one.name && !layer.groups.empty(); };
    if (std::any_of(layers.begin(), layers.end(), is)) continue;
    detail::throw_error<value_error>({caller, ": ranks for ", one.name, ", which is no dense layer here"});
  }
  return choices;
}

PUFFERFISH_NAMESPACE_END
