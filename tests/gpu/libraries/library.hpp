// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Functions of a shared library, NAME_address() and so on, for the program that loads it. first.cpp and
// second.cpp are two libraries that have the same operations and kernels in them.
#pragma once

#include <cstdio>
#include <exception>
#include <vector>

#include <pufferfish/gpu/ops/elementwise.hpp>
#include <pufferfish/gpu/runtime/context.hpp>

PUFFERFISH_KERNELS_BEGIN
const void* scale_kernel();  // kernels.cpp
PUFFERFISH_KERNELS_END

namespace library {

/// Where the launcher is that this library calls, and the function by which its kernel is known to CUDA.
inline const void* launcher() {
  return reinterpret_cast<const void*>(&pufferfish::gpu::kernels::scale<float>);
}
inline const void* kernel() { return pufferfish::gpu::kernels::scale_kernel(); }

/// Multiplies numbers by `factor`, on a device: 0 if all come back right.
inline int compute(float factor) {
  namespace pf = pufferfish;
  try {
    pf::gpu_context ctx;
    std::vector<float> x(1000), y(1000, -1.0F);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
    pf::memory_block<float> from(pf::gpu::device_memory(), 1000), to(pf::gpu::device_memory(), 1000);
    from.from_host(x);
    pf::ops::relu_forward<float>(ctx, from.span(), to.span());
    // The library's launcher itself: the operation above is whichever copy the loader found first.
    pf::gpu::kernels::scale<float>(ctx.stream(), factor, to.data(), to.data(), 1000);
    ctx.synchronize();
    to.to_host(y);
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (y[i] != factor * x[i]) {
        std::printf("element %zu is %g\n", i, static_cast<double>(y[i]));
        return 1;
      }
    }
    return 0;
  } catch (const std::exception& e) {
    std::printf("%s\n", e.what());
    return 1;
  }
}

}  // namespace library
