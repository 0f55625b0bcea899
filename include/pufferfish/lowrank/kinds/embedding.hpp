// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// kind_traits of embeddings: one matrix [width][vocabulary], the transpose of the table that frameworks
/// store. So `down` is a table of `rank` numbers per token, and `up` maps its rows to rows of `width`
/// numbers.

#include <pufferfish/lowrank/kind_traits.hpp>
#include <pufferfish/lowrank/layers/embedding.hpp>

PUFFERFISH_NAMESPACE_BEGIN

template <class T>
class Embedding;

/// Lists the parts of an embedding, which looks up row `token` of the table [vocabulary][width]. The
/// library's matrix W is the transpose, [width][vocabulary]: the lookup selects column `token` of W. There is
/// one matrix in rank group 0 and no bias. Members without a comment are explained at kind_traits.
template <>
struct kind_traits<layer_kind::embedding> : detail::kind_base<detail::low_rank_embedding, LowRankEmbedding> {
  template <class T>
  using dense = Embedding<T>;

  /// Sizes of an embedding. Two embeddings have the same shape if `vocabulary` and `width` are equal;
  /// `padding` may differ.
  struct shape_type {
    index_t vocabulary = 0, width = 0;
    std::int32_t padding = no_token;  ///< token whose row stays zero, or no_token; not compared
    friend bool operator==(const shape_type& a, const shape_type& b) {
      return a.vocabulary == b.vocabulary && a.width == b.width;
    }
    std::string describe() const { return detail::message({"embedding ", vocabulary, " x ", width}); }
  };

  /// Derives the sizes from the table, and the padding token from the trait `padding`, if there is one.
  /// Throws shape_error, naming the layer, unless the traits list exactly one table with memory and no bias
  /// other than null views. Throws value_error, naming the layer, for a padding token outside 0 .. vocabulary
  /// - 1.
  template <class Dense>
  static shape_type shape(const Dense& dense, const std::string& name) {
    detail::check_matrices(dense, name, 1, "");
    detail::check_biases(dense, name, {});
    const auto table = layer_traits<Dense>::matrices(dense)[0].view;
    shape_type result{table.extent(0), table.extent(1)};
    if constexpr (requires { layer_traits<Dense>::padding(dense); }) {
      result.padding = layer_traits<Dense>::padding(dense);
    }
    if (result.padding != no_token && (result.padding < 0 || result.padding >= result.vocabulary)) {
      detail::throw_error<value_error>({name, ": padding token ", result.padding,
                                        " is outside the vocabulary of ", result.vocabulary, " tokens"});
    }
    return result;
  }
  /// The sizes and the padding token of a low-rank embedding.
  template <class T>
  static shape_type shape(const core<T>& layer) {
    return {layer.vocabulary(), layer.width(), layer.padding()};
  }

  /// One matrix [width][vocabulary][1][1]: the transposed view of the table in the dense layer's own memory,
  /// under the table's name in layer_traits.
  template <class Dense>
  static auto matrices(const Dense& dense) {
    using T = const detail::weight_scalar_t<Dense>;
    const auto table = layer_traits<Dense>::matrices(dense)[0];
    const tensor_view<T, 2> weight = transpose(tensor_view<T, 2>(table.view));
    return std::vector<weight_matrix<T>>{{table.name, 0, detail::as_kernel<T>(weight)}};
  }
  /// One pair of factors: down [rank][vocabulary][1][1], the transposed view of the table of `rank` numbers
  /// per token, and up [width][rank][1][1].
  template <class T>
  static std::vector<factor_views<parameter_t<T>>> factors(core<T>& layer) {
    using P = parameter_t<T>;
    return {{"weight", 0, detail::as_kernel<P>(transpose(layer.down())), detail::as_kernel<P>(layer.up())}};
  }

  /// Makes an embedding of zeros with the shape's padding token. The bool is ignored, because an embedding
  /// has no bias. Throws rank_error for an invalid rank.
  template <class Layer, class... Ranks>
  static Layer make(const shape_type& shape, bool /*bias*/, Ranks... ranks) {
    return Layer(shape.vocabulary, shape.width, ranks..., shape.padding);
  }
};

PUFFERFISH_NAMESPACE_END
