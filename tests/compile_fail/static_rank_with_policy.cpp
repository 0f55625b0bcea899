// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-error: a layer with static rank takes no rank policy

#include "host_linear.hpp"

namespace static_rank_with_policy {
void factorize(const host::Dense& dense) {
  (void)pufferfish::svd_factorize<8>(dense);
#ifdef PUFFERFISH_FAIL
  (void)pufferfish::svd_factorize<pufferfish::LowRankLinear<float, 8>>(dense, pufferfish::rank_ratio{0.25});
#endif
}
}  // namespace static_rank_with_policy
