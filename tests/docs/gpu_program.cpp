// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A program for devices in few lines: what docs/gpu.md builds.
#include <cstdio>

#include <pufferfish/gpu.hpp>

namespace pf = pufferfish;

int main() {
  if (pf::gpu::device_count() == 0) {
    std::puts("no CUDA device");
    return 0;
  }
  pf::gpu_context ctx;
  const pf::LowRankLinear<float, 4, pf::device::gpu> layer(32, 16);
  pf::memory_block<float> x(pf::gpu::device_memory(), 8 * 32), y(pf::gpu::device_memory(), 8 * 16);
  layer.forward(ctx, pf::tensor_view<const float, 2>(x.data(), {8, 32}),
                pf::tensor_view<float, 2>(y.data(), {8, 16}));
  ctx.synchronize();
  std::puts("one layer, on a device");
}
