// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `image_task`: classifying images, as a task of a training run.

#include <algorithm>
#include <string>
#include <vector>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/train/evaluate.hpp>
#include <pufferfish/train/options.hpp>
#include <pufferfish/train/training_run.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A network's logits against the labels of images, by softmax cross entropy; augmented and normalised with
/// the training set's own statistics.
template <class T>
class image_task {
 public:
  using model_type = network<T>;

  /// The sets must outlive the object. Throws shape_error if images do not fit the network.
  image_task(const model_type& net, const image_set& train, const image_set& test,
             const training_options& options, int rank, int ranks)
      : test_(&test),
        options_(options),
        ranks_(ranks),
        normalize_(measure_normalization(train)),
        loader_(train, loader_for(rank, ranks)),
        images_({loader_.max_local_batch(), train.height, train.width, train.channels}),
        labels_(static_cast<std::size_t>(loader_.max_local_batch())),
        logits_(net.output_shape(images_.shape())),
        gradient_(logits_.shape()) {}

  index_t steps_per_epoch() const { return loader_.steps_per_epoch(); }
  const normalization& normalize() const { return normalize_; }

  evaluation step(context<device::cpu>& ctx, const model_type& net, const step_position& at) {
    const batch_place place =
        loader_.load(at.epoch, at.step, images_.view(), std::span<std::int32_t>(labels_));
    ctx.begin_step(at.total, place.first);
    const tensor_view<const T, 4> x = images_.view().slice(0, 0, place.count);
    const tensor_view<T, 4> y = logits_.view().slice(0, 0, place.count);
    const tensor_view<T, 4> dy = gradient_.view().slice(0, 0, place.count);
    net.forward(ctx, x, y);
    // Each rank divides by its share of the global batch, so that the mean over ranks is the mean over
    // samples even where the shares differ by one.
    const double share = static_cast<double>(place.global_count) / ranks_;
    const SoftmaxCrossEntropy<T> criterion(options_.smoothing);
    const std::span<const std::int32_t> labels(labels_.data(), static_cast<std::size_t>(place.count));
    const loss_result loss = criterion(ctx, y, labels, share, dy);
    net.backward(ctx, dy);
    return {loss.loss_sum, loss.correct, loss.count};
  }

  template <class Comm>
  evaluation test(context<device::cpu>& ctx, const model_type& net, Comm& comm) {
    return evaluate(ctx, net, comm, *test_, normalize_, std::max<index_t>(options_.batch, 256));
  }

  std::string describe() const {
    return "batch " + std::to_string(options_.batch) + "\nlabel smoothing " +
           detail::exact_number(options_.smoothing.epsilon) + "\ncrop padding " +
           std::to_string(options_.augment.pad_crop) + "\nflip " + (options_.augment.flip ? "yes" : "no") +
           "\ntraining images " + std::to_string(loader_.set().count) + "\n";
  }
  std::string data_lines() const {
    const image_set& train = loader_.set();
    return "training data " +
           detail::hexadecimal(hasher()
                                   .values(std::span<const std::uint8_t>(train.pixels))
                                   .values(std::span<const std::int32_t>(train.labels))
                                   .digest()) +
           "\n";
  }

 private:
  loader_options loader_for(int rank, int ranks) const {
    loader_options result;
    result.batch = options_.batch;
    result.augment = options_.augment;
    result.normalize = normalize_;
    result.seed = options_.seed;
    result.rank = rank;
    result.ranks = ranks;
    return result;
  }

  const image_set* test_;
  training_options options_;
  int ranks_;
  normalization normalize_;
  loader loader_;
  tensor<T, 4> images_;
  std::vector<std::int32_t> labels_;
  tensor<T, 4> logits_, gradient_;
};

PUFFERFISH_NAMESPACE_END
