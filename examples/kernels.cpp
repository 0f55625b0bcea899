// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// All kernels, for nvcc: once in a program.
#include <pufferfish/gpu/kernels.cuh>
