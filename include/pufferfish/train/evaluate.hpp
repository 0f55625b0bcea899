// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `evaluate`: loss and accuracy of a network on a set of images.

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include <pufferfish/distributed/communicator.hpp>
#include <pufferfish/nn/loss.hpp>
#include <pufferfish/nn/network.hpp>
#include <pufferfish/train/device_parts.hpp>
#include <pufferfish/train/loader.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Sums over the samples of an evaluation. For a set of images, `correct` is the number of hits and `count`
/// the number of images. Tasks without hits leave `correct` at 0, and `count` is the number of tokens.
struct evaluation {
  double loss_sum = 0.0;     ///< sum of the samples' losses, in nats
  std::int64_t correct = 0;  ///< samples whose largest logit is at their label
  std::int64_t count = 0;    ///< number of samples
  /// Samples whose label has one of the five largest logits; counted in tests of networks with at least 100
  /// classes.
  std::int64_t in_top5 = 0;

  /// Mean loss (cross entropy) in nats per sample; 0 without samples.
  double loss() const { return count > 0 ? loss_sum / static_cast<double>(count) : 0.0; }
  /// Share of samples whose largest logit is at their label, in percent; 0 without samples.
  double accuracy() const { return percent(correct); }
  /// Share of samples counted by in_top5, in percent; 0 without samples.
  double top5_accuracy() const { return percent(in_top5); }

 private:
  // A share of the samples in percent; 0 without samples.
  double percent(std::int64_t hits) const {
    return count > 0 ? 100.0 * static_cast<double>(hits) / static_cast<double>(count) : 0.0;
  }
};

/// Sums an evaluation over all ranks, by two all-reduces: one of the loss, one of the counts. Collective.
template <class Comm>
evaluation reduce(Comm& comm, evaluation local) {
  double loss[1] = {local.loss_sum};
  std::int64_t counts[3] = {local.correct, local.count, local.in_top5};
  comm.all_reduce_sum(std::span<double>(loss));
  comm.all_reduce_sum(std::span<std::int64_t>(counts));
  return {loss[0], counts[0], counts[1], counts[2]};
}

namespace detail {

/// Results of all steps, summed over the steps: losses, and the second result of a step (number of tokens or
/// hits).
struct result_sums {
  double loss = 0.0;
  std::int64_t second = 0;
};
/// Sums the pairs (loss, second result) of all steps in the memory of a device. Waits for the device.
inline result_sums sum_of_results(const memory_block<double>& results) {
  std::vector<double> seen(static_cast<std::size_t>(results.size()));
  results.to_host(seen);
  result_sums sum;
  for (std::size_t i = 0; i < seen.size(); i += 2) {
    sum.loss += seen[i];
    sum.second += static_cast<std::int64_t>(seen[i + 1]);
  }
  return sum;
}

/// Number of classes from which on tests count in_top5.
inline constexpr index_t top5_classes = 100;

/// Number of rows of `logits` [rows x classes] whose label is among the five largest values; of equal values
/// the first ones count as larger.
inline std::int64_t count_in_top5(std::span<const float> logits, std::span<const std::int32_t> labels,
                                  index_t classes) {
  std::int64_t found = 0;
  for (std::size_t row = 0; row < labels.size(); ++row) {
    const auto values =
        logits.subspan(row * static_cast<std::size_t>(classes), static_cast<std::size_t>(classes));
    const auto label = static_cast<std::size_t>(labels[row]);
    const float own = values[label];
    if (std::isnan(own)) continue;
    int larger = 0;
    for (std::size_t c = 0; c < values.size(); ++c)
      larger += values[c] > own || (values[c] == own && c < label);
    found += larger < 5;
  }
  return found;
}

/// Number of the first `count` rows of logits whose label is among the five largest values, for arrays in the
/// memory of a device. Waits for the device.
template <class T>
std::int64_t count_in_top5(const memory_block<T>& logits, const memory_block<std::int32_t>& labels,
                           index_t count, index_t classes) {
  std::vector<T> values(static_cast<std::size_t>(logits.size()));
  std::vector<std::int32_t> expected(static_cast<std::size_t>(labels.size()));
  logits.to_host(values);
  labels.to_host(expected);
  std::vector<float> seen(static_cast<std::size_t>(count * classes));
  for (std::size_t i = 0; i < seen.size(); ++i) seen[i] = static_cast<float>(values[i]);
  expected.resize(static_cast<std::size_t>(count));
  return count_in_top5(seen, expected, classes);
}

/// Runs all batches of epoch 0 of image_batches or a loader through the network in inference mode, and sums
/// the results over all ranks. `shape`: NHWC extents of the largest batch. Memory for one batch and its
/// logits is allocated here. The host reads the losses once at the end; with top5_classes or more classes
/// also the logits of each batch. Collective.
template <class T, class Device, class Comm, class Source>
evaluation evaluate(context<Device>& ctx, const network<T, Device>& net, Comm& comm, Source& source,
                    const extents<4>& shape) {
  const index_t room = shape[0], steps = source.steps_per_epoch();
  memory_source& memory = memory_of<Device>::source();
  const extents<4> output_shape = net.output_shape(shape);
  memory_block<T> images(memory, volume<4>(shape), uninitialized);
  memory_block<T> logits(memory, volume<4>(output_shape), uninitialized);
  memory_block<std::int32_t> labels(memory, room, uninitialized);
  memory_block<double> results(memory, 2 * steps);  // results of all batches, which the host reads at once
  const tensor_view<T, 4> x(images.data(), shape), y(logits.data(), output_shape);
  const mode_scope<Device> inference(ctx, run_mode::inference);
  std::int64_t images_seen = 0, in_top5 = 0;
  const SoftmaxCrossEntropy<T> criterion;
  for (index_t step = 0; step < steps; ++step) {
    const index_t count = source.load(ctx, 0, step, x, labels.span()).count;
    if (count == 0) continue;
    const tensor_view<T, 4> part = y.slice(0, 0, count);
    net.forward(ctx, x.slice(0, 0, count), part);
    criterion(ctx, part, labels.span().first(static_cast<std::size_t>(count)), 1.0, {},
              results.data() + 2 * step);
    images_seen += count;
    if (output_shape[3] >= top5_classes) in_top5 += count_in_top5(logits, labels, count, output_shape[3]);
  }
  const result_sums sum = sum_of_results(results);
  return reduce(comm, {sum.loss, sum.second, images_seen, in_top5});
}

}  // namespace detail

/// Runs all images through the network in inference mode, without shuffling and augmentation. Each rank runs
/// its part of every batch; the sums are over all ranks. Restores the context's mode. On a device the set is
/// copied there first. Collective.
/// `batch`: images of all ranks per forward pass. loss_sum and hits are those of SoftmaxCrossEntropy without
/// smoothing. Throws the errors of loader's constructor for an invalid set, batch or normalization, and
/// shape_error if images do not fit the network; ranks that do not throw wait for the others.
/// \code
///   const normalization normalize = measure_normalization(train);
///   const evaluation seen = evaluate(ctx, net, comm, test, normalize);
///   std::printf("loss %.3f, accuracy %.2f %%\n", seen.loss(), seen.accuracy());
/// \endcode
template <class T, class Device, class Comm>
evaluation evaluate(context<Device>& ctx, const network<T, Device>& net, Comm& comm, const image_set& set,
                    const normalization& normalize, index_t batch = 256) {
  typename detail::device_parts<Device>::image_source source(set, {.batch = batch,
                                                                   .shuffle = false,
                                                                   .augment = {},
                                                                   .normalize = normalize,
                                                                   .rank = comm.rank(),
                                                                   .ranks = comm.size()});
  return detail::evaluate(ctx, net, comm, source,
                          {source.max_local_batch(), set.height, set.width, set.channels});
}

PUFFERFISH_NAMESPACE_END
