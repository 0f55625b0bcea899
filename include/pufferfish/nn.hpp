// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Umbrella header for whole networks: dense and low-rank layers, losses, optimizers, factorization of a
/// network. It is meant for programs without another framework. Training loops, data and checkpoints are in
/// <pufferfish/train.hpp>.
///
/// \code
/// Sequential<float> layers;
/// layers.add("flat", Flatten<float>())
///     .add("hidden", Linear<float>(784, 256))
///     .add("act", ReLU<float>())
///     .add("out", Linear<float>(256, 10));
/// network<float> net(std::move(layers));
/// net.initialize(1);
/// ...                                                       // training of `net`
/// // Replaces layers by factors of a quarter of their full rank (the default), from the first layer with a
/// // weight matrix on.
/// const factorization made = factorize(net, {.first_layer = 1});
/// \endcode
///
/// Every class and function is in namespace pufferfish. All errors derive from pufferfish::error
/// (core/error.hpp).

#include <pufferfish/lowrank.hpp>
#include <pufferfish/nn/accounting.hpp>
#include <pufferfish/nn/containers/any_layer.hpp>
#include <pufferfish/nn/containers/residual.hpp>
#include <pufferfish/nn/containers/sequential.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/fold_batch_norm.hpp>
#include <pufferfish/nn/frozen_model.hpp>
#include <pufferfish/nn/init.hpp>
#include <pufferfish/nn/layers/activation.hpp>
#include <pufferfish/nn/layers/batch_norm.hpp>
#include <pufferfish/nn/layers/channel_select.hpp>
#include <pufferfish/nn/layers/dense_layers.hpp>
#include <pufferfish/nn/layers/dropout.hpp>
#include <pufferfish/nn/layers/flatten.hpp>
#include <pufferfish/nn/layers/low_rank_norm_conv.hpp>
#include <pufferfish/nn/layers/pooling.hpp>
#include <pufferfish/nn/loss.hpp>
#include <pufferfish/nn/measure/collect_statistics.hpp>
#include <pufferfish/nn/network.hpp>
#include <pufferfish/nn/norm_estimation.hpp>
#include <pufferfish/nn/switch/annealing.hpp>
#include <pufferfish/nn/switch/factor_norms.hpp>
#include <pufferfish/nn/switch/soft_projection.hpp>
#include <pufferfish/optim/adam.hpp>
#include <pufferfish/optim/clip.hpp>
#include <pufferfish/optim/frobenius_decay.hpp>
#include <pufferfish/optim/schedule.hpp>
#include <pufferfish/optim/sgd.hpp>
