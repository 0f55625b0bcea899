// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// LSTMs of a foreign framework, for tests.

#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/lowrank/traits.hpp>

namespace host {

/// A framework's LSTM: a matrix and two biases a gate, weights stored [in][out].
struct Recurrent {
  pufferfish::index_t input, hidden;
  std::vector<double> weights, biases;
  std::size_t shown = 8;

  Recurrent(pufferfish::index_t d, pufferfish::index_t h)
      : input(d),
        hidden(h),
        weights(static_cast<std::size_t>(4 * h * (d + h))),
        biases(static_cast<std::size_t>(8 * h)) {
    pufferfish::fill_normal<double>(weights, 0.5, {1, 1});
    pufferfish::fill_normal<double>(biases, 0.5, {1, 2});
  }
  pufferfish::tensor_view<const double, 2> matrix(std::size_t i) const {
    const auto gate = static_cast<pufferfish::index_t>(i % 4);
    const pufferfish::index_t in = i < 4 ? input : hidden;
    const double* from = weights.data() + (i < 4 ? 0 : 4 * hidden * input) + gate * hidden * in;
    return {from, {hidden, in}, {1, hidden}};
  }
};

/// The same without biases.
struct Plain : Recurrent {
  using Recurrent::Recurrent;
};

inline std::vector<pufferfish::named_view<const double, 2>> matrices_of(const Recurrent& layer) {
  std::vector<pufferfish::named_view<const double, 2>> all;
  const char* names[] = {"ii", "if", "ig", "io", "hi", "hf", "hg", "ho"};
  for (std::size_t i = 0; i < layer.shown; ++i) all.push_back({names[i], layer.matrix(i)});
  return all;
}

}  // namespace host

template <>
struct pufferfish::layer_traits<host::Plain> {
  static constexpr auto kind = layer_kind::lstm;
  static auto matrices(const host::Plain& layer) { return host::matrices_of(layer); }
};
template <>
struct pufferfish::layer_traits<host::Recurrent> {
  static constexpr auto kind = layer_kind::lstm;
  static auto matrices(const host::Recurrent& layer) { return host::matrices_of(layer); }
  static auto biases(const host::Recurrent& layer) {
    std::vector<named_view<const double, 1>> all;
    for (index_t i = 0; i < 8; ++i)
      all.push_back({"bias", {layer.biases.data() + i * layer.hidden, {layer.hidden}}});
    return all;
  }
};
