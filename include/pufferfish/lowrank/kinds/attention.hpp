// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// kind_traits of attention: query, key, value and output matrices with one rank and one bias each.

#include <pufferfish/lowrank/kind_traits.hpp>
#include <pufferfish/lowrank/layers/attention.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Lists the parts of an attention layer. There are four matrices, each its own rank group: query and key
/// [heads key][model], value [heads value][model] and output [model][heads value], with the rows of all heads
/// concatenated. Bias i belongs to matrix i. There is no `dense` type: a dense attention layer takes four
/// slots of a network, not one. Members without a comment are explained at kind_traits.
template <>
struct kind_traits<layer_kind::attention> : detail::kind_base<detail::low_rank_attention, LowRankAttention> {
  static constexpr std::size_t rank_groups = 4;

  /// Sizes of an attention layer: model width, number of heads, key and value widths of a head. Two layers
  /// have the same shape if all four are equal.
  struct shape_type : attention_shape {
    std::string describe() const { return "attention, " + attention_shape::describe(); }
  };

  /// Returns trait_fault::none if layer_traits<Dense> has a member function `heads` whose result converts to
  /// index_t, else trait_fault::heads.
  template <class Dense>
  static constexpr detail::trait_fault missing() {
    return requires(const Dense& dense) { index_t(layer_traits<Dense>::heads(dense)); }
    ? detail::trait_fault::none : detail::trait_fault::heads;
  }

  /// Derives the sizes of an attention layer (model width, key and value widths of a head) from the extents
  /// of its matrices and the trait `heads`. A null view stands for a missing bias. Throws shape_error, naming
  /// the layer, in three cases: the traits do not list four matrices with memory; the extents do not fit each
  /// other or the positive number of heads does not divide the rows of query, key and value; there are
  /// biases, but neither four nor eight of them.
  template <class Dense>
  static shape_type shape(const Dense& dense, const std::string& name) {
    detail::check_matrices(dense, name, 4, ": query, key, value and output");
    const auto all = layer_traits<Dense>::matrices(dense);
    const index_t heads = layer_traits<Dense>::heads(dense);
    const index_t model = all[0].view.extent(1), keys = all[0].view.extent(0), values = all[2].view.extent(0);
    const bool fits = heads > 0 && all[1].view.shape() == extents<2>{keys, model} &&
                      all[2].view.extent(1) == model && all[3].view.shape() == extents<2>{model, values} &&
                      keys % heads == 0 && values % heads == 0;
    if (!fits) {
      detail::throw_error<shape_error>({name, ": query ", all[0].view.shape(), ", key ", all[1].view.shape(),
                                        ", value ", all[2].view.shape(), " and output ", all[3].view.shape(),
                                        " of ", heads, " heads do not fit each other"});
    }
    detail::check_biases(dense, name, {keys, keys, values, model});
    return {{model, heads, keys / heads, values / heads}};
  }
  /// The sizes of a low-rank attention layer.
  template <class T>
  static shape_type shape(const core<T>& layer) {
    return {layer.shape()};
  }

  /// Four views of the dense layer's own memory, in the order query, key, value, output:
  /// [rows][columns][1][1].
  template <class Dense>
  static auto matrices(const Dense& dense) {
    return detail::host_matrices(dense, [](std::size_t matrix) { return matrix; });
  }
  /// Four pairs of factors in the order of the matrices: down [rank][columns][1][1] and up
  /// [rows][rank][1][1], views of the layer's own memory.
  template <class T>
  static std::vector<factor_views<parameter_t<T>>> factors(core<T>& layer) {
    using P = parameter_t<T>;
    std::vector<factor_views<P>> all;
    for (auto& one : layer.projections()) {
      all.push_back({core<T>::names[all.size()], all.size(), detail::as_kernel<P>(one.down()),
                     detail::as_kernel<P>(one.up())});
    }
    return all;
  }
  /// Four biases in the order of the matrices, as views of the layer's own memory. All are null views if the
  /// layer has no biases.
  template <class T>
  static std::vector<tensor_view<parameter_t<T>, 1>> biases(core<T>& layer) {
    std::vector<tensor_view<parameter_t<T>, 1>> all;
    for (auto& one : layer.projections()) all.push_back(one.bias());
    return all;
  }

  /// Makes a layer of zeros whose type fixes its ranks. `bias`: whether all four projections have a bias.
  template <class Layer>
  static Layer make(const shape_type& shape, bool bias) {
    return Layer(shape, bias);
  }
  /// Makes a layer of zeros with the given ranks of the query, key, value and output matrix, in this order.
  /// Throws rank_error for an invalid rank.
  template <class Layer, class... Ranks>
  static Layer make(const shape_type& shape, bool bias, index_t first, Ranks... others) {
    return Layer(shape, std::array<index_t, 4>{first, others...}, bias);
  }
};

PUFFERFISH_NAMESPACE_END
