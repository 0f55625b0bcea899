// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// All kinds of layers that can be factorized, and the checks of a host's layer_traits for each kind.

#include <concepts>
#include <type_traits>
#include <utility>

#include <pufferfish/lowrank/kinds/attention.hpp>
#include <pufferfish/lowrank/kinds/conv.hpp>
#include <pufferfish/lowrank/kinds/embedding.hpp>
#include <pufferfish/lowrank/kinds/linear.hpp>
#include <pufferfish/lowrank/kinds/lstm.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The first reason why the layer_traits of `Layer` do not describe a factorizable layer; `none` if they do.
/// Checks in this order: existence, kind, matrices, dimensions, scalar, members that only the kind needs.
template <class Layer>
constexpr trait_fault find_trait_fault() {
  using traits = layer_traits<Layer>;
  if constexpr (!requires { sizeof(traits); }) {
    return trait_fault::no_traits;
  } else if constexpr (!requires { kind_traits<traits::kind>::dimensions; }) {
    return trait_fault::kind;
  } else if constexpr (!requires { typename weight_scalar_t<Layer>; }) {
    return trait_fault::matrices;
  } else if constexpr (!std::is_convertible_v<weight_view_t<Layer>,
                                              tensor_view<const weight_scalar_t<Layer>,
                                                          kind_traits<traits::kind>::dimensions>>) {
    return trait_fault::dimensions;
  } else if constexpr (!std::same_as<weight_scalar_t<Layer>, float> &&
                       !std::same_as<weight_scalar_t<Layer>, double>) {
    return trait_fault::scalar;
  } else if constexpr (requires { kind_traits<traits::kind>::template missing<Layer>(); }) {
    return kind_traits<traits::kind>::template missing<Layer>();
  } else {
    return trait_fault::none;
  }
}

template <class Layer, trait_fault Fault>
concept has_trait_fault = find_trait_fault<Layer>()
== Fault;

/// A layer whose layer_traits have all members that its kind needs.
template <class Layer>
concept factorizable = has_trait_fault<Layer, trait_fault::none>;

/// kind_traits of a layer that has layer_traits.
template <class Dense>
using kind_of = kind_traits<layer_traits<Dense>::kind>;
/// kind_traits of a low-rank layer.
template <class LowRank>
using low_rank_kind_of = kind_traits<LowRank::low_rank_kind>;

/// A layer of type LowRank whose parameters are zero. `ranks` has one rank per rank group; a type with a
/// static rank ignores `ranks`. Throws rank_error for an invalid rank.
template <class LowRank>
LowRank make_low_rank(const typename low_rank_kind_of<LowRank>::shape_type& shape,
                      [[maybe_unused]] const rank_list& ranks, bool bias) {
  using kind = low_rank_kind_of<LowRank>;
  if constexpr (LowRank::static_rank != dynamic_rank) {
    return kind::template make<LowRank>(shape, bias);
  } else {
    return [&]<std::size_t... Group>(std::index_sequence<Group...>) {
      return kind::template make<LowRank>(shape, bias, ranks[Group]...);
    }
    (std::make_index_sequence<kind::rank_groups>());
  }
}

/// The weights of a host's layer, called `name`. Throws shape_error if its layer_traits are inconsistent.
/// Copies no weights: the result refers to the memory of `dense`, which must outlive it.
template <class Dense>
layer_weights<weight_scalar_t<Dense>> weights_of(const Dense& dense, const std::string& name) {
  const auto shape = kind_of<Dense>::shape(dense, name);
  return {name,
          shape.describe(),
          kind_of<Dense>::matrices(dense),
          host_biases(dense),
          kind_of<Dense>::rows_are_outputs,
          kind_of<Dense>::dimensions == 4};
}

/// The factors and biases of a low-rank layer.
/// The result consists of views of the layer's memory. Throws state_error for a moved-from layer.
template <class LowRank>
low_rank_parts<parameter_t<typename LowRank::value_type>> parts_of(LowRank& layer) {
  using kind = low_rank_kind_of<LowRank>;
  using core = typename kind::template core<typename LowRank::value_type>;
  return {kind::factors(static_cast<core&>(layer)), kind::biases(static_cast<core&>(layer)),
          kind::rows_are_outputs};
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
