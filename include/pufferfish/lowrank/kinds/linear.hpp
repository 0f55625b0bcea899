// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// kind_traits of fully connected layers: one matrix [out][in] and a bias of `out` elements.

#include <pufferfish/lowrank/kind_traits.hpp>
#include <pufferfish/lowrank/layers/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN

template <class T>
class Linear;

/// y = W x + b with W [out][in]: one matrix "weight" (or the host's name for it) in rank group 0, one bias.
/// The members are explained at kind_traits.
template <>
struct kind_traits<layer_kind::linear> {
  static constexpr std::size_t dimensions = 2;
  static constexpr bool rows_are_outputs = true;

  template <class T, index_t Rank, class Device>
  using low_rank = LowRankLinear<T, Rank, Device>;
  template <class T>
  using core = detail::low_rank_linear<T>;

  /// Two layers have the same shape if both sizes are equal; biases are compared separately.
  struct shape_type {
    index_t in = 0, out = 0;
    friend bool operator==(const shape_type&, const shape_type&) = default;
    std::string describe() const { return detail::message({"linear ", in, " -> ", out}); }
  };

  /// Throws shape_error, naming the layer, unless the traits list one matrix with memory and no bias, or one
  /// or two biases of `out` elements (null views: none).
  template <class Dense>
  static shape_type shape(const Dense& dense, const std::string& name) {
    detail::check_matrices(dense, name, 1, "");
    const auto weight = layer_traits<Dense>::matrices(dense)[0].view;
    detail::check_biases(dense, name, {weight.extent(0)});
    return {weight.extent(1), weight.extent(0)};
  }
  template <class T>
  static shape_type shape(const core<T>& layer) {
    return {layer.in_features(), layer.out_features()};
  }

  template <class Dense>
  static auto matrices(const Dense& dense) {
    return detail::host_matrices(dense, [](std::size_t) { return std::size_t{0}; });
  }
  /// down [rank][in][1][1] and up [out][rank][1][1].
  template <class T>
  static std::vector<factor_views<parameter_t<T>>> factors(core<T>& layer) {
    using P = parameter_t<T>;
    return {{"weight", 0, detail::as_kernel<P>(layer.down()), detail::as_kernel<P>(layer.up())}};
  }
  template <class T>
  static std::vector<tensor_view<parameter_t<T>, 1>> biases(core<T>& layer) {
    return {layer.bias()};
  }

  /// `ranks` has one rank; a layer type with a static rank ignores `ranks`. Throws rank_error for an invalid
  /// rank.
  template <class LowRank>
  static LowRank make(const shape_type& shape, [[maybe_unused]] const rank_list& ranks, bool bias) {
    if constexpr (LowRank::static_rank == dynamic_rank) {
      return LowRank(shape.in, shape.out, ranks[0], bias);
    } else {
      return LowRank(shape.in, shape.out, bias);
    }
  }
  template <class T>
  static Linear<T> make_dense(const shape_type& shape, bool bias) {
    return Linear<T>(shape.in, shape.out, bias);
  }
};

PUFFERFISH_NAMESPACE_END
