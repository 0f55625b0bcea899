// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// kind_traits of convolutions: one matrix [out / groups][in / groups * height * width] per group, all of the
/// same rank; a bias of `out` elements.

#include <pufferfish/lowrank/kind_traits.hpp>
#include <pufferfish/lowrank/layers/conv.hpp>

PUFFERFISH_NAMESPACE_BEGIN

template <class T>
class Conv;

/// Lists the parts of a convolution. A convolution with g groups has g matrices, all in rank group 0: matrix
/// i is rows i out / g .. (i + 1) out / g - 1 of the OIHW weight, unrolled to [out / g][in / g * height *
/// width]. The rows of all matrices are the layer's output channels in order, so one bias of `out` elements
/// belongs to all matrices. Members without a comment are explained at kind_traits.
template <>
struct kind_traits<layer_kind::conv> : detail::kind_base<detail::low_rank_conv, LowRankConv> {
  static constexpr std::size_t dimensions = 4;
  static constexpr bool rows_are_outputs = true;
  template <class T>
  using dense = Conv<T>;
  using shape_type = conv_shape;

  /// Returns trait_fault::none if layer_traits<Dense> has a member function `shape` whose result converts to
  /// conv_shape, else trait_fault::shape.
  template <class Dense>
  static constexpr detail::trait_fault missing() {
    return requires(const Dense& dense) { conv_shape(layer_traits<Dense>::shape(dense)); }
    ? detail::trait_fault::none : detail::trait_fault::shape;
  }

  /// The layer's convolution geometry: layer_traits<Dense>::shape, checked. Throws shape_error, naming the
  /// layer, in four cases: the traits do not list exactly one weight with memory; the shape is invalid
  /// (conv_shape::validate); the weight's extents are not [out][in / groups][height][width] of that shape;
  /// there are biases, but neither one nor two of `out` elements.
  template <class Dense>
  static conv_shape shape(const Dense& dense, const std::string& name) {
    detail::check_matrices(dense, name, 1, "");
    const conv_shape shape = layer_traits<Dense>::shape(dense);
    shape.validate(name);
    const auto weight = layer_traits<Dense>::matrices(dense)[0].view;
    const extents<4> expected{shape.out_channels, shape.group_inputs(), shape.kernel.height,
                              shape.kernel.width};
    if (weight.shape() != expected) {
      detail::throw_error<shape_error>({name, ": layer_traits give a weight ", weight.shape(),
                                        " where the shape says ", expected, " (OIHW)"});
    }
    detail::check_biases(dense, name, {shape.out_channels});
    return shape;
  }
  /// The geometry of a low-rank convolution: that of the dense convolution which the factors approximate.
  template <class T>
  static conv_shape shape(const core<T>& layer) {
    return layer.shape();
  }

  /// One view per group, [out / g][in / g][height][width], of the dense layer's own memory. The name is
  /// "weight" or, with several groups, "weight[0]", "weight[1]", ...
  template <class Dense>
  static auto matrices(const Dense& dense) {
    using T = const detail::weight_scalar_t<Dense>;
    const index_t groups = conv_shape(layer_traits<Dense>::shape(dense)).groups;
    const tensor_view<T, 4> all = layer_traits<Dense>::matrices(dense)[0].view;
    std::vector<weight_matrix<T>> parts;
    for (index_t g = 0; g < groups; ++g) {
      parts.push_back({matrix_name(g, groups), 0, part(all, g, groups)});
    }
    return parts;
  }
  /// One pair of factors per group: down [rank][in / g][height][width] and up [out / g][rank][1][1], views of
  /// the layer's own memory, named like the matrices.
  template <class T>
  static std::vector<factor_views<parameter_t<T>>> factors(core<T>& layer) {
    const index_t groups = layer.shape().groups;
    std::vector<factor_views<parameter_t<T>>> parts;
    for (index_t g = 0; g < groups; ++g) {
      parts.push_back(
          {matrix_name(g, groups), 0, part(layer.down(), g, groups), part(layer.up(), g, groups)});
    }
    return parts;
  }

  /// The convolution that computes the layer's function without its bias: the shape itself.
  static conv_shape geometry(const conv_shape& shape) { return shape; }

  /// Makes a layer of zeros. `ranks`: one rank, which all groups get, for a layer with a dynamic rank; none
  /// for a dense layer or a static rank. Throws rank_error for an invalid rank.
  template <class Layer, class... Ranks>
  static Layer make(const conv_shape& shape, bool bias, Ranks... ranks) {
    return Layer(shape, ranks..., bias);
  }

 private:
  // Name of the matrix of one group, out of `groups` groups.
  static std::string matrix_name(index_t group, index_t groups) {
    return groups == 1 ? "weight" : detail::message({"weight[", group, "]"});
  }
  // The rows of one group: slice `group` of `groups` equal slices along dimension 0.
  template <class T>
  static tensor_view<T, 4> part(const tensor_view<T, 4>& all, index_t group, index_t groups) {
    const index_t rows = all.extent(0) / groups;
    return all.slice(0, group * rows, rows);
  }
};

PUFFERFISH_NAMESPACE_END
