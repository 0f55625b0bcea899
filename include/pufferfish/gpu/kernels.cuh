// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// All kernels of the library. Exactly one .cu file of a program includes this:
///   #include <pufferfish/gpu/kernels.cuh>
///
/// Compile the file with nvcc, or another compiler for CUDA, for the architectures of your devices: `nvcc
/// -std=c++20 --expt-relaxed-constexpr --extended-lambda -c kernels.cu`. Kernels of layers exist for float,
/// bf16 and fp16; a program that needs fewer of them defines PUFFERFISH_DEVICE_TYPES before
/// (gpu/kernels/launch.cuh). Launchers have hidden visibility: each shared object of a process needs its own
/// copy.

#include <pufferfish/gpu/kernels/attention.cuh>
#include <pufferfish/gpu/kernels/augment.cuh>
#include <pufferfish/gpu/kernels/batch_norm.cuh>
#include <pufferfish/gpu/kernels/columns.cuh>
#include <pufferfish/gpu/kernels/conv.cuh>
#include <pufferfish/gpu/kernels/eigen.cuh>
#include <pufferfish/gpu/kernels/elementwise.cuh>
#include <pufferfish/gpu/kernels/embedding.cuh>
#include <pufferfish/gpu/kernels/exchange.cuh>
#include <pufferfish/gpu/kernels/factors.cuh>
#include <pufferfish/gpu/kernels/grouped_conv.cuh>
#include <pufferfish/gpu/kernels/layer_norm.cuh>
#include <pufferfish/gpu/kernels/loss.cuh>
#include <pufferfish/gpu/kernels/low_rank_conv.cuh>
#include <pufferfish/gpu/kernels/lstm.cuh>
#include <pufferfish/gpu/kernels/optimizer.cuh>
#include <pufferfish/gpu/kernels/pooling.cuh>
#include <pufferfish/gpu/kernels/positions.cuh>
#include <pufferfish/gpu/kernels/reductions.cuh>
#include <pufferfish/gpu/kernels/rows.cuh>
#include <pufferfish/gpu/kernels/step.cuh>
#include <pufferfish/gpu/kernels/token_loss.cuh>
#include <pufferfish/gpu/kernels/training.cuh>
#include <pufferfish/gpu/kernels/transpose.cuh>
