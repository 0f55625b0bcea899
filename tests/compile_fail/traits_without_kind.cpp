// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-first: the layer_traits of this layer have no `kind`: add `static constexpr auto kind =

#include <array>
#include <pufferfish/lowrank.hpp>

namespace traits_without_kind {
struct Dense {
  float weight[64 * 32] = {};
};
}  // namespace traits_without_kind

template <>
struct pufferfish::layer_traits<traits_without_kind::Dense> {
#ifndef PUFFERFISH_FAIL
  static constexpr auto kind = layer_kind::linear;
#endif
  static auto matrices(const traits_without_kind::Dense& layer) {
    return std::array{named_view<const float, 2>{"weight", {layer.weight, {64, 32}}}};
  }
};

namespace traits_without_kind {
void factorize(const Dense& dense) { (void)pufferfish::svd_factorize<8>(dense); }
}  // namespace traits_without_kind
