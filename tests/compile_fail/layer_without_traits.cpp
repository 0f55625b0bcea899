// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-first: this layer type is unknown: specialise pufferfish::layer_traits for it

#include <pufferfish/lowrank.hpp>

namespace layer_without_traits {
struct Conv2d {};

#ifdef PUFFERFISH_FAIL
void factorize(const Conv2d& dense) { pufferfish::svd_factorize<pufferfish::LowRankConv<float, 16>>(dense); }
#endif
}  // namespace layer_without_traits
