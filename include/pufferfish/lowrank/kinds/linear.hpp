// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// kind_traits of fully connected layers: one matrix [out][in] and a bias of `out` elements.

#include <pufferfish/lowrank/kind_traits.hpp>
#include <pufferfish/lowrank/layers/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN

template <class T>
class Linear;

/// Lists the parts of a fully connected layer y = W x + b with W [out][in]: one matrix in rank group 0, under
/// its name in layer_traits ("weight" for the library's layers), and one bias of `out` elements. Members
/// without a comment are explained at kind_traits.
template <>
struct kind_traits<layer_kind::linear> : detail::kind_base<detail::low_rank_linear, LowRankLinear> {
  static constexpr bool rows_are_outputs = true;
  template <class T>
  using dense = Linear<T>;

  /// Sizes of a linear layer. Two layers have the same shape if both `in` and `out` are equal; whether they
  /// have biases is compared separately.
  struct shape_type {
    index_t in = 0, out = 0;
    friend bool operator==(const shape_type&, const shape_type&) = default;
    std::string describe() const { return detail::message({"linear ", in, " -> ", out}); }
  };

  /// Derives the sizes from the extents of the weight. A null view stands for a missing bias. Throws
  /// shape_error, naming the layer, unless the traits list exactly one matrix with memory, and no bias, or
  /// one or two biases of `out` elements.
  template <class Dense>
  static shape_type shape(const Dense& dense, const std::string& name) {
    detail::check_matrices(dense, name, 1, "");
    const auto weight = layer_traits<Dense>::matrices(dense)[0].view;
    detail::check_biases(dense, name, {weight.extent(0)});
    return {weight.extent(1), weight.extent(0)};
  }
  /// The sizes of a low-rank linear layer.
  template <class T>
  static shape_type shape(const core<T>& layer) {
    return {layer.in_features(), layer.out_features()};
  }

  /// The layer's function without its bias as a 1x1 convolution from `in` to `out` channels.
  static conv_shape geometry(const shape_type& shape) { return conv_shape::square(shape.in, shape.out, 1); }

  /// Makes a layer of zeros. `ranks`: one rank for a layer with a dynamic rank; none for a dense layer or a
  /// static rank. Throws rank_error for an invalid rank.
  template <class Layer, class... Ranks>
  static Layer make(const shape_type& shape, bool bias, Ranks... ranks) {
    return Layer(shape.in, shape.out, ranks..., bias);
  }
};

PUFFERFISH_NAMESPACE_END
