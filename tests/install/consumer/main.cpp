// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#if __has_include(<pufferfish/lowrank.hpp>)
#include <pufferfish/lowrank.hpp>
#endif
#include <pufferfish/core/tensor.hpp>

#include <cstdio>

int main() {
  pufferfish::tensor<float, 2> weights({4, 3});
  weights(3, 2) = 1.0F;
  std::printf("pufferfish %s: %td elements\n", PUFFERFISH_VERSION_STRING, weights.size());
  return weights.size() == 12 && weights(3, 2) == 1.0F ? 0 : 1;
}
