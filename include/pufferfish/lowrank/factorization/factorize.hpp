// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `svd_factorize`: makes a low-rank layer from a dense layer of any framework, by means of its layer_traits.
///
///     auto a = svd_factorize<LowRankConv<float, 16>>(dense);      // kind and rank from the type
///     auto b = svd_factorize<16>(dense);                          // kind of layer from the traits
///     svd_factorize(dense, existing_low_rank_layer);              // into an existing layer
///     auto c = svd_factorize<LowRankConv<float>>(dense, rank_ratio{0.25});   // rank from a policy
///     auto d = svd_factorize(dense, rank_ratio{0.25});            // the same, kind from the traits
///     auto e = svd_factors(dense, energy_kept{0.9});              // plain matrices, for a host's own layers
///     auto f = svd_factorize(dense, rank_ratio{0.25}, seen);      // with output_statistics: smaller error
///
/// A layer has one or more matrices, each factorized separately: one for a linear layer, a convolution or an
/// embedding, one per group of a grouped convolution, eight for an LSTM, four for attention. Factors and
/// reports are listed in that order. Matrices of a rank group (see kind_traits) get one rank, the largest
/// that the policy chooses for any of them: all groups of a convolution, all gates of one side of an LSTM.
///
/// Common to all forms: the dense layer is read on the host and not changed; the result owns its memory and
/// refers to nothing. Matrices are decomposed one after another in the calling thread, in double, with about
/// rows cols min(rows, cols) multiply-adds each. A rank that does not depend on singular values is checked
/// before any decomposition. On one machine, equal input gives equal bits.
///
/// Errors, which name the layer (options.name) and, if there are several, the matrix: shape_error for
/// inconsistent layer_traits and for statistics of another layer, rank_error for a rank outside 1 ..
/// min(rows, cols) or (unless options.allow_growth) one at which a matrix would not become smaller,
/// value_error for an element that is not finite and for an options.truncate that the statistics do not
/// allow. Also value_error for a policy out of its range.

#include <algorithm>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <pufferfish/core/separate.hpp>
#include <pufferfish/lowrank/factorization/factors.hpp>
#include <pufferfish/lowrank/factorization/layer_truncation.hpp>
#include <pufferfish/lowrank/kinds.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/lowrank/trait_errors.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The factors of all matrices of a layer. `policies`: one policy for all rank groups, or one for each group.
/// A matrix gets the largest rank that its group's policy chooses for any matrix of the group. Throws the
/// errors listed at the top of this file.
template <class T>
std::vector<factors<T>> factorize_weights(const layer_weights<T>& weights,
                                          std::span<const rank_policy> policies,
                                          const factorize_options& options) {
  const auto check = [&](const rank_list& ranks) {
    for (std::size_t i = 0; i < weights.matrices.size(); ++i) {
      const tensor_view<const T, 4>& view = weights.matrices[i].view;
      const index_t rows = view.extent(0), cols = rows == 0 ? 0 : view.size() / rows;
      const index_t rank = ranks[weights.matrices[i].group];
      check_rank(weights.describe(i), rows, cols, rank);
      if (!options.allow_growth) check_shrinks(weights.describe(i), rows, cols, rank);
    }
  };
  rank_list known;
  for (const auto& [name, group, view] : weights.matrices) {
    const rank_policy& policy = policy_of(policies, group);
    if (needs_spectrum(policy)) break;
    const index_t rows = view.extent(0), cols = rows == 0 ? 0 : view.size() / rows;
    const index_t rank = choose_rank(policy, rows, cols, {}, 0.0);
    if (group == known.size()) known.push_back(rank);
    known[group] = std::max(known[group], rank);
  }
  if (!known.empty()) check(known);
  const layer_truncation<T> decomposed(weights, options, known);
  const rank_list ranks = known.empty() ? decomposed.choose(policies) : known;
  if (known.empty()) check(ranks);
  return decomposed.make(ranks);
}
PUFFERFISH_SEPARATE_FUNCTION(linalg, factorize_weights);

/// Returns the rank of each rank group (matrices of a layer that share one rank). made[i] are the factors of
/// weights.matrices[i]; the rank of a group is that of its first matrix.
template <class T>
rank_list ranks_of(const layer_weights<T>& weights, const std::vector<factors<T>>& made) {
  rank_list ranks;
  for (std::size_t i = 0; i < made.size(); ++i) {
    if (weights.matrices[i].group == ranks.size()) ranks.push_back(made[i].rank());
  }
  return ranks;
}

/// Copies factors and the dense layer's biases into a low-rank layer, whose shape and ranks the caller has
/// checked. Low-rank bias i becomes the sum of dense biases i and i + to.biases.size(): an exact copy if only
/// one of the two exists, zeros if none exists. The mean errors of the matrices' outputs, where known, are
/// added to the biases.
template <class T>
void store_factors(const std::vector<factors<T>>& made, const std::vector<named_view<const T, 1>>& biases,
                   const low_rank_parts<T>& to) {
  for (std::size_t i = 0; i < made.size(); ++i) {
    copy(made[i].down_oihw(), to.factors[i].down);
    copy(made[i].up_oihw(), to.factors[i].up);
  }
  const std::size_t count = to.biases.size();
  for (std::size_t i = 0; i < count; ++i) {
    const tensor_view<T, 1>& target = to.biases[i];
    if (target.is_null()) continue;
    bool written = false;
    for (std::size_t from = i; from < biases.size(); from += count) {
      const tensor_view<const T, 1>& bias = biases[from].view;
      if (bias.is_null()) continue;
      for (index_t j = 0; j < target.size(); ++j) target(j) = written ? target(j) + bias(j) : bias(j);
      written = true;
    }
    if (!written) std::fill_n(target.data(), target.size(), T{});
  }
  for (std::size_t i = 0; count > 0 && i < made.size(); ++i) {
    const bias_place place = place_of_bias(made, i, to.rows_are_outputs, count,
                                           [](const factors<T>& one) { return one.up.extent(0); });
    const tensor_view<T, 1>& target = to.biases[place.bias];
    if (target.is_null()) continue;
    for (std::size_t j = 0; j < made[i].mean_error.size(); ++j) {
      target(place.first + static_cast<index_t>(j)) += static_cast<T>(made[i].mean_error[j]);
    }
  }
}

/// Calls work(layer) with parameters that the host can write. A layer on a device is passed through its
/// member on_host.
template <class Layer, class Work>
void write_on_host(Layer& layer, Work&& work) {
  if constexpr (requires { layer.on_host(work); }) {
    layer.on_host(work);
  } else {
    work(layer);
  }
}

/// Stores the factors in a low-rank layer, on the host or on a device, and returns their reports.
template <class T>
std::vector<factor_report> store_and_report(const layer_weights<T>& weights,
                                            const std::vector<factors<T>>& made, auto& layer) {
  write_on_host(layer, [&](auto& host) { store_factors(made, weights.biases, parts_of(host)); });
  return reports_of(made);
}

/// Makes a low-rank layer of type LowRank from a dense layer, with one policy for all rank groups. `reports`
/// may be nullptr; otherwise its contents are replaced by one report per matrix. Throws the errors listed at
/// the top of this file.
template <class LowRank, class Dense>
LowRank factorize_to(const Dense& dense, const rank_policy& policy, const factorize_options& options,
                     std::vector<factor_report>* reports) {
  const auto weights = weights_of(dense, options.name);
  const auto made = factorize_weights(weights, {&policy, 1}, options);
  auto layer = make_low_rank<LowRank>(kind_of<Dense>::shape(dense, options.name), ranks_of(weights, made),
                                      has_any(weights.biases));
  std::vector<factor_report> all = store_and_report(weights, made, layer);
  if (reports != nullptr) *reports = std::move(all);
  return layer;
}

/// Throws shape_error unless the low-rank layer has the dense layer's shape, and has biases if the dense
/// layer has some. Throws state_error if the low-rank layer was moved from.
template <class Dense, class LowRank>
void check_same_shape(const Dense& dense, LowRank& layer, const std::string& name) {
  check_not_moved(layer);
  const auto shape = kind_of<Dense>::shape(dense, name);
  const bool same = shape == kind_of<Dense>::shape(layer);
  const auto has_bias = [](const auto& bias) { return !bias.is_null(); };
  const auto biases = parts_of(layer).biases;
  if (same && (!has_any(host_biases(dense)) || std::any_of(biases.begin(), biases.end(), has_bias))) return;
  throw_error<shape_error>({name, ": ", shape.describe(),
                            same ? ", with biases, does not fit " : " does not fit ", layer.describe()});
}

/// Reports by static_assert a type LowRank that is no low-rank layer, or has another kind or scalar than
/// Dense. The result is false in this case, so that no further errors follow.
template <class LowRank, class Dense>
constexpr bool check_pair() {
  static_assert(
      low_rank_layer<LowRank>,
      "pufferfish: svd_factorize<L>(dense): L must be one of the library's low-rank layers, for example "
      "LowRankConv<float, 16> or LowRankLinear<float>");
  if constexpr (low_rank_layer<LowRank>) {
    constexpr bool same_kind = std::is_same_v<low_rank_kind_of<LowRank>, kind_of<Dense>>;
    constexpr bool same_scalar =
        std::is_same_v<parameter_t<typename LowRank::value_type>, weight_scalar_t<Dense>>;
    static_assert(same_kind,
                  "pufferfish: the dense and the low-rank layer are of different kinds (layer_kind)");
    static_assert(same_scalar, "pufferfish: the dense and the low-rank layer have different scalars");
    return same_kind && same_scalar;
  }
  return false;
}

/// The library's low-rank layer type for a dense layer's kind and scalar.
template <class Dense, index_t Rank>
using low_rank_of = typename kind_of<Dense>::template low_rank<weight_scalar_t<Dense>, Rank, device::cpu>;

}  // namespace detail

/// The factors of a layer's weights as owned matrices with reports, in the order of the layer's matrices, for
/// hosts that run their own layers. Throws the errors that the top of this file describes. Biases are not
/// part of the result; the caller adds factors::mean_error, if it is not empty, to the bias of its second
/// layer.
///
/// \code
/// for (const auto& made : svd_factors(dense, energy_kept{0.9})) {
///   std::printf("%s: rank %td\n", made.report.name.c_str(), made.rank());
///   ...  // made.down: rank x cols, made.up: rows x rank
/// }
/// \endcode
template <detail::factorizable Dense>
std::vector<factors<detail::weight_scalar_t<Dense>>> svd_factors(const Dense& dense,
                                                                 const rank_policy& policy,
                                                                 const factorize_options& options = {}) {
  return detail::factorize_weights(detail::weights_of(dense, options.name), {&policy, 1}, options);
}

/// Converts a dense layer to a low-rank layer whose type fixes the rank. `reports`, if given, receives one
/// report per matrix (its former contents are dropped). The biases of the dense layer are copied; if it adds
/// two biases, their sum is stored. The result has biases if the dense layer has at least one. Throws the
/// errors that the top of this file describes.
///
/// \code
/// std::vector<factor_report> reports;
/// auto layer = svd_factorize<LowRankConv<float, 16>>(dense, {"conv3"}, &reports);
/// double kept = reports[0].kept_energy;
/// \endcode
template <class LowRank, detail::factorizable Dense>
LowRank svd_factorize(const Dense& dense, const factorize_options& options = {},
                      std::vector<factor_report>* reports = nullptr) {
  if constexpr (detail::check_pair<LowRank, Dense>()) {
    static_assert(LowRank::static_rank != dynamic_rank,
                  "pufferfish: a layer with dynamic rank needs a rank policy: svd_factorize<L>(dense, "
                  "rank_ratio{0.25})");
    return detail::factorize_to<LowRank>(dense, fixed_rank{LowRank::static_rank}, options, reports);
  }
}

/// Converts a dense layer to a low-rank layer with a dynamic rank, chosen by `policy` for each rank group.
/// Biases, reports and errors are those of the overload for a static rank.
template <class LowRank, detail::factorizable Dense>
LowRank svd_factorize(const Dense& dense, const rank_policy& policy, const factorize_options& options = {},
                      std::vector<factor_report>* reports = nullptr) {
  if constexpr (detail::check_pair<LowRank, Dense>()) {
    static_assert(LowRank::static_rank == dynamic_rank,
                  "pufferfish: a layer with static rank takes no rank policy: svd_factorize<L>(dense)");
    return detail::factorize_to<LowRank>(dense, policy, options, reports);
  }
}

/// Converts a dense layer to a low-rank layer of static rank `Rank`, whose kind follows from the
/// layer_traits: svd_factorize<16>(dense). Biases, reports and errors are those of
/// svd_factorize<LowRank>(dense).
template <index_t Rank, detail::factorizable Dense>
detail::low_rank_of<Dense, Rank> svd_factorize(const Dense& dense, const factorize_options& options = {},
                                               std::vector<factor_report>* reports = nullptr) {
  return svd_factorize<detail::low_rank_of<Dense, Rank>>(dense, options, reports);
}

/// Converts a dense layer to a low-rank layer with a dynamic rank, whose kind follows from the layer_traits:
/// svd_factorize(dense, rank_ratio{0.25}). Biases, reports and errors are those of
/// svd_factorize<LowRank>(dense). Callers do not set `None`: this parameter keeps the L of
/// svd_factorize<L>(...) from being deduced as Dense.
template <detail::trait_fault None = detail::trait_fault::none, detail::has_trait_fault<None> Dense>
detail::low_rank_of<Dense, dynamic_rank> svd_factorize(const Dense& dense, const rank_policy& policy,
                                                       const factorize_options& options = {},
                                                       std::vector<factor_report>* reports = nullptr) {
  return svd_factorize<detail::low_rank_of<Dense, dynamic_rank>>(dense, policy, options, reports);
}

/// Converts a dense layer to a low-rank layer with a dynamic rank, by means of statistics of the layer's rows
/// in training. The statistics reduce the error of the layer's outputs or of the loss (see truncation).
/// `statistics` replaces options.statistics and is read during the call only. Throws, naming the layer,
/// shape_error for statistics of another layer, and value_error for statistics without rows unless
/// options.truncate is plain; and the errors of the other overloads.
template <detail::trait_fault None = detail::trait_fault::none, detail::has_trait_fault<None> Dense>
detail::low_rank_of<Dense, dynamic_rank> svd_factorize(const Dense& dense, const rank_policy& policy,
                                                       const layer_statistics& statistics,
                                                       factorize_options options = {},
                                                       std::vector<factor_report>* reports = nullptr) {
  options.statistics = &statistics;
  detail::check_recorded(statistics, options);
  return svd_factorize<detail::low_rank_of<Dense, dynamic_rank>>(dense, policy, options, reports);
}

/// Fills an existing low-rank layer, keeping its ranks, and returns one report per matrix. Throws
/// shape_error, naming the layer and both shapes, if the layer's shape differs from the dense layer's, or if
/// it has no biases while the dense layer has some; state_error if it was moved from; and the errors that the
/// top of this file describes. The layer is unchanged if an exception is thrown. Biases without a counterpart
/// in the dense layer become zero. Gradients are not changed. An embedding keeps its own padding token.
template <detail::factorizable Dense, detail::low_rank_layer LowRank>
std::vector<factor_report> svd_factorize(const Dense& dense, LowRank& layer,
                                         const factorize_options& options = {}) {
  if constexpr (detail::check_pair<LowRank, Dense>()) {
    detail::check_same_shape(dense, layer, options.name);
    const rank_list ranks = detail::parts_of(layer).ranks();
    const auto weights = detail::weights_of(dense, options.name);
    const auto made = detail::factorize_weights(weights, detail::fixed_ranks(ranks), options);
    return detail::store_and_report(weights, made, layer);
  } else {
    return {};  // a static_assert has failed
  }
}

PUFFERFISH_NAMESPACE_END
