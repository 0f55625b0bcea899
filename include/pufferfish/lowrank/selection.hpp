// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `select`: chooses which layers of a network to factorize, and their ranks, from a list of the layers'
/// matrix sizes. Used for networks, the device, adapters and weight files.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/linalg/svd/svd.hpp>
#include <pufferfish/lowrank/budget/network_budget.hpp>
#include <pufferfish/lowrank/factorization/factors.hpp>
#include <pufferfish/lowrank/kind_traits.hpp>
#include <pufferfish/lowrank/rank.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Rows and columns of a weight as a matrix: outputs x inputs of one output.
struct matrix_size {
  index_t rows = 0;
  index_t cols = 0;
  bool empty() const { return rows == 0; }
  friend bool operator==(const matrix_size&, const matrix_size&) = default;
};

/// Matrices of a layer that get the same rank: `count` matrices of the same size.
struct matrix_group {
  matrix_size size;
  index_t count = 1;
};

/// Position of a layer in its network: on the main path, on the shortcut of a residual
/// block, or an embedding table.
enum class layer_place { path, shortcut, embedding };

/// The input of `select` for one layer: sizes, but no weights.
/// `name` is used in errors, in policy.ranks and in also_if.
struct layer_info {
  std::string name;
  std::vector<matrix_group> groups;  ///< rank groups; empty: the layer is low-rank already
  layer_place place = layer_place::path;
  bool convolution = false;  ///< for factorize_policy::factor_norms
};

/// A layer's name and its actual or requested ranks, one per rank group (see kind_traits).
struct layer_rank {
  std::string name;
  rank_list ranks;

  layer_rank() = default;
  layer_rank(std::string layer, rank_list all) : name(std::move(layer)), ranks(std::move(all)) {}
  template <std::convertible_to<index_t>... Ranks>
  requires(sizeof...(Ranks) > 0) layer_rank(std::string layer, Ranks... all)
      : name(std::move(layer)), ranks{static_cast<index_t>(all)...} {}

  /// The rank of the first group.
  index_t rank() const { return ranks.empty() ? 0 : ranks.front(); }
  friend bool operator==(const layer_rank&, const layer_rank&) = default;
};

/// Which layers of a network to factorize, and to what rank. By default the first and the last layer,
/// shortcuts and embeddings stay dense; other layers get a quarter of their full rank (Wang et al.,
/// Pufferfish, MLSys 2021, section 3). If factorize gets statistics of the network's training, factors
/// minimize the error of the loss or of the outputs at these ranks (see truncation), except with paper().
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
  /// (insert_factor_norms). Their parameters, two per rank of each matrix, count in budgets, in `share`, in
  /// the rows of reports and for keep_dense_if_larger. factorize() itself inserts none.
  bool factor_norms = false;
  /// Explicit ranks of named layers, which replace `rank` and `budget`. Layers that are not listed stay
  /// dense, and so do layers that a rule below keeps dense.
  std::optional<std::vector<layer_rank>> ranks = {};
  /// Layers 1 .. first_layer - 1 stay dense (the hybrid network); only layers of the main path count, in
  /// execution order. 1 factorizes from the first layer on; the paper uses at least 2. value_error if it is
  /// below 1, or above 2 and beyond the last layer.
  index_t first_layer = 2;
  bool last_layer_dense = true;
  bool shortcuts_dense = true;
  bool embeddings_dense = true;
  /// The rank policy of embeddings; empty: `rank`.
  std::optional<rank_policy> embedding_rank = {};
  /// Called for each layer that the rules above would factorize, with the size of its first matrix; false
  /// keeps the layer dense. Empty: no further restriction.
  std::function<bool(const std::string& name, matrix_size size)> also_if = {};
  /// True: a layer stays dense if its factors together would not have fewer parameters. False: a layer with a
  /// matrix that would not become smaller is an error (rank_error).
  bool keep_dense_if_larger = true;
  /// Kind of truncation; empty: the most exact one that the statistics given to factorize allow.
  std::optional<truncation> truncate = {};
  svd_method method = svd_method::automatic;
  std::uint64_t seed = 0;
  /// Number of layers factorized concurrently. The result does not depend on it.
  int threads = 1;

  /// The paper's settings: rank ratio 1/4 for each layer, and singular value decomposition of its weights.
  static factorize_policy paper() {
    factorize_policy policy;
    policy.truncate = truncation::plain;
    return policy;
  }
};

/// Reason why a layer stays dense.
enum class dense_because {
  nothing,
  first_layers,
  last_layer,
  shortcut,
  embedding,
  caller,
  growth,
  low_rank,
  budget  ///< its components are worth their cost
};

/// The decision of `select` on one layer.
struct layer_choice {
  index_t number = 0;  ///< 1, 2, ... along the main path; 0 for a shortcut or an embedding
  dense_because reason = dense_because::nothing;
  rank_policy rank;              ///< rank policy of the layer's matrices
  rank_list ranks;               ///< one per rank group; empty if they depend on singular values
  bool by_budget = false;        ///< the ranks are computed from the network's budget
  index_t extra_parameters = 0;  ///< per rank of each matrix: 2 with factorize_policy::factor_norms

  bool factorize() const { return reason == dense_because::nothing; }
};

namespace detail {

/// Number of parameters of a layer's matrices, and of their factors at the given ranks, with
/// `extra_parameters` more per rank of each matrix.
inline index_t parameters_as_dense(const layer_info& layer) {
  index_t sum = 0;
  for (const matrix_group& group : layer.groups) sum += group.count * group.size.rows * group.size.cols;
  return sum;
}
inline index_t parameters_as_factors(const layer_info& layer, const rank_list& ranks,
                                     index_t extra_parameters = 0) {
  index_t sum = 0;
  for (std::size_t g = 0; g < layer.groups.size(); ++g) {
    const auto& [size, count] = layer.groups[g];
    sum += count * (factor_parameters(size.rows, size.cols, ranks[g]) + extra_parameters * ranks[g]);
  }
  return sum;
}

/// Whether none of the layer's matrices becomes smaller at any rank.
inline bool cannot_shrink(const layer_info& layer) {
  return std::all_of(layer.groups.begin(), layer.groups.end(), [](const matrix_group& group) {
    return largest_shrinking_rank(group.size.rows, group.size.cols) < 1;
  });
}

/// Name of a rank group in errors.
inline std::string group_name(const layer_info& layer, std::size_t group) {
  return group == 0 ? layer.name : message({layer.name, ", rank ", group + 1});
}

/// Throws rank_error, naming the layer, unless there is one valid rank per group.
inline void check_ranks(const layer_info& layer, const rank_list& ranks) {
  if (ranks.size() != layer.groups.size()) {
    throw_error<rank_error>(
        {layer.name, ": ", ranks.size(), " ranks where its matrices need ", layer.groups.size()});
  }
  for (std::size_t g = 0; g < ranks.size(); ++g) {
    const matrix_size& size = layer.groups[g].size;
    check_rank(group_name(layer, g), size.rows, size.cols, ranks[g]);
  }
}

/// Throws rank_error, naming the layer, unless factors are smaller than the dense matrix in every group.
inline void check_all_shrink(const layer_info& layer, const rank_list& ranks) {
  for (std::size_t g = 0; g < ranks.size(); ++g) {
    const matrix_size& size = layer.groups[g].size;
    check_shrinks(group_name(layer, g), size.rows, size.cols, ranks[g]);
  }
}

/// Whether a layer's factors together have fewer parameters than its matrices.
inline bool shrinks(const std::vector<factor_report>& reports) {
  index_t before = 0, after = 0;
  for (const factor_report& report : reports) {
    before += report.parameters_before;
    after += report.parameters_after;
  }
  return after < before;
}

/// The rank groups of a list of matrices or factors.
template <class Matrices, class SizeOf>
std::vector<matrix_group> group_matrices(const Matrices& matrices, const SizeOf& size_of) {
  std::vector<matrix_group> groups;
  for (const auto& matrix : matrices) {
    if (matrix.group == groups.size()) {
      groups.push_back({size_of(matrix), 1});
    } else {
      ++groups[matrix.group].count;
    }
  }
  return groups;
}
template <class T>
std::vector<matrix_group> groups_of(const layer_weights<T>& weights) {
  return group_matrices(weights.matrices, [](const auto& matrix) {
    const index_t rows = matrix.view.extent(0);
    return matrix_size{rows, rows == 0 ? 0 : matrix.view.size() / rows};
  });
}

/// Proportional to the estimated time of a layer's decompositions.
inline double decomposition_cost(const layer_info& layer) {
  double sum = 0.0;
  for (const auto& [size, count] : layer.groups) {
    sum += static_cast<double>(count) * static_cast<double>(size.rows) * static_cast<double>(size.cols) *
           static_cast<double>(std::min(size.rows, size.cols));
  }
  return sum;
}

/// Order of decomposition: largest layers first, so that threads finish at about the same time.
inline std::vector<std::size_t> decomposition_order(const std::vector<layer_info>& layers) {
  std::vector<std::size_t> order(layers.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return decomposition_cost(layers[a]) > decomposition_cost(layers[b]);
  });
  return order;
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

/// Sets the ranks that the policy determines without singular values. Throws for invalid ranks.
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
/// or are not dense. Throws rank_error, naming the layer, for a fixed rank outside 1 .. min(rows, cols)
/// of a matrix; if keep_dense_if_larger is false, also for any rank whose factors do not have fewer
/// parameters than the matrix.
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
    const auto is = [&](const layer_info& layer) { return layer.name == one.name && !layer.groups.empty(); };
    if (std::any_of(layers.begin(), layers.end(), is)) continue;
    detail::throw_error<value_error>({caller, ": ranks for ", one.name, ", which is no dense layer here"});
  }
  return choices;
}

PUFFERFISH_NAMESPACE_END
