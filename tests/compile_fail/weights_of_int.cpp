// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-first: gives views of another scalar than float or double: convert the weights first

#include <array>
#include <pufferfish/lowrank.hpp>

namespace weights_of_int {
#ifdef PUFFERFISH_FAIL
using weight_type = int;
#else
using weight_type = double;
#endif

struct Dense {
  weight_type weight[64 * 32] = {};
};
}  // namespace weights_of_int

template <>
struct pufferfish::layer_traits<weights_of_int::Dense> {
  static constexpr auto kind = layer_kind::linear;
  static auto matrices(const weights_of_int::Dense& layer) {
    return std::array{named_view<const weights_of_int::weight_type, 2>{"weight", {layer.weight, {64, 32}}}};
  }
};

namespace weights_of_int {
void factorize(const Dense& dense) { (void)pufferfish::svd_factorize<8>(dense); }
}  // namespace weights_of_int
