// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `batch_plan`: which samples of a set of images are in which batch, on which rank.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/number_text.hpp>
#include <pufferfish/core/random.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Random changes to training images. Without smallest_area, all (2 pad_crop + 1)^2 windows are equally
/// likely.
struct augmentation {
  index_t pad_crop = 0;  ///< pad each side by this many pixels, then cut a window of the old size at random
  bool reflect = false;  ///< pad with the mirror image (the edge not repeated) instead of zero pixels
  bool flip = false;     ///< mirror left and right with probability 1/2
  /// Used for images of different sizes (folder_images) only: a random window of the image, with at least
  /// this share of its area, is scaled to the size of the batch. 1: the middle of the image is used.
  double smallest_area = 1.0;
};

/// Normalisation of pixels: value v (0 .. 255) of channel c becomes (v - mean[c]) / deviation[c]. Both
/// vectors have one element a channel, or both are empty: pixels keep their values.
struct normalization {
  std::vector<float> mean, deviation;
};

/// Options of loaders and of batch_plan, whose constructors check them.
struct loader_options {
  index_t batch = 128;  ///< samples of all ranks together; an epoch's last batch may have fewer
  bool shuffle = true;  ///< whether every epoch has a new order; else samples are in the order of the set
  augmentation augment = {};
  normalization normalize = {};
  std::uint64_t seed = 0;
  int rank = 0;
  int ranks = 1;
};

/// A rank's part of one global batch. `count` may be 0 in a batch smaller than the number of ranks.
struct batch_place {
  index_t first = 0;         ///< position of this rank's first sample in the global batch
  index_t count = 0;         ///< number of this rank's samples
  index_t global_count = 0;  ///< number of samples of all ranks
};

/// The order of a set's samples in each epoch, cut into batches, and those into the parts of ranks. It is a
/// pure function of the seed and the epoch, so the global batches do not depend on the number of ranks. Of a
/// batch of B samples, rank r of p gets B r / p .. B (r + 1) / p - 1. One thread at a time uses a plan. The
/// first sample_at() of an epoch computes the epoch's permutation, in time and memory proportional to the
/// number of samples.
/// \code
///   batch_plan plan({1000, 32, 32, 3}, {.batch = 128});
///   const batch_place part = plan.place(0, 7);  // the last, smaller batch of epoch 0
///   const index_t sample = plan.sample_at(0, 7 * 128 + part.first);
/// \endcode
class batch_plan {
 public:
  /// `images`: number, height, width and channels of the images as they are served. Throws value_error for a
  /// batch below 1, a rank outside 0 .. ranks - 1, a mean that is not finite, a deviation that is not finite
  /// and positive; shape_error if the lengths of mean and deviation are not the number of channels.
  batch_plan(const extents<4>& images, loader_options options)
      : images_(images), options_(std::move(options)) {
    check_options();
  }

  /// Number and extents of the images, N x height x width x channels.
  const extents<4>& images() const { return images_; }
  const loader_options& options() const { return options_; }

  /// Number of global batches in an epoch, the last, smaller one included.
  index_t steps_per_epoch() const {
    return images_[0] / options_.batch + (images_[0] % options_.batch > 0 ? 1 : 0);
  }

  /// The largest number of samples that any rank gets in a step.
  index_t max_local_batch() const {
    return (std::min(options_.batch, images_[0]) + options_.ranks - 1) / options_.ranks;
  }

  /// This rank's samples of a step's global batch. Throws value_error for an epoch or a step out of
  /// range.
  batch_place place(index_t epoch, index_t step) const {
    if (epoch < 0 || step < 0 || step >= steps_per_epoch()) {
      detail::throw_error<value_error>(
          {"loader: epoch ", epoch, ", step ", step, "; steps are 0 .. ", steps_per_epoch() - 1});
    }
    const index_t count = std::min(options_.batch, images_[0] - step * options_.batch);
    const index_t first = count * options_.rank / options_.ranks;
    return {first, count * (options_.rank + 1) / options_.ranks - first, count};
  }

  /// Returns place(epoch, step) for a batch that will fill `images` (NHWC extents) and `labels` labels.
  /// Throws the errors of place(), and shape_error if there is no room for its samples or the images have
  /// another size.
  batch_place place_for(index_t epoch, index_t step, const extents<4>& images, std::size_t labels) const {
    const batch_place part = place(epoch, step);
    const extents<4> expected{part.count, images_[1], images_[2], images_[3]};
    if (images[0] < part.count || static_cast<index_t>(labels) < part.count ||
        !std::equal(images.begin() + 1, images.end(), expected.begin() + 1)) {
      detail::throw_error<shape_error>({"loader: a batch of ", to_string<4>(expected), " (NHWC) and ",
                                        part.count, " labels does not fit into ", to_string<4>(images),
                                        " and ", labels});
    }
    return part;
  }

  /// Position in the set of the sample at position 0 .. count - 1 of an epoch's order.
  /// `position` is not checked.
  index_t sample_at(index_t epoch, index_t position) {
    if (!options_.shuffle) return position;
    if (epoch != order_epoch_) {
      order_ = random_permutation(images_[0], stream("shuffle", epoch));
      order_epoch_ = epoch;
    }
    return static_cast<index_t>(order_[static_cast<std::size_t>(position)]);
  }

  /// Stream of random numbers for one purpose ("augment") in one epoch.
  random_stream stream(const char* purpose, index_t epoch) const {
    return {options_.seed, substream(stream_id(purpose), static_cast<std::uint64_t>(epoch))};
  }

  /// Table of the normalised values of pixels: table[256 c + v] = (v - mean[c]) / deviation[c], computed in
  /// double.
  std::vector<float> normalized_values() const {
    std::vector<float> table;
    for (std::size_t c = 0; c < static_cast<std::size_t>(images_[3]); ++c) {
      const bool plain = options_.normalize.mean.empty();
      const double mean = plain ? 0.0 : static_cast<double>(options_.normalize.mean[c]);
      const double deviation = plain ? 1.0 : static_cast<double>(options_.normalize.deviation[c]);
      for (int v = 0; v < 256; ++v) table.push_back(static_cast<float>((v - mean) / deviation));
    }
    return table;
  }

 private:
  // Throws the errors of the constructor, with the numbers.
  void check_options() const {
    const loader_options& o = options_;
    if (o.batch < 1) detail::throw_error<value_error>({"loader: a batch of ", o.batch});
    if (o.ranks < 1 || o.rank < 0 || o.rank >= o.ranks) {
      detail::throw_error<value_error>({"loader: rank ", o.rank, " of ", o.ranks});
    }
    const auto channels =
        o.normalize.mean.empty() && o.normalize.deviation.empty() ? 0 : static_cast<std::size_t>(images_[3]);
    if (o.normalize.mean.size() != channels || o.normalize.deviation.size() != channels) {
      detail::throw_error<shape_error>({"loader: normalization has ", o.normalize.mean.size(), " means and ",
                                        o.normalize.deviation.size(), " deviations for ", images_[3],
                                        " channels"});
    }
    for (std::size_t c = 0; c < channels; ++c) {
      const float deviation = o.normalize.deviation[c];
      if (!std::isfinite(o.normalize.mean[c]) || !(deviation > 0.0F && std::isfinite(deviation))) {
        detail::throw_error<value_error>({"loader: channel ", c, " has mean ",
                                          detail::shortest_number(o.normalize.mean[c]), " and deviation ",
                                          detail::shortest_number(deviation)});
      }
    }
  }

  extents<4> images_;
  loader_options options_;
  std::vector<std::uint32_t> order_;
  index_t order_epoch_ = -1;
};

PUFFERFISH_NAMESPACE_END
