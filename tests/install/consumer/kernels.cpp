// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <cstdio>
#include <pufferfish/lowrank.hpp>

#ifndef PUFFERFISH_SEPARATE_KERNELS
#error "the component `kernels` defines PUFFERFISH_SEPARATE_KERNELS"
#endif

int main() {
  using namespace pufferfish;
  LowRankLinear<float, 2> layer(3, 4);
  layer.initialize({1, 0});
  cpu_context ctx;
  const tensor<float, 2> y = layer.forward(ctx, tensor<float, 2>({5, 3}));
  std::printf("pufferfish %s, %td rows\n", PUFFERFISH_VERSION_STRING, y.extent(0));
}
