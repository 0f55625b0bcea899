// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-first: the layer_traits of this convolution have no `shape`: add

#include <array>
#include <pufferfish/lowrank.hpp>

namespace host {
struct Conv {
  float weight[64 * 32 * 9] = {};
};
}  // namespace host

template <>
struct pufferfish::layer_traits<host::Conv> {
  static constexpr auto kind = layer_kind::conv;
#ifndef PUFFERFISH_FAIL
  static auto shape(const host::Conv&) { return conv_shape::square(32, 64, 3); }
#endif
  static auto matrices(const host::Conv& layer) {
    return std::array{named_view<const float, 4>{"weight", {layer.weight, {64, 32, 3, 3}}}};
  }
};

void factorize(const host::Conv& dense) {
  (void)pufferfish::svd_factorize(dense, pufferfish::rank_ratio{0.25});
}
