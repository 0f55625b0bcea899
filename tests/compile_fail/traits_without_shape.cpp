// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-first: the layer_traits of this convolution have no `shape`: add

#include <array>
#include <pufferfish/lowrank.hpp>

namespace traits_without_shape {
struct Conv {
  float weight[64 * 32 * 9] = {};
};
}  // namespace traits_without_shape

template <>
struct pufferfish::layer_traits<traits_without_shape::Conv> {
  static constexpr auto kind = layer_kind::conv;
#ifndef PUFFERFISH_FAIL
  static auto shape(const traits_without_shape::Conv&) { return conv_shape::square(32, 64, 3); }
#endif
  static auto matrices(const traits_without_shape::Conv& layer) {
    return std::array{named_view<const float, 4>{"weight", {layer.weight, {64, 32, 3, 3}}}};
  }
};

namespace traits_without_shape {
void factorize(const Conv& dense) { (void)pufferfish::svd_factorize(dense, pufferfish::rank_ratio{0.25}); }
}  // namespace traits_without_shape
