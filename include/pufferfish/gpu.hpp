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

#include <pufferfish/gpu/attention.hpp>
#include <pufferfish/gpu/augment.hpp>
#include <pufferfish/gpu/batch_norm.hpp>
#include <pufferfish/gpu/collectives.hpp>
#include <pufferfish/gpu/context.hpp>
#include <pufferfish/gpu/conv.hpp>
#include <pufferfish/gpu/eigen.hpp>
#include <pufferfish/gpu/elementwise.hpp>
#include <pufferfish/gpu/embedding.hpp>
#include <pufferfish/gpu/factorize.hpp>
#include <pufferfish/gpu/frobenius_decay.hpp>
#include <pufferfish/gpu/graph.hpp>
#include <pufferfish/gpu/layer_norm.hpp>
#include <pufferfish/gpu/layers.hpp>
#include <pufferfish/gpu/loss.hpp>
#include <pufferfish/gpu/lstm.hpp>
#include <pufferfish/gpu/optimizer.hpp>
#include <pufferfish/gpu/pooling.hpp>
#include <pufferfish/gpu/positions.hpp>
#include <pufferfish/gpu/products.hpp>
#include <pufferfish/gpu/staging.hpp>
#include <pufferfish/gpu/svd.hpp>
#include <pufferfish/gpu/token_loss.hpp>
#include <pufferfish/gpu/training.hpp>
