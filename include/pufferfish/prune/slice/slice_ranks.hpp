// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `slice_ranks`: removes rank components from the low-rank layers of a network.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/prune/slice/layer_slices.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Components of a low-rank layer that remain: for each of its matrices up down (kind_traits), the indices of
/// the columns of up and rows of down, ascending. Matrices of one rank group keep equally many.
struct kept_components {
  std::string layer;                       ///< name of the low-rank layer
  std::vector<std::vector<index_t>> kept;  ///< of each matrix: the components that remain
};

namespace detail {

/// The low-rank layers of a model, LowRankNormConvs included: their slots by name, in the order of
/// slot_finder, then those of norm_conv_finder. The slots are valid until the model is modified.
template <class T, class Device, class Root>
std::vector<std::pair<std::string, any_layer<T, Device>*>> low_rank_slots(Root& root) {
  std::vector<std::pair<std::string, any_layer<T, Device>*>> result;
  slot_finder<T, Device> found;
  root.visit_layers(found);
  for (std::size_t i = 0; i < found.slots.size(); ++i) {
    if (!found.slots[i]->ranks().empty()) result.emplace_back(found.layers[i].name, found.slots[i]);
  }
  norm_conv_finder<T, Device> norms;
  root.visit_layers(norms);
  for (const auto& place : norms.all) result.emplace_back(place.name, place.slot);
  return result;
}

/// Throws value_error, naming the layer, unless `kept` has one list for each of `ranks`, with at least one
/// index, all indices ascending and below the rank.
inline void check_components(const kept_components& wanted, const rank_list& ranks) {
  if (wanted.kept.size() != ranks.size()) {
    throw_error<value_error>(
        {wanted.layer, ": ", wanted.kept.size(), " lists of components for ", ranks.size(), " matrices"});
  }
  for (std::size_t m = 0; m < ranks.size(); ++m) {
    const auto& list = wanted.kept[m];
    const bool ascending = std::adjacent_find(list.begin(), list.end(), std::greater_equal<>()) == list.end();
    if (list.empty() || !ascending || list.front() < 0 || list.back() >= ranks[m]) {
      throw_error<value_error>({wanted.layer, ": the components of matrix ", m,
                                " are not ascending indices below its rank ", ranks[m], ", or none"});
    }
  }
}

/// Makes a LowRankNormConv of one group with fewer components: rows of `down`, entries of the batch norm, and
/// columns of `up` are selected. Throws state_error, naming the layer, for several groups and for a layer
/// whose batch norm is still a probe (observe_factors), and the value_error of check_components.
template <class T, class Device>
any_layer<T, Device> with_components(LowRankNormConv<T, Device>& layer, const kept_components& wanted) {
  using P = parameter_t<T>;
  if (layer.shape().groups > 1) {
    throw_error<state_error>({wanted.layer, ": a LowRankNormConv of ", layer.shape().groups, " groups"});
  }
  check_components(wanted, {layer.rank()});
  const std::vector<index_t>& list = wanted.kept[0];
  const auto rank = static_cast<index_t>(list.size());
  LowRankNormConv<T, Device> result(layer.shape(), rank, layer.has_bias());
  auto* const norm = layer[1].template target<BatchNorm<T>>();
  if (norm == nullptr) {
    throw_error<state_error>({wanted.layer, ": call settle_factor_norms before components are removed"});
  }
  result[1] = sliced_norm(*norm, rank, &list);
  const auto conv = [](any_layer<T, Device>& slot) -> Conv<T>& { return *slot.template target<Conv<T>>(); };
  gather_matrix(tensor_view<const P, 4>(conv(layer[0]).weight()), &list, nullptr, conv(result[0]).weight());
  gather_matrix(tensor_view<const P, 4>(conv(layer[2]).weight()), nullptr, &list, conv(result[2]).weight());
  gather_vector(tensor_view<const P, 1>(conv(layer[2]).bias()), nullptr, conv(result[2]).bias());
  return result;
}

/// Makes a low-rank layer of any kind with fewer components. Throws state_error for a layer with a residual,
/// and value_error for lists that do not fit, or if the matrices of a rank group keep different numbers of
/// components.
template <class T, class Device>
any_layer<T, Device> with_components(any_layer<T, Device>& layer, const kept_components& wanted) {
  using P = parameter_t<T>;
  if (auto* conv = layer.template target<LowRankNormConv<T, Device>>()) return with_components(*conv, wanted);
  if (layer.template target<AnnealedLayer<T, Device>>() != nullptr) {
    throw_error<state_error>({wanted.layer, ": has a residual: call detach_residuals first"});
  }
  const low_rank_parts<P> from = layer.low_rank();
  rank_list ranks, of_group;
  for (const factor_views<P>& one : from.factors) ranks.push_back(one.up.extent(1));
  check_components(wanted, ranks);
  for (std::size_t m = 0; m < from.factors.size(); ++m) {
    const auto count = static_cast<index_t>(wanted.kept[m].size());
    if (from.factors[m].group == of_group.size()) of_group.push_back(count);
    if (of_group[from.factors[m].group] == count) continue;
    throw_error<value_error>({wanted.layer, ": matrix ", m, " keeps ", count,
                              " components, another one of its ", "rank group ",
                              of_group[from.factors[m].group]});
  }
  any_layer<T, Device> result = std::as_const(layer).twin(of_group);
  const low_rank_parts<P> to = result.low_rank();
  for (std::size_t m = 0; m < from.factors.size(); ++m) {
    const kept_list list = &wanted.kept[m];
    gather_matrix(tensor_view<const P, 4>(from.factors[m].down), list, nullptr, to.factors[m].down);
    gather_matrix(tensor_view<const P, 4>(from.factors[m].up), nullptr, list, to.factors[m].up);
  }
  for (std::size_t b = 0; b < from.biases.size(); ++b) {
    gather_vector(tensor_view<const P, 1>(from.biases[b]), nullptr, to.biases[b]);
  }
  return result;
}

}  // namespace detail

/// Reduces the ranks of the listed layers: keeps the columns of up and rows of down in the lists, and for a
/// LowRankNormConv the entries of its batch norm. The function of the network changes by the removed
/// components alone, not at all for those whose column or row is zero. Layers of all kinds are accepted,
/// LSTM, attention and embeddings included. All other values are copied bit for bit. Parameters move to new
/// memory: optimizers made before throw state_error. sliced_values carries the states of an optimizer over.
/// Returns the ranks before.
///
/// Throws state_error for a name that is no low-rank layer, is listed twice, or has a residual, value_error
/// for lists that do not fit the layer; each names the layer, and the model is unchanged then.
///
/// \code
/// slice_ranks(net, {{"layer1.0.conv1", {{0, 1, 3}}}});  // of rank 4, component 2 goes
/// \endcode
template <class Root, class Device>
std::vector<layer_rank> slice_ranks(model<Root, Device>& net, const std::vector<kept_components>& kept) {
  using T = typename Root::value_type;
  std::vector<layer_rank> before;
  net.modify([&](Root& root) {
    const auto slots = detail::low_rank_slots<T, Device>(root);
    std::vector<std::pair<any_layer<T, Device>*, any_layer<T, Device>>> made;
    for (const kept_components& wanted : kept) {
      const auto at = std::find_if(slots.begin(), slots.end(),
                                   [&](const auto& one) { return one.first == wanted.layer; });
      const bool twice = std::any_of(before.begin(), before.end(),
                                     [&](const layer_rank& one) { return one.name == wanted.layer; });
      if (at == slots.end() || twice) {
        detail::throw_error<state_error>(
            {"slice_ranks: ", wanted.layer,
             twice ? " is listed twice" : " is no low-rank layer of the network"});
      }
      made.emplace_back(at->second, detail::with_components(*at->second, wanted));
      const auto* conv = at->second->template target<LowRankNormConv<T, Device>>();
      before.push_back({wanted.layer, conv != nullptr ? rank_list{conv->rank()} : at->second->ranks()});
    }
    for (auto& [slot, layer] : made) *slot = std::move(layer);
  });
  return before;
}

PUFFERFISH_NAMESPACE_END
