// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The kernels of all tests. The emulated device reads this file as C++ (emulated/cuda.hpp).
#include <pufferfish/gpu/kernels.cuh>

#include "launch_kernels.cuh"
