// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "host_pointwise_conv.hpp"

namespace host {
/// A convolution of a foreign framework with two biases, which are added up.
struct TwiceBiased : PointwiseConv {
  std::vector<float> first, second;

  TwiceBiased(std::ptrdiff_t in, std::ptrdiff_t out)
      : PointwiseConv(in, out), first(static_cast<std::size_t>(out), 0.5F), second(first.size(), -2.0F) {}
  void forward(pufferfish::cpu_context& ctx, const pufferfish::tensor_view<const float, 4>& x,
               const pufferfish::tensor_view<float, 4>& y) const {
    PointwiseConv::forward(ctx, x, y);
    for (std::ptrdiff_t i = 0; i < y.size(); ++i) {
      const auto channel = static_cast<std::size_t>(i) % first.size();
      y.data()[i] += first[channel] + second[channel];
    }
  }
};
}  // namespace host

template <>
struct pufferfish::layer_traits<host::TwiceBiased> : pufferfish::layer_traits<host::PointwiseConv> {
  static auto biases(const host::TwiceBiased& layer) {
    const index_t size = layer.out();
    return std::array<named_view<const float, 1>, 2>{
        {{"first", {layer.first.data(), {size}}}, {"second", {layer.second.data(), {size}}}}};
  }
};
