// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-first: gives views of another number of dimensions than its kind has: four for conv

#include <array>
#include <pufferfish/lowrank.hpp>

namespace conv_of_two_dimensions {
struct Layer {
  float weight[64 * 32] = {};
};
}  // namespace conv_of_two_dimensions

template <>
struct pufferfish::layer_traits<conv_of_two_dimensions::Layer> {
#ifdef PUFFERFISH_FAIL
  static constexpr auto kind = layer_kind::conv;
#else
  static constexpr auto kind = layer_kind::linear;
#endif
  static auto shape(const conv_of_two_dimensions::Layer&) { return conv_shape::square(32, 64, 1); }
  static auto matrices(const conv_of_two_dimensions::Layer& layer) {
    return std::array{named_view<const float, 2>{"weight", {layer.weight, {64, 32}}}};
  }
};

namespace conv_of_two_dimensions {
void factorize(const Layer& dense, pufferfish::LowRankLinear<float>& layer) {
  (void)pufferfish::svd_factorize(dense, layer);
}
}  // namespace conv_of_two_dimensions
