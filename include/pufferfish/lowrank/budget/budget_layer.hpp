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

/// Matrices of a layer that get the same rank, with the gain and cost of each additional rank.
/// Dense, the matrices have count rows cols parameters; as factors, rank count (rows + cols +
/// extra_parameters).
struct budget_group {
  matrix_size size;
  index_t count = 1;
  /// gains[i]: predicted increase of the loss if component i is dropped, summed over the group's matrices.
  /// Finite, not negative, not ascending; at least min(rows, cols) numbers. Further numbers are ignored,
  /// because factors of that rank reproduce the matrix.
  std::vector<double> gains;
  /// Products of each matrix with a vector in one sample's forward pass: output pixels of a convolution,
  /// tokens of a linear layer; for an embedding, tokens of an output layer tied to it.
  double products = 1.0;
  /// Rows of an embedding's table that one sample reads. A dense table needs no multiply-add for them; a
  /// factorized one needs rank times the matrix's rows for each.
  double lookups = 0.0;
  index_t extra_parameters = 0;  ///< per rank and matrix: 2 with a batch norm between the factors
  double ms_per_rank = 0.0;      ///< time of a training step per rank
};

/// The input of `allocate` for one layer. `name` must be unique in the network; allocate breaks ties by it.
/// Times may be left out unless the budget limits milliseconds.
struct budget_layer {
  std::string name;
  std::vector<budget_group> groups;  ///< in the order of the layer's rank groups
  double dense_ms = 0.0;             ///< time of the dense layer in a training step
  double low_rank_ms = 0.0;          ///< time of the factors, extrapolated to rank 0
};

/// Options of allocate. Errors (value_error): a floor below 1, bytes_per_parameter that is not positive and
/// finite.
struct budget_options {
  /// The smallest rank of a factorized matrix; min(rows, cols) if that is smaller.
  index_t floor = 2;
  double bytes_per_parameter = 4.0;  ///< exchanged in a step
};

/// Why a layer has its ranks, or why it stays dense.
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
  rank_list ranks;  ///< one per rank group; empty: the layer stays dense
  budget_reason reason = budget_reason::fits;
  double predicted_loss = 0.0;   ///< sum of the gains of all dropped components
  double weighted_energy = 1.0;  ///< sum of the gains kept / sum of all gains; 1 if all gains are 0

  bool dense() const { return ranks.empty(); }
  friend bool operator==(const budget_choice&, const budget_choice&) = default;
};

/// The reason as in the last column of a rank_table: "budget", "dense: fits".
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

/// A group's costs per rank, and as dense matrices. Dense time is known for whole layers only.
inline network_cost cost_per_rank(const budget_group& group) {
  const auto count = static_cast<double>(group.count), rows = static_cast<double>(group.size.rows);
  const double sides = rows + static_cast<double>(group.size.cols);
  return {count * (sides + static_cast<double>(group.extra_parameters)),
          count * (group.products * sides + group.lookups * rows), group.ms_per_rank};
}
inline network_cost cost_as_dense(const budget_group& group) {
  const double elements = static_cast<double>(group.count) * static_cast<double>(group.size.rows) *
                          static_cast<double>(group.size.cols);
  return {elements, group.products * elements, 0.0};
}

}  // namespace detail

/// Costs of a layer as factors with the given ranks, one per group (not checked); as a dense layer if `ranks`
/// is empty. With group sizes m x n and count matrices, a rank r costs r count (m + n + extra_parameters)
/// parameters, r count (products (m + n) + lookups m) multiply-adds and low_rank_ms + r ms_per_rank
/// milliseconds; a dense layer costs count m n parameters, products count m n multiply-adds and dense_ms
/// milliseconds.
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

/// Costs of a network with all layers dense, or with the given choices, one per layer in the same order (not
/// checked).
inline network_cost cost_of(std::span<const budget_layer> layers, const network_cost& rest,
                            std::span<const budget_choice> choices = {}) {
  network_cost sum = rest;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    sum = sum + cost_of(layers[i], choices.empty() ? rank_list{} : choices[i].ranks);
  }
  return sum;
}

PUFFERFISH_NAMESPACE_END
