// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `layer_truncation`, the decompositions of all matrices of a layer, which can be truncated to any
/// ranks of their groups.

#include <algorithm>
#include <list>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/lowrank/factorization/truncation.hpp>
#include <pufferfish/lowrank/kinds.hpp>
#include <pufferfish/lowrank/statistics/network_statistics.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A copy of a weight as a dense matrix [out][product of the other extents]; the elements of a row are in the
/// order of the weight's dimensions.
template <class T, std::size_t N>
tensor<std::remove_const_t<T>, 2> unroll(const tensor_view<T, N>& weight) {
  tensor<std::remove_const_t<T>, 2> matrix(
      {weight.extent(0), weight.extent(0) == 0 ? 0 : weight.size() / weight.extent(0)});
  copy(weight, tensor_view<std::remove_const_t<T>, N>(matrix.data(), weight.shape()));
  return matrix;
}

/// The truncation requested by the options, or the most exact one that the statistics of all matrices allow:
/// plain without rows, data_aware without gradients, else two_sided.
inline truncation chosen_truncation(const factorize_options& options) {
  if (options.truncate) return *options.truncate;
  const layer_statistics* const statistics = options.statistics;
  if (statistics == nullptr || statistics->matrices.empty()) return truncation::plain;
  const auto all = [&](auto&& has) {
    return std::all_of(statistics->matrices.begin(), statistics->matrices.end(), has);
  };
  if (!all([](const output_statistics& one) { return one.has_rows(); })) return truncation::plain;
  const bool gradients = all([](const output_statistics& one) { return one.has_gradients(); });
  return gradients ? truncation::two_sided : truncation::data_aware;
}

/// Throws value_error, naming the layer, if the options leave the truncation to statistics of which a matrix
/// has no rows: a plain truncation would not be what the caller asked for.
inline void check_recorded(const layer_statistics& statistics, const factorize_options& options) {
  if (options.truncate) return;
  for (std::size_t i = 0; i < statistics.matrices.size(); ++i) {
    if (statistics.matrices[i].has_rows()) continue;
    throw_error<value_error>({options.name, ": the statistics of matrix ", i + 1, " of ",
                              statistics.matrices.size(),
                              " have no rows: add outputs or inputs, or factorize without statistics"});
  }
}

/// Location of the bias of matrix i's outputs: index of the layer's bias vector, and
/// offset of the first element.
struct bias_place {
  std::size_t bias = 0;
  index_t first = 0;
};
/// Location of the bias of matrix i's outputs. If the rows of all matrices are the layer's outputs in order,
/// all matrices share bias 0, at increasing offsets. Otherwise matrix i has bias i mod `biases`. rows_of(m):
/// number of rows of a matrix m.
template <class Matrices, class RowsOf>
bias_place place_of_bias(const Matrices& matrices, std::size_t i, bool rows_are_outputs, std::size_t biases,
                         const RowsOf& rows_of) {
  if (!rows_are_outputs) return {biases == 0 ? 0 : i % biases, 0};
  bias_place place;
  for (std::size_t before = 0; before < i; ++before) place.first += rows_of(matrices[before]);
  return place;
}

/// The policy of a rank group: policies[0] if there is one policy for all groups of the layer, else
/// policies[group].
inline const rank_policy& policy_of(std::span<const rank_policy> policies, std::size_t group) {
  return policies.size() == 1 ? policies[0] : policies[group];
}
/// One policy per rank group, which chooses the given rank.
inline std::vector<rank_policy> fixed_ranks(std::span<const index_t> ranks) {
  std::vector<rank_policy> policies;
  for (const index_t rank : ranks) policies.emplace_back(fixed_rank{rank});
  return policies;
}

/// The decompositions of a layer's matrices. The object owns copies of the matrices.
template <class T>
class layer_truncation {
 public:
  /// Decomposes copies of the matrices of `weights`. `known`: the ranks that make() will be called with, or
  /// empty if they depend on the decomposition. Throws shape_error, naming the layer, for statistics of
  /// another number of matrices or outputs, and the errors of matrix_truncation.
  layer_truncation(const layer_weights<T>& weights, const factorize_options& options,
                   const rank_list& known = {})
      : kind_(chosen_truncation(options)) {
    const layer_statistics* const statistics = options.statistics;
    check(weights, statistics);
    for (std::size_t i = 0; i < weights.matrices.size(); ++i) {
      const tensor_view<const T, 4>& view = weights.matrices[i].view;
      unrolled_.push_back(unroll(view));
      kernels_.push_back({view.extent(2), view.extent(3)});
      names_.push_back(weights.name_of(i));
      groups_.push_back(weights.matrices[i].group);
      svd_options how;
      how.method = options.method;
      how.seed = options.seed;
      const std::size_t group = weights.matrices[i].group;
      if (kind_ == truncation::plain && group < known.size()) how.max_rank = known[group];
      const std::vector<T> bias = bias_of(weights, i);
      matrices_.emplace_back(tensor_view<const T, 2>(unrolled_.back()),
                             statistics == nullptr ? nullptr : &statistics->matrices[i],
                             own_options(weights, statistics, i), std::span<const T>(bias), how);
    }
  }

  /// The truncation made: options.truncate, or the most exact one that the statistics allow.
  truncation kind() const { return kind_; }
  /// The decomposed matrices, in the order of the layer's matrices.
  const std::vector<matrix_truncation>& matrices() const { return matrices_; }

  /// Gains of each rank group: matrix_truncation::gains, summed over the group's matrices.
  std::vector<std::vector<double>> gains() const {
    std::vector<std::vector<double>> all;
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      std::vector<double> own = matrices_[i].gains();
      if (groups_[i] == all.size()) {
        all.push_back(std::move(own));
      } else {
        std::vector<double>& sum = all[groups_[i]];
        for (std::size_t r = 0; r < sum.size(); ++r) sum[r] += own[r];
      }
    }
    return all;
  }

  /// The rank of each group: the largest rank that the group's policy chooses for a matrix of the group.
  rank_list choose(std::span<const rank_policy> policies) const {
    rank_list ranks;
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      const matrix_truncation& one = matrices_[i];
      const index_t rank = choose_rank(policy_of(policies, groups_[i]), one.rows(), one.cols(),
                                       one.spectrum(), one.squared_norm());
      ranks.resize(std::max(ranks.size(), groups_[i] + 1));
      ranks[groups_[i]] = std::max(ranks[groups_[i]], rank);
    }
    return ranks;
  }

  /// The factors of all matrices, in order, with the given rank of each group.
  /// Throws rank_error for a rank outside 1 .. min(rows, cols) of a matrix.
  std::vector<factors<T>> make(const rank_list& ranks) const {
    std::vector<factors<T>> made;
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      made.push_back(matrices_[i].template make<T>(ranks[groups_[i]]));
      made.back().report.name = names_[i];
      made.back().kernel = kernels_[i];
    }
    return made;
  }

 private:
  // Throws shape_error unless the statistics are those of as many matrices.
  static void check(const layer_weights<T>& weights, const layer_statistics* statistics) {
    if (statistics == nullptr || statistics->matrices.size() == weights.matrices.size()) return;
    throw_error<shape_error>({weights.name, ": statistics of ", statistics->matrices.size(),
                              " matrices for a layer of ", weights.matrices.size()});
  }

  // The options of matrix i: its name, whether errors are centered, and its part of the output scales.
  truncation_options own_options(const layer_weights<T>& weights, const layer_statistics* statistics,
                                 std::size_t i) const {
    truncation_options own;
    own.kind = kind_;
    own.name = weights.describe(i);
    if (statistics == nullptr) return own;
    // A plain truncation leaves the mean error in the outputs.
    own.centered = statistics->normalized || (kind_ != truncation::plain && has_any(weights.biases));
    if (!statistics->output_scale.empty()) {
      const index_t first = place(weights, i).first;
      const index_t rows = weights.matrices[i].view.extent(0);
      const auto scales = static_cast<index_t>(statistics->output_scale.size());
      if (scales < first + rows) {
        throw_error<shape_error>({own.name, ": an output_scale of ", scales, " numbers; outputs ", first,
                                  " to ", first + rows, " need one each"});
      }
      const auto from = statistics->output_scale.begin() + first;
      own.output_scale.assign(from, from + rows);
    }
    return own;
  }

  // Location of the bias of matrix i's outputs.
  static bias_place place(const layer_weights<T>& weights, std::size_t i) {
    return place_of_bias(weights.matrices, i, weights.rows_are_outputs, weights.biases.size(),
                         [](const auto& matrix) { return matrix.view.extent(0); });
  }
  // The part of matrix i's recorded outputs that is a bias; empty if there is none. Layers that add two
  // biases record inputs instead of outputs.
  static std::vector<T> bias_of(const layer_weights<T>& weights, std::size_t i) {
    if (!weights.rows_are_outputs || weights.biases.size() != 1 || weights.biases[0].view.is_null())
      return {};
    const tensor_view<const T, 1> own =
        weights.biases[0].view.slice(0, place(weights, i).first, weights.matrices[i].view.extent(0));
    std::vector<T> values;
    for (index_t j = 0; j < own.size(); ++j) values.push_back(own(j));
    return values;
  }

  truncation kind_;
  std::list<tensor<T, 2>> unrolled_;  // referenced by matrices_
  std::vector<extents<2>> kernels_;
  std::vector<std::string> names_;
  std::vector<std::size_t> groups_;
  std::vector<matrix_truncation> matrices_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
