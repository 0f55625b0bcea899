// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The back end for NVIDIA devices: `context<device::gpu>` and its operations. Any C++20 compiler can compile
/// it with the CUDA Toolkit's headers. The program links cudart, cublas, cublasLt and the kernels. The
/// kernels are compiled by nvcc from one .cu file of the program with the line
///
///     #include <pufferfish/gpu/kernels.cuh>
///
/// (see docs/gpu.md).

#include <pufferfish/gpu/comm/collectives.hpp>
#include <pufferfish/gpu/comm/staging.hpp>
#include <pufferfish/gpu/linalg/eigen.hpp>
#include <pufferfish/gpu/linalg/svd.hpp>
#include <pufferfish/gpu/lowrank/factorize.hpp>
#include <pufferfish/gpu/lowrank/layers.hpp>
#include <pufferfish/gpu/ops/attention.hpp>
#include <pufferfish/gpu/ops/conv.hpp>
#include <pufferfish/gpu/ops/copy.hpp>
#include <pufferfish/gpu/ops/elementwise.hpp>
#include <pufferfish/gpu/ops/embedding.hpp>
#include <pufferfish/gpu/ops/loss.hpp>
#include <pufferfish/gpu/ops/lstm.hpp>
#include <pufferfish/gpu/ops/norm.hpp>
#include <pufferfish/gpu/ops/pooling.hpp>
#include <pufferfish/gpu/ops/products.hpp>
#include <pufferfish/gpu/optim/loss_scaler.hpp>
#include <pufferfish/gpu/optim/optimizer.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/gpu/runtime/graph.hpp>
#include <pufferfish/gpu/train/augment.hpp>
#include <pufferfish/gpu/train/training.hpp>
