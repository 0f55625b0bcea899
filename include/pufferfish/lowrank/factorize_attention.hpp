// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: how an attention layer of any framework, through its layer_traits, becomes a low-rank one; the
/// interface is svd_factorize (factorize.hpp).

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>

#include <pufferfish/lowrank/attention.hpp>
#include <pufferfish/lowrank/factors.hpp>
#include <pufferfish/lowrank/traits.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The shape that the traits' matrices have. Throws shape_error if matrices and biases contradict each other.
template <class Dense>
attention_shape host_attention_shape(const Dense& dense, const std::string& name) {
  const auto matrices = layer_traits<Dense>::matrices(dense);
  const index_t heads = layer_traits<Dense>::heads(dense);
  if (matrices.size() != 4 || heads < 1) {
    throw_error<shape_error>({name, ": layer_traits give ", matrices.size(), " matrices and ", heads,
                              " heads; an attention layer has four matrices and at least one head"});
  }
  const auto extent = [&](std::size_t i, std::size_t d) { return matrices[i].view.extent(d); };
  const index_t model = extent(0, 1), keys = extent(0, 0), values = extent(2, 0);
  const bool fits = extent(1, 0) == keys && extent(1, 1) == model && extent(2, 1) == model &&
                    extent(3, 0) == model && extent(3, 1) == values && keys % heads == 0 &&
                    values % heads == 0;
  if (!fits) {
    throw_error<shape_error>({name, ": query ", matrices[0].view.shape(), ", key ", matrices[1].view.shape(),
                              ", value ", matrices[2].view.shape(), " and output ", matrices[3].view.shape(),
                              " of ", heads, " heads do not fit each other"});
  }
  if constexpr (has_biases_trait<Dense>) {
    const auto biases = layer_traits<Dense>::biases(dense);
    if (biases.size() != matrices.size()) {
      throw_error<shape_error>({name, ": layer_traits of attention give ", biases.size(),
                                " biases where there must be 4 (null views for none)"});
    }
    for (std::size_t i = 0; i < biases.size(); ++i) {
      if (biases[i].view.is_null() || biases[i].view.extent(0) == extent(i, 0)) continue;
      throw_error<shape_error>({name, ": layer_traits give a bias ", biases[i].name, " of ",
                                biases[i].view.shape(), " for ", extent(i, 0), " outputs"});
    }
  }
  return {model, heads, keys / heads, values / heads};
}

/// Factors of query, key, value and output, each with the rank that its policy chooses.
template <class Dense>
std::vector<factors<weight_scalar_t<Dense>>> attention_factors(const Dense& dense,
                                                               const std::array<rank_policy, 4>& policies,
                                                               const factorize_options& options) {
  using T = weight_scalar_t<Dense>;
  host_attention_shape(dense, options.name);
  const auto matrices = layer_traits<Dense>::matrices(dense);
  std::vector<factors<T>> made;
  for (std::size_t i = 0; i < policies.size(); ++i) {
    factorize_options own = options;
    own.name = options.name + "." + matrices[i].name;
    made.push_back(factorize_matrix<T>(tensor_view<const T, 2>(matrices[i].view), policies[i], own));
  }
  return made;
}

/// Copies factors and the host's biases (zeros for those it has not) into a low-rank layer of the same shape
/// and ranks.
template <class Dense, class LowRank, class T>
void load_attention_factors([[maybe_unused]] const Dense& dense, const std::vector<factors<T>>& made,
                            LowRank& layer) {
  for (std::size_t i = 0; i < made.size(); ++i) {
    auto& to = layer.projections()[i];
    copy(tensor_view<const T, 2>(made[i].down), to.down());
    copy(tensor_view<const T, 2>(made[i].up), to.up());
    if (!to.has_bias()) continue;
    tensor_view<const T, 1> bias;
    if constexpr (has_biases_trait<Dense>) bias = layer_traits<Dense>::biases(dense)[i].view;
    bias.is_null() ? void(std::fill_n(to.bias().data(), to.bias().size(), T{})) : copy(bias, to.bias());
  }
}

template <class Dense>
bool attention_wants_bias([[maybe_unused]] const Dense& dense) {
  bool wanted = false;
  if constexpr (has_biases_trait<Dense>) {
    for (const auto& bias : layer_traits<Dense>::biases(dense)) wanted = wanted || !bias.view.is_null();
  }
  return wanted;
}

/// An empty low-rank layer of the dense layer's shape, with a bias if any of its projections has one.
template <class LowRank, class Dense>
LowRank make_low_rank_attention(const Dense& dense, [[maybe_unused]] const std::array<index_t, 4>& ranks,
                                const std::string& name) {
  const attention_shape shape = host_attention_shape(dense, name);
  const bool bias = attention_wants_bias(dense);
  if constexpr (std::is_constructible_v<LowRank, attention_shape, std::array<index_t, 4>, bool>) {
    return LowRank(shape, ranks, bias);
  } else {
    return LowRank(shape, bias);
  }
}

/// Throws shape_error unless the low-rank layer has the dense one's shape, and a bias where that has one.
template <class Dense, class T>
void check_same_attention(const Dense& dense, const low_rank_attention<T>& layer, const std::string& name) {
  const attention_shape shape = host_attention_shape(dense, name);
  const bool bias = attention_wants_bias(dense);
  if (shape == layer.shape() && (!bias || layer.query().has_bias())) return;
  throw_error<shape_error>({name, ": attention, ", shape.describe(),
                            bias ? ", with biases, does not fit " : ", does not fit ", layer.describe()});
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
