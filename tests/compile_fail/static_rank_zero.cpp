// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-error: a static rank must be at least 1

#include "host_linear.hpp"

namespace static_rank_zero {
void factorize(const host::Dense& dense) {
  (void)pufferfish::svd_factorize<8>(dense);
#ifdef PUFFERFISH_FAIL
  pufferfish::LowRankLinear<float, 0> layer(64, 32);
#endif
}
}  // namespace static_rank_zero
