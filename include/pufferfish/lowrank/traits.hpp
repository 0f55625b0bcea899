// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The contract with a host framework: specialise `layer_traits` for its layer, and the layer can be
/// factorized.

#include <concepts>
#include <cstddef>
#include <type_traits>
#include <utility>

#include <pufferfish/core/view.hpp>
#include <pufferfish/ops/conv_shape.hpp>

PUFFERFISH_NAMESPACE_BEGIN

enum class layer_kind { linear, conv, lstm, attention, embedding };

/// A weight of a layer under a name of its own ("weight", "input_gate", "query").
template <class T, std::size_t N>
struct named_view {
  const char* name;
  tensor_view<T, N> view;
};

/// What the library has to know about a layer of type `Layer`. There is no general definition: specialise it.
///
///     template <>
///     struct pufferfish::layer_traits<host::Conv2d> {
///       static constexpr auto kind = pufferfish::layer_kind::conv;
///       // Stride, padding and the like; convolutions only.
///       static pufferfish::conv_shape shape(const host::Conv2d& layer);
///       // A std::array (or vector) of the layer's weight matrices: one for linear [out][in] and for conv
///       // [out][in][height][width]; for an LSTM eight [hidden][in]: the input side of the gates i, f, g,
///       // o, then their hidden side; for attention query [heads key][model], key, value
///       // [heads value][model] and output [model][heads value]. Views onto the layer's own memory, any
///       // strides.
///       static std::array<pufferfish::named_view<const float, 4>, 1> matrices(const host::Conv2d& layer);
///       // Optional, linear and convolutions: out elements, or a null view for a layer without bias.
///       static pufferfish::tensor_view<const float, 1> bias(const host::Conv2d& layer);
///       // Optional, LSTM: four vectors of `hidden` elements (gates i, f, g, o), or eight where the input
///       // and the hidden side have biases of their own: those are added up.
///       // Attention: four vectors, or null views.
///       static std::array<pufferfish::named_view<const float, 1>, 4> biases(const host::LSTM& layer);
///       // Attention only: the number of heads.
///       static pufferfish::index_t heads(const host::Attention& layer);
///     };
template <class Layer>
struct layer_traits;

namespace detail {

template <class Layer>
concept has_layer_traits = requires(const Layer& layer) {
  layer_traits<Layer>::kind;
  layer_traits<Layer>::matrices(layer);
};

template <class Layer>
concept has_bias_trait = requires(const Layer& layer) {
  layer_traits<Layer>::bias(layer);
};
template <class Layer>
concept has_biases_trait = requires(const Layer& layer) {
  layer_traits<Layer>::biases(layer);
};

template <class Layer>
inline constexpr bool is_lstm = false;
template <has_layer_traits Layer>
inline constexpr bool is_lstm<Layer> = layer_traits<Layer>::kind == layer_kind::lstm;

template <class Layer>
inline constexpr bool is_attention = false;
template <has_layer_traits Layer>
inline constexpr bool is_attention<Layer> = layer_traits<Layer>::kind == layer_kind::attention;

/// The view of a layer's first weight matrix.
template <class Layer>
using weight_view_t =
    std::remove_cvref_t<decltype(layer_traits<Layer>::matrices(std::declval<const Layer&>())[0].view)>;
/// The scalar of a layer's weights.
template <class Layer>
using weight_scalar_t = typename weight_view_t<Layer>::value_type;

/// What keeps the layer_traits of a type from describing a layer that can be factorized.
enum class trait_fault { none, no_traits, kind, matrices, dimensions, scalar, shape, heads };

template <class Layer>
constexpr trait_fault find_trait_fault() {
  using traits = layer_traits<Layer>;
  if constexpr (!requires { sizeof(traits); }) {
    return trait_fault::no_traits;
  } else if constexpr (!requires { typename std::bool_constant<(traits::kind == layer_kind::conv)>; }) {
    return trait_fault::kind;
  } else if constexpr (!requires { typename weight_scalar_t<Layer>; }) {
    return trait_fault::matrices;
  } else if constexpr (!std::is_convertible_v<weight_view_t<Layer>,
                                              tensor_view<const weight_scalar_t<Layer>,
                                                          traits::kind == layer_kind::conv ? 4 : 2>>) {
    return trait_fault::dimensions;
  } else if constexpr (!std::same_as<weight_scalar_t<Layer>, float> &&
                       !std::same_as<weight_scalar_t<Layer>, double>) {
    return trait_fault::scalar;
  } else if constexpr (traits::kind == layer_kind::conv && !requires(const Layer& layer) {
                         { traits::shape(layer) } -> std::convertible_to<conv_shape>;
                       }) {
    return trait_fault::shape;
  } else if constexpr (traits::kind == layer_kind::attention && !requires(const Layer& layer) {
                         { traits::heads(layer) } -> std::convertible_to<index_t>;
                       }) {
    return trait_fault::heads;
  } else {
    return trait_fault::none;
  }
}

template <class Layer, trait_fault Fault>
concept has_trait_fault = find_trait_fault<Layer>()
== Fault;

/// A layer whose layer_traits say all that its kind needs.
template <class Layer>
concept factorizable = has_trait_fault<Layer, trait_fault::none>;

}  // namespace detail

PUFFERFISH_NAMESPACE_END
