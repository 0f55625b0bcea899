// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-error: a layer with dynamic rank needs a rank policy

#include "host_linear.hpp"

namespace dynamic_rank_without_policy {
void factorize(const host::Dense& dense) {
  (void)pufferfish::svd_factorize<8>(dense);
#ifdef PUFFERFISH_FAIL
  (void)pufferfish::svd_factorize<pufferfish::LowRankLinear<float>>(dense);
#endif
}
}  // namespace dynamic_rank_without_policy
