// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-error: a layer with dynamic rank needs a rank policy

#include "host_linear.hpp"

void factorize(const host::Dense& dense) {
  (void)pufferfish::svd_factorize<8>(dense);
#ifdef PUFFERFISH_FAIL
  (void)pufferfish::svd_factorize<pufferfish::LowRankLinear<float>>(dense);
#endif
}
