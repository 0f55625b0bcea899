// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// All kernels of the library. Exactly one .cu file of a program includes this:
///   #include <pufferfish/gpu/kernels.cuh>

#include <pufferfish/gpu/kernels/exchange.cuh>
#include <pufferfish/gpu/kernels/step.cuh>
