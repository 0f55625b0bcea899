// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `budget_layer`: what `allocate` (budget.hpp) has to know about a layer, and what it answers.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/lowrank/network_budget.hpp>
#include <pufferfish/lowrank/selection.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Matrices of a layer that get the same rank, and what each further rank saves and costs.
struct budget_group {
  matrix_size size;
  index_t count = 1;
  /// gains[i]: by how much the loss is predicted to grow if component i is dropped, summed over the group's
  /// matrices. Finite, not negative, descending; min(rows, cols) numbers. Further ones are not read: factors
  /// of that rank reproduce the matrix.
  std::vector<double> gains;
  /// Products of each matrix with a vector in one sample's forward pass: output pixels of a convolution,
  /// tokens of a linear layer; of an embedding, those of an output layer tied to it.
  double products = 1.0;
  /// Rows that one sample reads of an embedding's table. Dense, they cost no multiply-add; factorized, rank
  /// times the matrix's rows each.
  double lookups = 0.0;
  index_t extra_parameters = 0;  ///< per rank and matrix: 2 with a batch norm between the factors
  double ms_per_rank = 0.0;      ///< that each rank adds to a training step
};

/// A layer whose ranks are to be chosen.
struct budget_layer {
  std::string name;
  std::vector<budget_group> groups;  ///< in the order of the layer's rank groups
  double dense_ms = 0.0;             ///< of the dense layer in a training step
  double low_rank_ms = 0.0;          ///< of the factors, extrapolated to rank 0
};

struct budget_options {
  /// The smallest rank of a factorized matrix; of a matrix with fewer rows or columns, their number.
  index_t floor = 2;
  double bytes_per_parameter = 4.0;  ///< that a step exchanges
};

/// Why a layer has its ranks, or stays dense.
enum class budget_reason {
  budget,    ///< low rank: further components are worth less than their cost
  floor,     ///< low rank: the smallest ranks that the options allow
  lossless,  ///< low rank: the components that are dropped are worth nothing
  fits,      ///< dense: the whole dense network keeps within the budget
  worth,     ///< dense: what factors would lose is worth what they would save
  growth,    ///< dense: factors of the smallest ranks do not have fewer parameters
  slower     ///< dense: factors of the smallest ranks do not take less time
};

/// What `allocate` chose for a layer.
struct budget_choice {
  rank_list ranks;  ///< by rank group; empty: the layer stays dense
  budget_reason reason = budget_reason::fits;
  double predicted_loss = 0.0;   ///< sum of the gains of all components that are dropped
  double weighted_energy = 1.0;  ///< sum of the gains kept / sum of all gains; 1 if all gains are 0

  bool dense() const { return ranks.empty(); }
  friend bool operator==(const budget_choice&, const budget_choice&) = default;
};

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

/// A group's costs for each rank, and as dense matrices. Time is known for whole layers only.
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

/// A layer's costs as dense layer, and as factors of these ranks, one for each group; empty: dense.
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

/// A network's costs with all layers dense, or as `choices` has them.
inline network_cost cost_of(std::span<const budget_layer> layers, const network_cost& rest,
                            std::span<const budget_choice> choices = {}) {
  network_cost sum = rest;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    sum = sum + cost_of(layers[i], choices.empty() ? rank_list{} : choices[i].ranks);
  }
  return sum;
}

PUFFERFISH_NAMESPACE_END
