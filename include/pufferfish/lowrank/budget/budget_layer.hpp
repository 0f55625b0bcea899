// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `budget_layer` and `budget_choice`: the input and the result of `allocate` (budget.hpp) for one layer.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/lowrank/budget/network_budget.hpp>
#include <pufferfish/lowrank/selection.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Matrices of a layer that get the same rank, with the gain and the cost of each additional rank. As dense
/// matrices they have count * rows * cols parameters; as factors of rank r, they have r * count * (rows +
/// cols + extra_parameters) parameters.
struct budget_group {
  matrix_size size;   ///< rows and columns of each matrix
  index_t count = 1;  ///< number of matrices
  /// gains[i]: predicted increase of the loss if component i is dropped, summed over the group's matrices.
  /// Finite, not negative, not ascending; at least min(rows, cols) numbers. Further numbers are ignored,
  /// because factors of that rank reproduce the matrix.
  std::vector<double> gains;
  /// Products of each matrix with a vector in one sample's forward pass: output pixels of a convolution, or
  /// tokens of a linear layer. For an embedding: tokens of the output layer tied to it, 0 if there is none.
  double products = 1.0;
  /// Rows of an embedding's table that one sample reads. A dense table needs no multiply-add for them; a
  /// factorized one needs rank times the matrix's rows for each.
  double lookups = 0.0;
  index_t extra_parameters = 0;  ///< per rank and matrix: 2 with a batch norm between the factors
  double ms_per_rank = 0.0;      ///< milliseconds of a training step per rank
};

/// The input of `allocate` for one layer. Times may be left out unless the budget limits milliseconds.
///
///     budget_layer conv;
///     conv.name = "conv3";
///     conv.groups.resize(1);
///     conv.groups[0].size = {256, 1152};      // outputs x (inputs * 3 * 3)
///     conv.groups[0].gains = gains;           // 256 numbers, descending
///     conv.groups[0].products = 14.0 * 14.0;  // output pixels
struct budget_layer {
  std::string name;                  ///< unique in the network; `allocate` breaks ties by name
  std::vector<budget_group> groups;  ///< in the order of the layer's rank groups
  double dense_ms = 0.0;             ///< milliseconds of the dense layer in a training step
  double low_rank_ms = 0.0;  ///< milliseconds of the factors in a training step, extrapolated to rank 0
};

/// Options of `allocate`, which throws value_error for a floor below 1, and for bytes_per_parameter that is
/// not positive and finite.
struct budget_options {
  /// The smallest rank of a factorized matrix; min(rows, cols) if that is smaller.
  index_t floor = 2;
  double bytes_per_parameter = 4.0;  ///< bytes of gradient exchanged per parameter and step
};

/// The reason why a layer has its ranks, or why it stays dense.
enum class budget_reason {
  budget,    ///< low rank: further components gain less than they cost
  floor,     ///< low rank: the smallest ranks allowed by the options
  lossless,  ///< low rank: the dropped components have gain 0
  fits,      ///< dense: the whole dense network is within the budget
  worth,     ///< dense: factors would lose more than they would save
  growth,    ///< dense: factors at the floor do not have fewer parameters
  slower     ///< dense: factors at the floor do not take less time
};

/// The result of `allocate` for one layer.
struct budget_choice {
  rank_list ranks;  ///< the rank of each rank group; empty: the layer stays dense
  budget_reason reason = budget_reason::fits;
  double predicted_loss = 0.0;   ///< sum of the gains of all dropped components
  double weighted_energy = 1.0;  ///< sum of the gains kept / sum of all gains; 1 if all gains are 0

  /// Whether the layer stays dense.
  bool dense() const { return ranks.empty(); }
  friend bool operator==(const budget_choice&, const budget_choice&) = default;
};

/// The reason as text, as in the last column of a rank_table: "budget", "dense: fits".
constexpr const char* to_string(budget_reason reason) {
  switch (reason) {
    case budget_reason::budget:
      return "budget";
    case budget_reason::floor:
      return "floor";
    case budget_reason::lossless:
      return "nothing is lost";
    case budget_reason::fits:
      return "dense: fits";
    case budget_reason::worth:
      return "dense: worth it";
    case budget_reason::growth:
      return "dense: factors not smaller";
    case budget_reason::slower:
      return "dense: factors not faster";
  }
  return "";
}

namespace detail {

/// Cost of one more rank of a group: count (rows + cols + extra_parameters) parameters,
/// count (products (rows + cols) + lookups rows) multiply-adds, and ms_per_rank milliseconds.
inline network_cost cost_per_rank(const budget_group& group) {
  const auto count = static_cast<double>(group.count), rows = static_cast<double>(group.size.rows);
  const double sides = rows + static_cast<double>(group.size.cols);
  return {count * (sides + static_cast<double>(group.extra_parameters)),
          count * (group.products * sides + group.lookups * rows), group.ms_per_rank};
}
/// Cost of a group as dense matrices: count rows cols parameters and products times as many multiply-adds.
/// Milliseconds are 0, because dense times are known for whole layers only.
inline network_cost cost_as_dense(const budget_group& group) {
  const double elements = static_cast<double>(group.count) * static_cast<double>(group.size.rows) *
                          static_cast<double>(group.size.cols);
  return {elements, group.products * elements, 0.0};
}

}  // namespace detail

/// Costs of a layer: as factors with the given ranks, one per group (not checked), or as a dense layer if
/// `ranks` is empty. For a group of `count` matrices m x n, a rank r costs r count (m + n + extra_parameters)
/// parameters, r count (products (m + n) + lookups m) multiply-adds and r ms_per_rank milliseconds; the layer
/// adds low_rank_ms once. A dense layer costs count m n parameters and products count m n multiply-adds per
/// group, and dense_ms milliseconds.
inline network_cost cost_of(const budget_layer& layer, const rank_list& ranks = {}) {
  network_cost cost{0.0, 0.0, ranks.empty() ? layer.dense_ms : layer.low_rank_ms};
  for (std::size_t g = 0; g < layer.groups.size(); ++g) {
    if (ranks.empty()) {
      cost = cost + detail::cost_as_dense(layer.groups[g]);
    } else {
      const network_cost each = detail::cost_per_rank(layer.groups[g]);
      const auto rank = static_cast<double>(ranks[g]);
      cost = cost + network_cost{rank * each.parameters, rank * each.macs, rank * each.milliseconds};
    }
  }
  return cost;
}

/// Costs of a network: `rest` plus the costs of `layers`, which are all dense or, with `choices`, as chosen.
/// `choices` has one entry per layer in the same order (not checked).
inline network_cost cost_of(std::span<const budget_layer> layers, const network_cost& rest,
                            std::span<const budget_choice> choices = {}) {
  network_cost sum = rest;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    sum = sum + cost_of(layers[i], choices.empty() ? rank_list{} : choices[i].ranks);
  }
  return sum;
}

PUFFERFISH_NAMESPACE_END
