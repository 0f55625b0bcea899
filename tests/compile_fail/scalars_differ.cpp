// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-error: the dense and the low-rank layer have different scalars

#include "host_linear.hpp"

namespace scalars_differ {
void factorize(const host::Dense& dense) {
  (void)pufferfish::svd_factorize<8>(dense);
#ifdef PUFFERFISH_FAIL
  (void)pufferfish::svd_factorize<pufferfish::LowRankLinear<double, 8>>(dense);
#endif
}
}  // namespace scalars_differ
