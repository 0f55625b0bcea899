// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The kernels of one of the two libraries: a context's own, and passes over elements.
#define PUFFERFISH_DEVICE_TYPES(use) use(float)
#include <pufferfish/gpu/kernels/elementwise/elementwise.cuh>
#include <pufferfish/gpu/kernels/step.cuh>

PUFFERFISH_KERNELS_BEGIN

const void* scale_kernel();
const void* scale_kernel() {
  return reinterpret_cast<const void*>(&map_kernel<product_with<float>, float, float>);
}

PUFFERFISH_KERNELS_END
