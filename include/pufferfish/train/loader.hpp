// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `loader`: batches of normalised, augmented images out of an image set, cut over the ranks of a run.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/io/image_set.hpp>
#include <pufferfish/train/batch_plan.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Throws value_error for an empty set and for labels outside 0 .. classes - 1, shape_error for numbers of
/// pixels or labels that do not fit the extents; `who` begins the text.
inline void check_image_set(const image_set& set, const char* who) {
  const std::string name(who);
  const auto numbers = [](index_t have, index_t want) {
    return std::to_string(have) + ", not " + std::to_string(want);
  };
  if (set.count < 1 || set.height < 1 || set.width < 1 || set.channels < 1) {
    throw_error<value_error>({name, ": an image set of ",
                              to_string<4>({set.count, set.height, set.width, set.channels}),
                              " (NHWC) has no pixels"});
  }
  const index_t pixels = set.count * set.height * set.width * set.channels;
  if (static_cast<index_t>(set.pixels.size()) != pixels) {
    throw_error<shape_error>(
        {name, ": the number of pixel values is ", numbers(static_cast<index_t>(set.pixels.size()), pixels)});
  }
  if (static_cast<index_t>(set.labels.size()) != set.count) {
    throw_error<shape_error>(
        {name, ": the number of labels is ", numbers(static_cast<index_t>(set.labels.size()), set.count)});
  }
  for (std::size_t i = 0; i < set.labels.size(); ++i) {
    if (set.labels[i] < 0 || set.labels[i] >= set.classes) {
      throw_error<value_error>(
          {name, ": label ", i, " is ", set.labels[i], ", not in 0 .. ", set.classes - 1});
    }
  }
}

/// Position p of a line of n pixels, reflected at the line's ends, for -n < p < 2n - 1.
constexpr index_t reflected(index_t p, index_t n) { return p < 0 ? -p : p >= n ? 2 * (n - 1) - p : p; }

}  // namespace detail

/// Mean and standard deviation of each channel over all pixels of a set (the training set), for bytes from 0
/// to 255. The sums are exact; a deviation of 0 becomes 1. Throws an error for an empty or contradictory set,
/// of the type that the constructor of loader throws.
inline normalization measure_normalization(const image_set& set) {
  detail::check_image_set(set, "measure_normalization");
  const auto channels = static_cast<std::size_t>(set.channels);
  // Counting values first makes both sums exact, whatever the size of the set.
  std::vector<std::array<std::uint64_t, 256>> counts(channels);
  for (std::size_t i = 0; i < set.pixels.size(); ++i) ++counts[i % channels][set.pixels[i]];
  const std::size_t pixels = set.pixels.size() / channels;
  const auto total = static_cast<double>(pixels);
  normalization result;
  for (const auto& count : counts) {
    double sum = 0.0, squares = 0.0;
    for (std::size_t v = 0; v < 256; ++v) sum += static_cast<double>(v) * static_cast<double>(count[v]);
    const double mean = sum / total;
    for (std::size_t v = 0; v < 256; ++v) {
      const double distance = static_cast<double>(v) - mean;
      squares += distance * distance * static_cast<double>(count[v]);
    }
    const double deviation = std::sqrt(squares / total);
    result.mean.push_back(static_cast<float>(mean));
    result.deviation.push_back(deviation > 0.0 ? static_cast<float>(deviation) : 1.0F);
  }
  return result;
}

/// Serves the batches of an image set by a batch_plan. The augmentation of a sample is a pure function of
/// (seed, epoch, position of the sample in the set). The set must outlive the loader unchanged.
/// \code
///   loader source(train, {.batch = 128, .normalize = measure_normalization(train)});
///   tensor<float, 4> x({source.max_local_batch(), train.height, train.width, train.channels});
///   std::vector<std::int32_t> labels(128);  // at least got.count
///   const batch_place got = source.load(0, 0, x.view(), std::span<std::int32_t>(labels));
/// \endcode
class loader : public batch_plan {
 public:
  /// Throws the errors of batch_plan; value_error for an empty set, a label outside 0 .. classes - 1, padding
  /// that is negative (or not smaller than the image, where it reflects); shape_error if pixels or labels of
  /// the set do not fit its extents. All name the numbers.
  loader(const image_set& set, loader_options options)
      : batch_plan(checked_extents(set), std::move(options)), set_(&set), table_(normalized_values()) {
    check_augmentation();
  }
  loader(image_set&&, loader_options) = delete;

  /// The images.
  const image_set& set() const { return *set_; }
  /// Table of the normalised values of pixels: value v of channel c is at 256 c + v.
  const std::vector<float>& table() const { return table_; }
  /// Random numbers of an epoch's augmentation. Sample i of the set uses the numbers 3 i, 3 i + 1, 3 i + 2.
  random_stream augmentation_stream(index_t epoch) const { return stream("augment", epoch); }

  /// Fills rows 0 .. count - 1 of `images` (N x height x width x channels, dense) and of `labels` with this
  /// rank's part of a global batch; later rows are unchanged. Returns the place of the part. Throws the
  /// errors of place_for().
  template <class T>
  batch_place load(index_t epoch, index_t step, const tensor_view<T, 4>& images,
                   std::span<std::int32_t> labels) {
    const batch_place part = place_for(epoch, step, images.shape(), labels.size());
    T* row = images.flat().data();
    const index_t row_size = set_->height * set_->width * set_->channels;
    for (index_t i = 0; i < part.count; ++i) {
      const index_t sample = sample_at(epoch, step * options().batch + part.first + i);
      write_image(epoch, sample, row + i * row_size);
      labels[static_cast<std::size_t>(i)] = set_->labels[static_cast<std::size_t>(sample)];
    }
    return part;
  }

  /// Has the signature of gpu::image_loader::load, for code on any device. The context is not used.
  template <class T>
  batch_place load(context<device::cpu>&, index_t epoch, index_t step, const tensor_view<T, 4>& images,
                   std::span<std::int32_t> labels) {
    return load(epoch, step, images, labels);
  }

 private:
  /// Cut and reflection of one sample in one epoch: its window starts at (top, left) of the image without
  /// padding. Both are negative if the window starts in the padding.
  struct window {
    index_t top = 0;
    index_t left = 0;
    bool flipped = false;
  };

  // Draws the window of a sample in an epoch. Without pad_crop it is the whole image.
  window draw_window(index_t epoch, index_t sample) const {
    const random_stream random = augmentation_stream(epoch);
    const auto number = 3 * static_cast<std::uint64_t>(sample);
    const index_t pad = options().augment.pad_crop;
    const auto positions = static_cast<std::uint64_t>(2 * pad + 1);
    window result;
    result.top = static_cast<index_t>(random.below(number, positions)) - pad;
    result.left = static_cast<index_t>(random.below(number + 1, positions)) - pad;
    result.flipped = options().augment.flip && random.below(number + 2, 2) == 1;
    return result;
  }

  // Writes one normalized sample (height x width x channels) to `to`.
  template <class T>
  void write_image(index_t epoch, index_t sample, T* to) const {
    const window cut = draw_window(epoch, sample);
    const index_t height = set_->height, width = set_->width, channels = set_->channels;
    const std::uint8_t* const image = set_->pixels.data() + sample * height * width * channels;
    for (index_t y = 0; y < height; ++y) {
      const index_t source_y = source_position(cut.top + y, height);
      for (index_t x = 0; x < width; ++x, to += channels) {
        const index_t source_x = source_position(cut.left + (cut.flipped ? width - 1 - x : x), width);
        const bool outside = source_y < 0 || source_x < 0;
        const std::uint8_t* const pixel =
            outside ? nullptr : image + (source_y * width + source_x) * channels;
        for (index_t c = 0; c < channels; ++c) {
          const index_t value = outside ? 0 : pixel[c];
          to[c] = static_cast<T>(table_[static_cast<std::size_t>(256 * c + value)]);
        }
      }
    }
  }

  /// Position in the unpadded image that a position of the padded image shows, or -1 for a zero pixel.
  index_t source_position(index_t position, index_t length) const {
    if (position >= 0 && position < length) return position;
    return options().augment.reflect ? detail::reflected(position, length) : -1;
  }

  // The extents of a valid set, N x height x width x channels.
  static extents<4> checked_extents(const image_set& set) {
    detail::check_image_set(set, "loader");
    return {set.count, set.height, set.width, set.channels};
  }

  // Throws value_error for augmentations that images of one size do not have.
  void check_augmentation() const {
    const loader_options& o = options();
    const index_t pad = o.augment.pad_crop;
    if (pad < 0 || (o.augment.reflect && pad >= std::min(set_->height, set_->width))) {
      detail::throw_error<value_error>({"loader: cannot pad images of ", set_->height, " x ", set_->width,
                                        " pixels by ", pad,
                                        o.augment.reflect ? " reflected pixels" : " pixels"});
    }
    if (o.augment.smallest_area != 1.0) {
      detail::throw_error<value_error>({"loader: images of one size are cut by pad_crop; smallest_area is ",
                                        detail::shortest_number(o.augment.smallest_area), ", not 1"});
    }
  }

  const image_set* set_;      // not owned
  std::vector<float> table_;  // of normalized values
};

PUFFERFISH_NAMESPACE_END
