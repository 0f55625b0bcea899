// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Umbrella header of everything that needs only the C++ standard library: layers, networks, factorization,
/// optimizers, the model architectures of the Pufferfish paper, and (except with -fno-exceptions) gradient
/// compressors and the exchange for one process. It also includes
///
///   <pufferfish/train.hpp>, the training tasks and weight files  if the compiler finds <zlib.h> and
///                                                                <nlohmann/json.hpp>
///   <pufferfish/distributed.hpp>                                 if it finds <mpi.h>
///
/// A program that calls the functions of these two headers must be linked with zlib and MPI (docs/start.md
/// lists the targets). The adapters of host frameworks and <pufferfish/gpu.hpp> must be included separately.
/// Compiling this header takes several times as long as compiling <pufferfish/lowrank.hpp>.
///
/// Smaller headers compile faster: <pufferfish/lowrank.hpp> for layers in another framework,
/// <pufferfish/nn.hpp> for networks, one header of pufferfish/models for a model.

#include <pufferfish/io/image_set.hpp>
#include <pufferfish/io/token_streams.hpp>
#include <pufferfish/lowrank.hpp>
#include <pufferfish/lowrank/layers/attention.hpp>
#include <pufferfish/models/beam_search.hpp>
#include <pufferfish/models/by_name.hpp>
#include <pufferfish/models/imagenet_resnet.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/mlp.hpp>
#include <pufferfish/models/recipes.hpp>
#include <pufferfish/models/resnet.hpp>
#include <pufferfish/models/sampling.hpp>
#include <pufferfish/models/small_resnet.hpp>
#include <pufferfish/models/small_vgg.hpp>
#include <pufferfish/models/transformer.hpp>
#include <pufferfish/models/transformer_decoding.hpp>
#include <pufferfish/models/vgg.hpp>
#include <pufferfish/models/zoo.hpp>
#include <pufferfish/nn.hpp>
#include <pufferfish/nn/layers/attention.hpp>
#include <pufferfish/nn/layers/embedding.hpp>
#include <pufferfish/nn/layers/feed_forward.hpp>
#include <pufferfish/nn/layers/key_value_cache.hpp>
#include <pufferfish/nn/layers/layer_norm.hpp>
#include <pufferfish/nn/layers/positional_encoding.hpp>
#include <pufferfish/nn/token_loss.hpp>

#if PUFFERFISH_EXCEPTIONS
#include <pufferfish/compress/compression.hpp>
#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/distributed/micro_batches.hpp>
#include <pufferfish/distributed/self.hpp>

#if __has_include(<zlib.h>) && __has_include(<nlohmann/json.hpp>)
#include <pufferfish/models/weights.hpp>
#include <pufferfish/train.hpp>
#include <pufferfish/train/language_task.hpp>
#include <pufferfish/train/translation_task.hpp>
#include <pufferfish/weights/merge.hpp>
#include <pufferfish/weights/statistics.hpp>
#endif
#if __has_include(<mpi.h>)
#include <pufferfish/distributed.hpp>
#endif
#endif
