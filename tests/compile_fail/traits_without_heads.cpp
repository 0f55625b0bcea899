// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-first: the layer_traits of this attention layer have no `heads`: add

#include <array>
#include <pufferfish/lowrank.hpp>

namespace host {
struct Attention {
  float weights[4][64 * 64] = {};
};
}  // namespace host

template <>
struct pufferfish::layer_traits<host::Attention> {
  static constexpr auto kind = layer_kind::attention;
#ifndef PUFFERFISH_FAIL
  static index_t heads(const host::Attention&) { return 4; }
#endif
  static auto matrices(const host::Attention& layer) {
    using view = named_view<const float, 2>;
    const extents<2> size{64, 64};
    return std::array{view{"query", {layer.weights[0], size}}, view{"key", {layer.weights[1], size}},
                      view{"value", {layer.weights[2], size}}, view{"output", {layer.weights[3], size}}};
  }
};

void factorize(const host::Attention& dense) {
  (void)pufferfish::svd_factors(dense, pufferfish::fixed_rank{8});
}
