// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// kind_traits of LSTMs: eight matrices (the input side of the gates i, f, g, o, then their hidden side) with
/// one rank per side, and one bias per gate.

#include <pufferfish/lowrank/kind_traits.hpp>
#include <pufferfish/lowrank/layers/lstm.hpp>

PUFFERFISH_NAMESPACE_BEGIN

template <class T>
class LSTM;

/// Lists the parts of an LSTM. Matrices 0 .. 3, [hidden][input], multiply the input for the gates i, f, g, o;
/// they are rank group 0. Matrices 4 .. 7, [hidden][hidden], multiply the previous hidden state for the same
/// gates; they are rank group 1. Bias k belongs to gate k, that is, to matrices k and k + 4. Members without
/// a comment are explained at kind_traits.
template <>
struct kind_traits<layer_kind::lstm> : detail::kind_base<detail::low_rank_lstm, LowRankLSTM> {
  static constexpr std::size_t rank_groups = 2;
  template <class T>
  using dense = LSTM<T>;

  /// Sizes of an LSTM: elements of an input vector and of the hidden state. Two LSTMs have the same shape if
  /// both are equal.
  struct shape_type {
    index_t input = 0, hidden = 0;
    friend bool operator==(const shape_type&, const shape_type&) = default;
    std::string describe() const { return detail::message({"an LSTM ", input, " -> ", hidden}); }
  };

  /// Derives input and hidden size from the first matrix. A null view stands for a missing bias. Throws
  /// shape_error, naming the layer, unless the traits list eight matrices with memory that have these sizes,
  /// and no biases, or four or eight biases of `hidden` elements.
  template <class Dense>
  static shape_type shape(const Dense& dense, const std::string& name) {
    detail::check_matrices(dense, name, 2 * lstm_gates,
                           ": the input side of the gates i, f, g, o, then their hidden side");
    const auto matrices = layer_traits<Dense>::matrices(dense);
    const shape_type size{matrices[0].view.extent(1), matrices[0].view.extent(0)};
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      const extents<2> expected{size.hidden, group_of(i) == 0 ? size.input : size.hidden};
      if (matrices[i].view.shape() != expected) {
        detail::throw_error<shape_error>({name, ": layer_traits give a matrix ", matrices[i].name, " of ",
                                          matrices[i].view.shape(), " where the first one says ", expected,
                                          " [out x in]"});
      }
    }
    detail::check_biases(dense, name, std::vector<index_t>(lstm_gates, size.hidden));
    return size;
  }
  /// The sizes of a low-rank LSTM.
  template <class T>
  static shape_type shape(const core<T>& layer) {
    return {layer.input_size(), layer.hidden_size()};
  }

  /// Eight views of the dense layer's own memory, in the order described at this struct: [hidden][input or
  /// hidden][1][1].
  template <class Dense>
  static auto matrices(const Dense& dense) {
    return detail::host_matrices(dense, group_of);
  }
  /// Eight pairs of factors in the order of the matrices: down [rank][input or hidden][1][1] and up
  /// [hidden][rank][1][1], views of the layer's own memory.
  template <class T>
  static std::vector<factor_views<parameter_t<T>>> factors(core<T>& layer) {
    using P = parameter_t<T>;
    constexpr const char* names[] = {"weight_ii", "weight_if", "weight_ig", "weight_io",
                                     "weight_hi", "weight_hf", "weight_hg", "weight_ho"};
    std::vector<factor_views<P>> all;
    for (index_t gate = 0; gate < lstm_gates; ++gate) {
      all.push_back({names[all.size()], 0, detail::as_kernel<P>(layer.input_down(gate)),
                     detail::as_kernel<P>(layer.input_up(gate))});
    }
    for (index_t gate = 0; gate < lstm_gates; ++gate) {
      all.push_back({names[all.size()], 1, detail::as_kernel<P>(layer.hidden_down(gate)),
                     detail::as_kernel<P>(layer.hidden_up(gate))});
    }
    return all;
  }
  /// Four biases of `hidden` elements, one per gate: consecutive parts of the layer's single bias vector.
  template <class T>
  static std::vector<tensor_view<parameter_t<T>, 1>> biases(core<T>& layer) {
    std::vector<tensor_view<parameter_t<T>, 1>> all;
    const index_t hidden = layer.hidden_size();
    for (index_t gate = 0; gate < lstm_gates; ++gate) {
      all.push_back(layer.bias().slice(0, gate * hidden, hidden));
    }
    return all;
  }

  /// Makes an LSTM of zeros. `ranks`: the rank of the input matrices, then the rank of the hidden matrices;
  /// none for a dense layer or static ranks. The bool is ignored, because both the dense and the low-rank
  /// LSTM always have biases. Throws rank_error for an invalid rank.
  template <class Layer, class... Ranks>
  static Layer make(const shape_type& shape, bool /*bias*/, Ranks... ranks) {
    return Layer(shape.input, shape.hidden, ranks...);
  }

 private:
  // Rank group of matrix 0 .. 7: 0 for an input matrix, 1 for a hidden matrix.
  static std::size_t group_of(std::size_t matrix) { return matrix < lstm_gates ? 0 : 1; }
};

PUFFERFISH_NAMESPACE_END
