// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-error: the dense and the low-rank layer are of different kinds

#include "host_linear.hpp"

namespace kinds_differ {
void factorize(const host::Dense& dense) {
  (void)pufferfish::svd_factorize<8>(dense);
#ifdef PUFFERFISH_FAIL
  (void)pufferfish::svd_factorize<pufferfish::LowRankConv<float, 8>>(dense);
#endif
}
}  // namespace kinds_differ
