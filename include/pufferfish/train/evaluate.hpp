// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// How good a network is on a set of images.

#include <cstdint>
#include <vector>

#include <pufferfish/dist/communicator.hpp>
#include <pufferfish/nn/loss.hpp>
#include <pufferfish/nn/network.hpp>
#include <pufferfish/train/loader.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Sums over the samples seen.
struct evaluation {
  double loss_sum = 0.0;
  std::int64_t correct = 0;
  std::int64_t count = 0;

  /// Mean cross entropy in nats, and the share of samples whose largest logit is at their label, in percent.
  double loss() const { return count > 0 ? loss_sum / static_cast<double>(count) : 0.0; }
  double accuracy() const {
    return count > 0 ? 100.0 * static_cast<double>(correct) / static_cast<double>(count) : 0.0;
  }
};

/// Sums an evaluation over all ranks. Collective.
template <class Comm>
evaluation reduce(Comm& comm, evaluation local) {
  double loss[1] = {local.loss_sum};
  std::int64_t counts[2] = {local.correct, local.count};
  comm.all_reduce_sum(std::span<double>(loss));
  comm.all_reduce_sum(std::span<std::int64_t>(counts));
  return {loss[0], counts[0], counts[1]};
}

/// Runs all images through the network in inference mode, without shuffling and augmentation, each rank its
/// part of every batch; the sums are over all ranks. The context's mode is put back. Collective.
template <class T, class Comm>
evaluation evaluate(context<device::cpu>& ctx, const network<T>& net, Comm& comm, const image_set& set,
                    const normalization& normalize, index_t batch = 256) {
  loader_options options;
  options.batch = batch;
  options.shuffle = false;
  options.normalize = normalize;
  options.rank = comm.rank();
  options.ranks = comm.size();
  loader source(set, options);
  const index_t room = source.max_local_batch();
  tensor<T, 4> images({room, set.height, set.width, set.channels});
  std::vector<std::int32_t> labels(static_cast<std::size_t>(room));
  const mode_scope inference(ctx, run_mode::inference);
  evaluation local;
  tensor<T, 4> logits(net.output_shape(images.shape()));
  const SoftmaxCrossEntropy<T> criterion;
  for (index_t step = 0; step < source.steps_per_epoch(); ++step) {
    const index_t count = source.load(0, step, images.view(), std::span<std::int32_t>(labels)).count;
    if (count == 0) continue;
    const tensor_view<T, 4> y = logits.view().slice(0, 0, count);
    net.forward(ctx, images.view().slice(0, 0, count), y);
    const loss_result loss =
        criterion(ctx, y, std::span<const std::int32_t>(labels.data(), static_cast<std::size_t>(count)));
    local.loss_sum += loss.loss_sum;
    local.correct += loss.correct;
    local.count += loss.count;
  }
  return reduce(comm, local);
}

PUFFERFISH_NAMESPACE_END
