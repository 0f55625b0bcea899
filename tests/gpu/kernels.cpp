// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// All kernels, and those of tests, once in a program: by nvcc for a device, by g++ for the emulated one.
#include <pufferfish/gpu/kernels.cuh>

#include "launch_kernels.cuh"
