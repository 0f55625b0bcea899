// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-first: gives views of another scalar than float or double: convert the weights first

#include <array>
#include <pufferfish/lowrank.hpp>

#ifdef PUFFERFISH_FAIL
using weight_type = int;
#else
using weight_type = double;
#endif

namespace host {
struct Dense {
  weight_type weight[64 * 32] = {};
};
}  // namespace host

template <>
struct pufferfish::layer_traits<host::Dense> {
  static constexpr auto kind = layer_kind::linear;
  static auto matrices(const host::Dense& layer) {
    return std::array{named_view<const weight_type, 2>{"weight", {layer.weight, {64, 32}}}};
  }
};

void factorize(const host::Dense& dense) { (void)pufferfish::svd_factorize<8>(dense); }
