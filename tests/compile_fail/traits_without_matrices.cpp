// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-first: the layer_traits of this layer have no `matrices`: add `static auto matrices(const Layer&)`

#include <array>
#include <pufferfish/lowrank.hpp>

namespace traits_without_matrices {
struct Dense {
  float weight[64 * 32] = {};
};
}  // namespace traits_without_matrices

template <>
struct pufferfish::layer_traits<traits_without_matrices::Dense> {
  static constexpr auto kind = layer_kind::linear;
#ifndef PUFFERFISH_FAIL
  static auto matrices(const traits_without_matrices::Dense& layer) {
    return std::array{named_view<const float, 2>{"weight", {layer.weight, {64, 32}}}};
  }
#endif
};

namespace traits_without_matrices {
void factorize(const Dense& dense) {
  (void)pufferfish::svd_factorize<pufferfish::LowRankLinear<float>>(dense, pufferfish::rank_ratio{0.25});
}
}  // namespace traits_without_matrices
