// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: how an LSTM of any framework, through its layer_traits, becomes a low-rank one; the interface is
/// svd_factorize (factorize.hpp).

#include <algorithm>
#include <string>
#include <vector>

#include <pufferfish/lowrank/factors.hpp>
#include <pufferfish/lowrank/lstm.hpp>
#include <pufferfish/lowrank/traits.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Input and hidden size of an LSTM, by its matrices.
struct lstm_size {
  index_t input = 0, hidden = 0;
};

/// Throws shape_error unless the traits show eight matrices, and four or eight biases or none, that fit each
/// other.
template <class Dense>
lstm_size size_of_lstm(const Dense& dense, const std::string& name) {
  using traits = layer_traits<Dense>;
  const auto matrices = traits::matrices(dense);
  const auto refuse = [&name](const std::string& what) {
    PUFFERFISH_THROW(shape_error(name + ": layer_traits of an LSTM give " + what));
  };
  if (matrices.size() != 2 * lstm_gates) {
    refuse(std::to_string(matrices.size()) +
           " matrices where there must be 8: the input side of the gates "
           "i, f, g, o, then their hidden side");
  }
  const lstm_size size{matrices[0].view.extent(1), matrices[0].view.extent(0)};
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const extents<2> expected{size.hidden, i < lstm_gates ? size.input : size.hidden};
    if (matrices[i].view.shape() != expected) {
      refuse(message({"a matrix ", matrices[i].name, " of ", matrices[i].view.shape(),
                      " where the first one says ", expected, " [out x in]"}));
    }
  }
  if constexpr (has_biases_trait<Dense>) {
    const auto biases = traits::biases(dense);
    if (biases.size() != 0 && biases.size() != lstm_gates && biases.size() != 2 * lstm_gates) {
      refuse(std::to_string(biases.size()) + " biases where there may be 4, 8 or none");
    }
    for (const auto& bias : biases) {
      if (!bias.view.is_null() && bias.view.extent(0) != size.hidden) {
        refuse(message({"a bias ", bias.name, " of ", bias.view.shape(), " for ", size.hidden, " outputs"}));
      }
    }
  }
  return size;
}

/// Factors of the eight matrices, each factorized on its own; those of one side get the same rank, the
/// largest that its policy chooses for any of them.
template <class Dense>
auto lstm_factors(const Dense& dense, const rank_policy& input, const rank_policy& hidden,
                  const factorize_options& options) {
  using T = weight_scalar_t<Dense>;
  size_of_lstm(dense, options.name);
  const auto matrices = layer_traits<Dense>::matrices(dense);
  const auto factorize = [&](std::size_t i, const rank_policy& policy) {
    factorize_options own = options;
    own.name = options.name + "." + matrices[i].name;
    return factorize_matrix<T>(matrices[i].view, policy, own);
  };
  std::vector<factors<T>> made;
  for (std::size_t i = 0; i < matrices.size(); ++i)
    made.push_back(factorize(i, i < lstm_gates ? input : hidden));
  for (std::size_t first : {std::size_t{0}, static_cast<std::size_t>(lstm_gates)}) {
    index_t rank = 0;
    for (std::size_t i = first; i < first + lstm_gates; ++i) rank = std::max(rank, made[i].rank());
    for (std::size_t i = first; i < first + lstm_gates; ++i) {
      if (made[i].rank() != rank) made[i] = factorize(i, fixed_rank{rank});
    }
  }
  return made;
}

/// An empty low-rank LSTM of the dense layer's shape.
template <class LowRank, class Dense>
LowRank make_low_rank_lstm(const Dense& dense, [[maybe_unused]] index_t input_rank,
                           [[maybe_unused]] index_t hidden_rank) {
  const lstm_size size = size_of_lstm(dense, "LowRankLSTM");
  if constexpr (std::is_constructible_v<LowRank, index_t, index_t, index_t, index_t>) {
    return LowRank(size.input, size.hidden, input_rank, hidden_rank);
  } else {
    return LowRank(size.input, size.hidden);
  }
}

/// Throws shape_error unless the low-rank layer has the dense one's sizes.
template <class Dense, class T>
void check_same_lstm(const Dense& dense, const low_rank_lstm<T>& layer, const std::string& name) {
  const lstm_size size = size_of_lstm(dense, name);
  if (size.input != layer.input_size() || size.hidden != layer.hidden_size()) {
    throw_error<shape_error>(
        {name, ": an LSTM ", size.input, " -> ", size.hidden, " does not fit ", layer.describe()});
  }
}

/// Copies factors and the host's biases (zeros if it has none) into a low-rank layer of the same shape and
/// ranks.
template <class Dense, class T, class LowRank>
void load_lstm_factors([[maybe_unused]] const Dense& dense, const std::vector<factors<T>>& made,
                       LowRank& layer) {
  for (index_t gate = 0; gate < lstm_gates; ++gate) {
    const factors<T>& input = made[static_cast<std::size_t>(gate)];
    const factors<T>& hidden = made[static_cast<std::size_t>(gate + lstm_gates)];
    copy(tensor_view<const T, 2>(input.down), layer.input_down(gate));
    copy(tensor_view<const T, 2>(input.up), layer.input_up(gate));
    copy(tensor_view<const T, 2>(hidden.down), layer.hidden_down(gate));
    copy(tensor_view<const T, 2>(hidden.up), layer.hidden_up(gate));
  }
  const tensor_view<T, 1> target = layer.bias();
  std::fill_n(target.data(), target.size(), T{});
  if constexpr (has_biases_trait<Dense>) {
    index_t at = 0;
    for (const auto& bias : layer_traits<Dense>::biases(dense)) {
      for (index_t j = 0; !bias.view.is_null() && j < bias.view.size(); ++j) target(at + j) += bias.view(j);
      at = (at + layer.hidden_size()) % target.size();
    }
  }
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
