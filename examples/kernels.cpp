// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Compiles all kernels with nvcc, once per program.
#include <pufferfish/gpu/kernels.cuh>
