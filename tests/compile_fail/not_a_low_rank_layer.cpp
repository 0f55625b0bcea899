// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-error: L must be one of the library's low-rank layers

#include "host_linear.hpp"

namespace not_a_low_rank_layer {
void factorize(const host::Dense& dense) {
  (void)pufferfish::svd_factorize<8>(dense);
#ifdef PUFFERFISH_FAIL
  (void)pufferfish::svd_factorize<host::Dense>(dense);
#endif
}
}  // namespace not_a_low_rank_layer
