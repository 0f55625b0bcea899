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

#include <pufferfish/gpu/kernels/attention/attention.cuh>
#include <pufferfish/gpu/kernels/comm/exchange.cuh>
#include <pufferfish/gpu/kernels/conv/conv.cuh>
#include <pufferfish/gpu/kernels/conv/grouped_conv.cuh>
#include <pufferfish/gpu/kernels/conv/halo_conv.cuh>
#include <pufferfish/gpu/kernels/conv/halo_weight.cuh>
#include <pufferfish/gpu/kernels/conv/low_rank_conv.cuh>
#include <pufferfish/gpu/kernels/conv/low_rank_conv_gradient.cuh>
#include <pufferfish/gpu/kernels/copy/elements.cuh>
#include <pufferfish/gpu/kernels/copy/groups.cuh>
#include <pufferfish/gpu/kernels/copy/rows.cuh>
#include <pufferfish/gpu/kernels/copy/transpose.cuh>
#include <pufferfish/gpu/kernels/elementwise/elementwise.cuh>
#include <pufferfish/gpu/kernels/embedding/embedding.cuh>
#include <pufferfish/gpu/kernels/embedding/positions.cuh>
#include <pufferfish/gpu/kernels/gemm/few_rows.cuh>
#include <pufferfish/gpu/kernels/linalg/factors.cuh>
#include <pufferfish/gpu/kernels/loss/loss.cuh>
#include <pufferfish/gpu/kernels/loss/token_loss.cuh>
#include <pufferfish/gpu/kernels/norm/batch_norm.cuh>
#include <pufferfish/gpu/kernels/norm/batch_norm_gradient.cuh>
#include <pufferfish/gpu/kernels/norm/block_norm.cuh>
#include <pufferfish/gpu/kernels/norm/layer_norm.cuh>
#include <pufferfish/gpu/kernels/optim/optimizer.cuh>
#include <pufferfish/gpu/kernels/pooling/pooling.cuh>
#include <pufferfish/gpu/kernels/recurrent/lstm.cuh>
#include <pufferfish/gpu/kernels/recurrent/lstm_steps.cuh>
#include <pufferfish/gpu/kernels/reduce/columns.cuh>
#include <pufferfish/gpu/kernels/reduce/reductions.cuh>
#include <pufferfish/gpu/kernels/step.cuh>
#include <pufferfish/gpu/kernels/train/augment.cuh>
#include <pufferfish/gpu/kernels/train/training.cuh>
