// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The interface to a host framework: a specialisation of `layer_traits` for a layer type
/// makes the layer factorizable.

#include <cstddef>
#include <type_traits>
#include <utility>

#include <pufferfish/core/view.hpp>
#include <pufferfish/ops/conv/conv_shape.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The kinds of layers of the library that can be factorized. Each kind is described by its kind_traits
/// (kinds/); a program may add its own kinds. A conv layer has the parts of its groups as matrices, an
/// embedding the transpose of its table.
enum class layer_kind { linear, conv, lstm, attention, embedding };

/// A weight of a layer with its own name ("weight", "input_gate", "query"). Refers to the layer's memory and
/// owns nothing; `name` is usually a string literal and must exist as long as the view is used.
template <class T, std::size_t N>
struct named_view {
  const char* name;
  tensor_view<T, N> view;
};

/// Describes a layer of type `Layer` to the library. There is no general definition: specialise it.
///
///     template <>
///     struct pufferfish::layer_traits<host::Conv2d> {
///       static constexpr auto kind = pufferfish::layer_kind::conv;
///       // Stride, padding and the like; convolutions only.
///       static pufferfish::conv_shape shape(const host::Conv2d& layer);
///       // A std::array (or vector) of the layer's weight matrices: one for linear [out][in], for conv
///       // [out][in / groups][height][width] and for an embedding [vocabulary][width]; for an LSTM eight
///       // [hidden][in]: the input side of the gates i, f, g, o, then their hidden side; for attention
///       // query [heads key][model], key, value [heads value][model] and output [model][heads value].
///       // Views of the layer's own memory, any strides.
///       static std::array<pufferfish::named_view<const float, 4>, 1> matrices(const host::Conv2d& layer);
///       // Optional, linear and convolutions: out elements, or a null view for a layer without bias.
///       static pufferfish::tensor_view<const float, 1> bias(const host::Conv2d& layer);
///       // Optional, replaces `bias`: a list of vectors. LSTM: four of `hidden` elements (gates i, f, g,
///       // o); attention: four (query, key, value, output); linear and convolutions: one. Twice as many if
///       // the layer adds two biases, such as those of an LSTM's input and hidden side. A null view: no
///       // bias.
///       static std::array<pufferfish::named_view<const float, 1>, 4> biases(const host::LSTM& layer);
///       // Attention only: the number of heads.
///       static pufferfish::index_t heads(const host::Attention& layer);
///       // Optional, embeddings: a token whose row has zero gradient; no_token if there is none.
///       static std::int32_t padding(const host::Embedding& layer);
///     };
/// All members are static and may be called several times in one call of svd_factorize or svd_factors. Those
/// read the views on the host, during the call only, and never change the layer. A specialisation that lacks
/// a member is a compile-time error that names the member (trait_errors.hpp); sizes that contradict each
/// other are a shape_error at run time, which names the layer.
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

/// Type of the view of a layer's first weight matrix.
template <class Layer>
using weight_view_t =
    std::remove_cvref_t<decltype(layer_traits<Layer>::matrices(std::declval<const Layer&>())[0].view)>;
/// Scalar type of a layer's weights.
template <class Layer>
using weight_scalar_t = typename weight_view_t<Layer>::value_type;

}  // namespace detail

PUFFERFISH_NAMESPACE_END
