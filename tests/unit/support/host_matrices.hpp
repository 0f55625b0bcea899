// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

// Layers of another framework that have a weight and nothing else.

#include <array>

#include <pufferfish/core/tensor.hpp>
#include <pufferfish/lowrank/traits.hpp>

namespace host {
struct Matrix {
  pufferfish::tensor<double, 2> weight{{24, 16}};
};
struct Kernel {
  pufferfish::tensor<double, 4> weight{{24, 6, 3, 3}};
};
}  // namespace host

template <>
struct pufferfish::layer_traits<host::Matrix> {
  static constexpr auto kind = layer_kind::linear;
  static auto matrices(const host::Matrix& layer) {
    return std::array{named_view<const double, 2>{"weight", layer.weight}};
  }
};
template <>
struct pufferfish::layer_traits<host::Kernel> {
  static constexpr auto kind = layer_kind::conv;
  static auto shape(const host::Kernel&) { return conv_shape::square(6, 24, 3, 1, 1); }
  static auto matrices(const host::Kernel& layer) {
    return std::array{named_view<const double, 4>{"weight", layer.weight}};
  }
};
