// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-first: svd_factorize(dense) needs a rank: svd_factorize(dense, rank_ratio{0.25}), or

#include "host_linear.hpp"

namespace no_rank {
void factorize(const host::Dense& dense) {
#ifdef PUFFERFISH_FAIL
  (void)pufferfish::svd_factorize(dense);
#else
  (void)pufferfish::svd_factorize(dense, pufferfish::rank_ratio{0.25});
#endif
}
}  // namespace no_rank
