// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `layer_info`: sizes of a layer and its place in its network, from which policies choose layers and ranks.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/lowrank/kind_traits.hpp>
#include <pufferfish/lowrank/rank.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Rows and columns of a weight as a matrix: the number of outputs, and the number of inputs of one output.
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
  friend bool operator==(const matrix_group&, const matrix_group&) = default;
};

/// Position of a layer in its network: on the main path, on the shortcut of a residual
/// block, or an embedding table.
enum class layer_place { path, shortcut, embedding };

/// The input of `select` for one layer: its sizes, without its weights. Errors, policy.ranks and
/// policy.also_if identify the layer by `name`.
struct layer_info {
  std::string name;
  std::vector<matrix_group> groups;  ///< rank groups; empty: the layer is low-rank already
  layer_place place = layer_place::path;
  bool convolution = false;  ///< whether factorize_policy::factor_norms applies to the layer
};

/// A layer's name and its actual or requested ranks, one per rank group (see kind_traits).
struct layer_rank {
  std::string name;
  rank_list ranks;

  /// Constructs the ranks from a list, or from one number per group: layer_rank("lstm", 32, 48). Not checked.
  layer_rank() = default;
  layer_rank(std::string layer, rank_list all) : name(std::move(layer)), ranks(std::move(all)) {}
  template <std::convertible_to<index_t>... Ranks>
  requires(sizeof...(Ranks) > 0) layer_rank(std::string layer, Ranks... all)
      : name(std::move(layer)), ranks{static_cast<index_t>(all)...} {}

  /// The rank of the first group.
  index_t rank() const { return ranks.empty() ? 0 : ranks.front(); }
  friend bool operator==(const layer_rank&, const layer_rank&) = default;
};

namespace detail {

/// Number of parameters of a layer's dense matrices.
inline index_t parameters_as_dense(const layer_info& layer) {
  index_t sum = 0;
  for (const matrix_group& group : layer.groups) sum += group.count * group.size.rows * group.size.cols;
  return sum;
}
/// Number of parameters of the factors of a layer's matrices at the given ranks (one per group), with
/// `extra_parameters` more per rank of each matrix.
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
        {layer.name, ": ", counted(ranks.size(), "rank"), " where its matrices need ", layer.groups.size()});
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

/// A number proportional to the estimated time of a layer's decompositions.
inline double decomposition_cost(const layer_info& layer) {
  double sum = 0.0;
  for (const auto& [size, count] : layer.groups) {
    sum += static_cast<double>(count) * static_cast<double>(size.rows) * static_cast<double>(size.cols) *
           static_cast<double>(std::min(size.rows, size.cols));
  }
  return sum;
}

/// Indices of the layers in the order of their decomposition: largest first, so that threads finish at about
/// the same time.
inline std::vector<std::size_t> decomposition_order(const std::vector<layer_info>& layers) {
  std::vector<std::size_t> order(layers.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return decomposition_cost(layers[a]) > decomposition_cost(layers[b]);
  });
  return order;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
