// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-first: the layer_traits of this attention layer have no `heads`: add

#include <array>
#include <pufferfish/lowrank.hpp>

namespace traits_without_heads {
struct Attention {
  float weights[4][64 * 64] = {};
};
}  // namespace traits_without_heads

template <>
struct pufferfish::layer_traits<traits_without_heads::Attention> {
  static constexpr auto kind = layer_kind::attention;
#ifndef PUFFERFISH_FAIL
  static index_t heads(const traits_without_heads::Attention&) { return 4; }
#endif
  static auto matrices(const traits_without_heads::Attention& layer) {
    using view = named_view<const float, 2>;
    const extents<2> size{64, 64};
    return std::array{view{"query", {layer.weights[0], size}}, view{"key", {layer.weights[1], size}},
                      view{"value", {layer.weights[2], size}}, view{"output", {layer.weights[3], size}}};
  }
};

namespace traits_without_heads {
void factorize(const Attention& dense) { (void)pufferfish::svd_factors(dense, pufferfish::fixed_rank{8}); }
}  // namespace traits_without_heads
