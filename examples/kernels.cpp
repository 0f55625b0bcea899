// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The kernels of examples that train on a device, for nvcc.
#include <pufferfish/gpu/kernels.cuh>
