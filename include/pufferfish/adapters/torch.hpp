// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// pufferfish in libtorch (C++ PyTorch), 1.13 and later: everything in namespace pufferfish::host_torch.
///
/// - traits.hpp: layer_traits of Linear, Conv2d, Embedding, LSTM, MultiheadAttention for svd_factorize and
///   svd_factors
/// - linear, conv, embedding, lstm, attention.hpp: LowRankLinear, LowRankConv2d, LowRankEmbedding,
///   LowRankLSTM, LowRankMultiheadAttention: modules of libtorch
/// - from_dense.hpp: low_rank(layer, policy): makes one of these modules from a dense one; the table of kinds
/// - slot.hpp: Linear, Conv2d, Embedding, LSTM, MultiheadAttention: typed members that may become low-rank
/// - factorize.hpp: factorize(module, policy): a whole tree, in place
/// - statistics.hpp: statistics_recorder: statistics of training passes, for factors that raise the loss less
/// - distributed.hpp: distributed: averages the gradients of a module over ranks
/// - prune.hpp: module_mask: pruning by magnitude and GraSP, and masked training with libtorch's optimizers
/// - zero_tracker.hpp: zero_tracker: leaves gradients of weights that a program has pruned out of exchanges
/// - local_training.hpp: local_training: ranks train alone and exchange parameters once in a while
///
/// Not included here, because it needs ONNX as well: export_onnx.hpp: export_onnx(module, path, options).
///
/// Needs g++, or a clang with libtorch 2 or later: clang cannot compile libtorch 1 as C++20.

// Included first, so that its error message comes before those of libtorch's headers.
#include <pufferfish/core/needs_exceptions.hpp>

#include <pufferfish/adapters/torch/distributed.hpp>
#include <pufferfish/adapters/torch/factorize.hpp>
#include <pufferfish/adapters/torch/local_training.hpp>
#include <pufferfish/adapters/torch/prune.hpp>
#include <pufferfish/adapters/torch/statistics.hpp>
#include <pufferfish/adapters/torch/zero_tracker.hpp>
