// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// pufferfish in libtorch (C++ PyTorch), 1.13 and later: everything in namespace pufferfish::host_torch.
///
/// - traits.hpp: layer_traits of Linear, Conv2d, Embedding, LSTM, MultiheadAttention for svd_factorize and
///   svd_factors
/// - linear, conv, embedding, lstm, attention.hpp: LowRankLinear, LowRankConv2d, LowRankEmbedding,
///   LowRankLSTM, LowRankMultiheadAttention: modules of libtorch
/// - from_dense.hpp: low_rank(layer, policy): one of them from a dense module; the table of kinds
/// - slot.hpp: Linear, Conv2d, Embedding, LSTM, MultiheadAttention: typed members that may become low-rank
/// - factorize.hpp: factorize(module, policy): a whole tree, in place
/// - statistics.hpp: statistics_recorder: what layers meet in training, for factors that lose less
/// - distributed.hpp: distributed: the gradients of a module, averaged over ranks
/// - prune.hpp: module_mask: pruning by magnitude and GraSP, and masked training with libtorch's optimizers
/// - zero_tracker.hpp: zero_tracker: exchanges without the gradients of weights that a program has pruned
/// - local_training.hpp: local_training: ranks that exchange parameters once in a while
///
/// Needs g++, or a clang with libtorch 2 or later: clang cannot compile libtorch 1 as C++20.

// First, before the host's headers fail.
#include <pufferfish/core/needs_exceptions.hpp>

#include <pufferfish/adapters/torch/distributed.hpp>
#include <pufferfish/adapters/torch/factorize.hpp>
#include <pufferfish/adapters/torch/local_training.hpp>
#include <pufferfish/adapters/torch/prune.hpp>
#include <pufferfish/adapters/torch/statistics.hpp>
#include <pufferfish/adapters/torch/zero_tracker.hpp>
