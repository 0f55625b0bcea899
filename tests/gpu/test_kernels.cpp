// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Kernels of tests: by nvcc for a device, by g++ for the emulated one.
#include "launch_kernels.cuh"
