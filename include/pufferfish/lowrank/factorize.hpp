// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `svd_factorize`: a dense layer of any framework, through its layer_traits, becomes a low-rank layer.
///
///     auto a = svd_factorize<LowRankConv<float, 16>>(dense);      // the type says everything
///     auto b = svd_factorize<16>(dense);                          // the kind of layer from the traits
///     svd_factorize(dense, existing_low_rank_layer);              // into a layer that is there already
///     auto c = svd_factorize<LowRankConv<float>>(dense, rank_ratio{0.25});   // the rank from a policy
///     auto d = svd_factorize(dense, rank_ratio{0.25});            // the same, the kind from the traits
///     factors<float> e = svd_factors(dense, energy_kept{0.9});    // plain matrices, for a host's own layers
///
/// An LSTM has eight matrices and attention four: each is factorized on its own, and what is one report or
/// one pair of factors for other layers is a vector of eight or four.

#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/lowrank/attention.hpp>
#include <pufferfish/lowrank/conv.hpp>
#include <pufferfish/lowrank/factorize_attention.hpp>
#include <pufferfish/lowrank/factorize_lstm.hpp>
#include <pufferfish/lowrank/factors.hpp>
#include <pufferfish/lowrank/linear.hpp>
#include <pufferfish/lowrank/lstm.hpp>
#include <pufferfish/lowrank/trait_errors.hpp>
#include <pufferfish/lowrank/traits.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// How a low-rank layer is told from others, and its static rank.
template <class Layer>
struct low_rank_kind {
  static constexpr bool known = false;
};
template <class T, index_t Rank, class Device>
struct low_rank_kind<LowRankConv<T, Rank, Device>> {
  static constexpr bool known = true;
  static constexpr layer_kind kind = layer_kind::conv;
  static constexpr index_t rank = Rank;
};
template <class T, index_t Rank, class Device>
struct low_rank_kind<LowRankLinear<T, Rank, Device>> {
  static constexpr bool known = true;
  static constexpr layer_kind kind = layer_kind::linear;
  static constexpr index_t rank = Rank;
};
template <class T, index_t Rank, class Device>
struct low_rank_kind<LowRankLSTM<T, Rank, Device>> {
  static constexpr bool known = true;
  static constexpr layer_kind kind = layer_kind::lstm;
  static constexpr index_t rank = Rank;
};
template <class T, index_t Rank, class Device>
struct low_rank_kind<LowRankAttention<T, Rank, Device>> {
  static constexpr bool known = true;
  static constexpr layer_kind kind = layer_kind::attention;
  static constexpr index_t rank = Rank;
};

/// What is reported of a dense layer: one matrix, or several.
template <class Dense>
struct report_of {
  using type = factor_report;
};
template <class Dense>
requires(is_lstm<Dense> || is_attention<Dense>) struct report_of<Dense> {
  using type = std::vector<factor_report>;
};
template <class Dense>
using report_of_t = typename report_of<Dense>::type;

/// The host's bias, or a null view.
template <class Layer>
tensor_view<const weight_scalar_t<Layer>, 1> host_bias(const Layer& layer) {
  if constexpr (has_bias_trait<Layer>) {
    return layer_traits<Layer>::bias(layer);
  } else {
    return {};
  }
}

/// A weight as the matrix out x (everything else, in the order of its view), dense.
template <class T, std::size_t N>
tensor<std::remove_const_t<T>, 2> unroll(const tensor_view<T, N>& weight) {
  tensor<std::remove_const_t<T>, 2> matrix(
      {weight.extent(0), weight.extent(0) == 0 ? 0 : weight.size() / weight.extent(0)});
  copy(weight, tensor_view<std::remove_const_t<T>, N>(matrix.data(), weight.shape()));
  return matrix;
}

/// Throws shape_error if the weight view of a convolution is not what its shape says.
template <class T>
void check_weight(const std::string& name, const conv_shape& shape, const tensor_view<T, 4>& weight) {
  const extents<4> expected{shape.out_channels, shape.in_channels, shape.kernel.height, shape.kernel.width};
  if (weight.shape() != expected) {
    throw_error<shape_error>({name, ": layer_traits give a weight ", weight.shape(), " where the shape says ",
                              expected, " (OIHW)"});
  }
}

template <class Layer>
std::string host_description(const Layer& dense, const std::string& name) {
  if constexpr (layer_traits<Layer>::kind == layer_kind::conv) {
    return message({name, " (", layer_traits<Layer>::shape(dense).describe(), ")"});
  } else {
    return name;
  }
}

/// Copies factors and the host's bias (zeros if it has none) into a low-rank layer of the same shape and
/// rank.
template <class Dense, class LowRank, class T>
void load_factors(const Dense& dense, const factors<T>& made, LowRank& layer) {
  if constexpr (layer_traits<Dense>::kind == layer_kind::conv) {
    copy(made.down_oihw(), layer.down());
    copy(made.up_oihw(), layer.up());
  } else {
    copy(tensor_view<const T, 2>(made.down), layer.down());
    copy(tensor_view<const T, 2>(made.up), layer.up());
  }
  const tensor_view<const T, 1> bias = host_bias(dense);
  const tensor_view<T, 1> target = layer.bias();
  if (!bias.is_null()) {
    copy(bias, target);
  } else if (!target.is_null()) {
    std::fill_n(target.data(), target.size(), T{});
  }
}

/// An empty low-rank layer of the dense layer's shape.
template <class LowRank, class Dense>
LowRank make_low_rank(const Dense& dense, index_t rank) {
  using traits = layer_traits<Dense>;
  [[maybe_unused]] const bool bias = !host_bias(dense).is_null();
  constexpr bool is_static = low_rank_kind<LowRank>::rank != dynamic_rank;
  if constexpr (is_lstm<Dense>) {
    return make_low_rank_lstm<LowRank>(dense, rank, rank);
  } else if constexpr (traits::kind == layer_kind::conv) {
    if constexpr (is_static) {
      return LowRank(traits::shape(dense), bias);
    } else {
      return LowRank(traits::shape(dense), rank, bias);
    }
  } else {
    const auto weight = traits::matrices(dense)[0].view;
    if constexpr (is_static) {
      return LowRank(weight.extent(1), weight.extent(0), bias);
    } else {
      return LowRank(weight.extent(1), weight.extent(0), rank, bias);
    }
  }
}

template <class LowRank, class Dense>
constexpr bool check_pair() {
  static_assert(
      low_rank_kind<LowRank>::known,
      "pufferfish: svd_factorize<L>(dense): L must be one of the library's low-rank layers, for example "
      "LowRankConv<float, 16> or LowRankLinear<float>");
  if constexpr (low_rank_kind<LowRank>::known) {
    static_assert(low_rank_kind<LowRank>::kind == layer_traits<Dense>::kind,
                  "pufferfish: the dense and the low-rank layer are of different kinds (convolution, linear, "
                  "LSTM, attention)");
    static_assert(std::is_same_v<parameter_t<typename LowRank::value_type>, weight_scalar_t<Dense>>,
                  "pufferfish: the dense and the low-rank layer have different scalars");
    return low_rank_kind<LowRank>::kind == layer_traits<Dense>::kind &&
           std::is_same_v<parameter_t<typename LowRank::value_type>, weight_scalar_t<Dense>>;
  }
  return false;
}

/// Throws shape_error unless a low-rank layer with one matrix has the shape of the dense one, bias included.
template <class Dense, class LowRank>
void check_same_shape(const Dense& dense, const LowRank& layer, const std::string& name) {
  const auto bias = host_bias(dense);
  if (!bias.is_null() && bias.shape() != layer.bias().shape()) {
    throw_error<shape_error>({name, ": a bias of ", bias.shape(), " does not fit ", layer.describe(),
                              ", whose bias has ", layer.bias().shape()});
  }
  if constexpr (layer_traits<Dense>::kind == layer_kind::conv) {
    const conv_shape shape = layer_traits<Dense>::shape(dense);
    if (shape != layer.shape()) {
      throw_error<shape_error>({name, ": ", shape.describe(), " does not fit ", layer.describe()});
    }
  } else {
    const auto weight = layer_traits<Dense>::matrices(dense)[0].view;
    if (weight.extent(0) != layer.out_features() || weight.extent(1) != layer.in_features()) {
      throw_error<shape_error>(
          {name, ": a weight ", weight.shape(), " [out x in] does not fit ", layer.describe()});
    }
  }
}

}  // namespace detail

/// The factors of a layer's weights as owned plain matrices, with their reports: for hosts that would rather
/// run layers of their own. Linear layers and convolutions: factors<T>. An LSTM: a vector of eight, in the
/// order of its traits; all of one side have the same rank, the largest that the policy chooses for any.
/// Attention: a vector of four (query, key, value, output), each of the rank that the policy chooses for it.
/// Errors as factorize_matrix, naming the matrix where there are several, and shape_error if the traits
/// contradict themselves.
template <detail::factorizable Dense>
auto svd_factors(const Dense& dense, const rank_policy& policy, factorize_options options = {}) {
  using traits = layer_traits<Dense>;
  if constexpr (traits::kind == layer_kind::lstm) {
    return detail::lstm_factors(dense, policy, policy, options);
  } else if constexpr (traits::kind == layer_kind::attention) {
    return detail::attention_factors(dense, {policy, policy, policy, policy}, options);
  } else {
    using T = detail::weight_scalar_t<Dense>;
    const auto weight = traits::matrices(dense)[0].view;
    if constexpr (traits::kind == layer_kind::conv) {
      detail::check_weight(options.name, traits::shape(dense), weight);
    }
    options.name = detail::host_description(dense, options.name);
    const tensor<T, 2> matrix = detail::unroll(weight);
    factors<T> made = factorize_matrix<T>(matrix, policy, options);
    if constexpr (traits::kind == layer_kind::conv) made.kernel = {weight.extent(2), weight.extent(3)};
    return made;
  }
}

namespace detail {

/// Calls work(layer) while the host may write the layer's parameters; a device's layer knows how.
template <class Layer, class Work>
void write_on_host(Layer& layer, Work&& work) {
  if constexpr (requires { layer.on_host(work); }) {
    layer.on_host(work);
  } else {
    work(layer);
  }
}

template <class LowRank, class Dense>
LowRank factorize_to(const Dense& dense, const rank_policy& policy, const factorize_options& options,
                     report_of_t<Dense>* report) {
  const auto made = svd_factors(dense, policy, options);
  if constexpr (is_lstm<Dense>) {
    auto layer = make_low_rank_lstm<LowRank>(dense, made.front().rank(), made.back().rank());
    write_on_host(layer, [&](auto& host) { load_lstm_factors(dense, made, host); });
    if (report != nullptr) *report = reports_of(made);
    return layer;
  } else if constexpr (is_attention<Dense>) {
    auto layer = make_low_rank_attention<LowRank>(
        dense, {made[0].rank(), made[1].rank(), made[2].rank(), made[3].rank()}, options.name);
    write_on_host(layer, [&](auto& host) { load_attention_factors(dense, made, host); });
    if (report != nullptr) *report = reports_of(made);
    return layer;
  } else {
    LowRank layer = make_low_rank<LowRank>(dense, made.rank());
    write_on_host(layer, [&](auto& host) { load_factors(dense, made, host); });
    if (report != nullptr) *report = made.report;
    return layer;
  }
}

template <class T, layer_kind Kind, index_t Rank>
struct low_rank_layer;
template <class T, index_t Rank>
struct low_rank_layer<T, layer_kind::conv, Rank> {
  using type = LowRankConv<T, Rank>;
};
template <class T, index_t Rank>
struct low_rank_layer<T, layer_kind::linear, Rank> {
  using type = LowRankLinear<T, Rank>;
};
template <class T, index_t Rank>
struct low_rank_layer<T, layer_kind::lstm, Rank> {
  using type = LowRankLSTM<T, Rank>;
};
template <class T, index_t Rank>
struct low_rank_layer<T, layer_kind::attention, Rank> {
  using type = LowRankAttention<T, Rank>;
};
/// The library's low-rank layer of a dense layer's kind and scalar.
template <class Dense, index_t Rank>
using low_rank_of = typename low_rank_layer<weight_scalar_t<Dense>, layer_traits<Dense>::kind, Rank>::type;

}  // namespace detail

/// A low-rank layer with a static rank from a dense layer: its type says everything. `report`, if given,
/// receives what happened. Errors as svd_factors.
template <class LowRank, detail::factorizable Dense>
LowRank svd_factorize(const Dense& dense, const factorize_options& options = {},
                      detail::report_of_t<Dense>* report = nullptr) {
  if constexpr (detail::check_pair<LowRank, Dense>()) {
    static_assert(detail::low_rank_kind<LowRank>::rank != dynamic_rank,
                  "pufferfish: a layer with dynamic rank needs a rank policy: svd_factorize<L>(dense, "
                  "rank_ratio{0.25})");
    return detail::factorize_to<LowRank>(dense, fixed_rank{detail::low_rank_kind<LowRank>::rank}, options,
                                         report);
  }
}

/// A low-rank layer with a dynamic rank, which `policy` chooses: for each matrix of attention, for each side
/// of an LSTM. Otherwise as above.
template <class LowRank, detail::factorizable Dense>
LowRank svd_factorize(const Dense& dense, const rank_policy& policy, const factorize_options& options = {},
                      detail::report_of_t<Dense>* report = nullptr) {
  if constexpr (detail::check_pair<LowRank, Dense>()) {
    static_assert(detail::low_rank_kind<LowRank>::rank == dynamic_rank,
                  "pufferfish: a layer with static rank takes no rank policy: svd_factorize<L>(dense)");
    return detail::factorize_to<LowRank>(dense, policy, options, report);
  }
}

/// A low-rank layer of static rank `Rank`, of the kind that the traits tell: svd_factorize<16>(dense).
template <index_t Rank, detail::factorizable Dense>
detail::low_rank_of<Dense, Rank> svd_factorize(const Dense& dense, const factorize_options& options = {},
                                               detail::report_of_t<Dense>* report = nullptr) {
  return svd_factorize<detail::low_rank_of<Dense, Rank>>(dense, options, report);
}

/// A low-rank layer with a dynamic rank, of the kind that the traits tell: svd_factorize(dense,
/// rank_ratio{0.25}). `None` is not for callers: it keeps L in svd_factorize<L>(...) from being taken for
/// Dense.
template <detail::trait_fault None = detail::trait_fault::none, detail::has_trait_fault<None> Dense>
detail::low_rank_of<Dense, dynamic_rank> svd_factorize(const Dense& dense, const rank_policy& policy,
                                                       const factorize_options& options = {},
                                                       detail::report_of_t<Dense>* report = nullptr) {
  return svd_factorize<detail::low_rank_of<Dense, dynamic_rank>>(dense, policy, options, report);
}

/// Fills an existing low-rank layer, at the rank it has. Throws shape_error, naming the layer and both
/// shapes, if it is not of the dense layer's shape; other errors as svd_factors. The layer is unchanged if
/// anything is thrown.
template <detail::factorizable Dense, class LowRank>
requires(detail::low_rank_kind<LowRank>::known) detail::report_of_t<Dense> svd_factorize(
    const Dense& dense, LowRank& layer, const factorize_options& options = {}) {
  if constexpr (!detail::check_pair<LowRank, Dense>()) {
    return {};  // a static_assert has spoken
  } else if constexpr (detail::is_lstm<Dense>) {
    detail::check_same_lstm(dense, layer, options.name);
    const auto made =
        detail::lstm_factors(dense, fixed_rank{layer.input_rank()}, fixed_rank{layer.hidden_rank()}, options);
    detail::write_on_host(layer, [&](auto& host) { detail::load_lstm_factors(dense, made, host); });
    return detail::reports_of(made);
  } else if constexpr (detail::is_attention<Dense>) {
    detail::check_same_attention(dense, layer, options.name);
    const auto [query, key, value, output] = layer.ranks();
    const auto made = detail::attention_factors(
        dense, {fixed_rank{query}, fixed_rank{key}, fixed_rank{value}, fixed_rank{output}}, options);
    detail::write_on_host(layer, [&](auto& host) { detail::load_attention_factors(dense, made, host); });
    return detail::reports_of(made);
  } else {
    detail::check_same_shape(dense, layer, options.name);
    const auto made = svd_factors(dense, fixed_rank{layer.rank()}, options);
    detail::write_on_host(layer, [&](auto& host) { detail::load_factors(dense, made, host); });
    return made.report;
  }
}

PUFFERFISH_NAMESPACE_END
