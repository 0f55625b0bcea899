// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Windows of images of any size, and their scaling to the size of a batch.
/// Source of the windows: Szegedy et al., Going deeper with convolutions, CVPR 2015, section 6.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A rectangle of an image, in pixels from its upper left corner. Sides may end within a pixel.
struct image_window {
  /// Distances of the upper and left side, then the lengths of the sides.
  double top = 0.0;
  double left = 0.0;
  double height = 0.0;
  double width = 0.0;
  bool flipped = false;  ///< whether the result is mirrored left to right
};

/// A square in the middle of a height x width image, with `share` (in (0, 1]) of its shorter side: scaling it
/// to n x n pixels equals scaling the image's shorter side to n / share and cutting n x n pixels from the
/// middle.
inline image_window central_window(index_t height, index_t width, double share) {
  const double side = share * static_cast<double>(std::min(height, width));
  return {(static_cast<double>(height) - side) / 2, (static_cast<double>(width) - side) / 2, side, side};
}

/// Draws a random window of whole pixels. Its share of the area is uniform in [smallest_area, 1], the
/// logarithm of width / height uniform in [log 3/4, log 4/3]; windows that do not fit are drawn again. After
/// ten failed draws, the result is the largest window in the middle with an allowed ratio of the sides. With
/// `flip` it is mirrored with probability 1/2. Uses the random numbers 64 sample .. 64 sample + 63.
/// smallest_area is in (0, 1].
inline image_window random_window(index_t height, index_t width, double smallest_area, bool flip,
                                  const random_stream& random, index_t sample) {
  const std::uint64_t first = 64 * static_cast<std::uint64_t>(sample);
  const double widest = 4.0 / 3.0;
  const auto h = static_cast<double>(height), w = static_cast<double>(width);
  image_window cut;
  cut.flipped = flip && random.below(first + 63, 2) == 1;
  for (std::uint64_t draw = 0; draw < 10; ++draw) {
    const std::uint64_t number = first + 4 * draw;
    const double area = h * w * (smallest_area + (1.0 - smallest_area) * random.uniform(number));
    const double ratio = std::exp(std::log(widest) * (2.0 * random.uniform(number + 1) - 1.0));
    cut.width = std::round(std::sqrt(area * ratio));
    cut.height = std::round(std::sqrt(area / ratio));
    if (cut.width < 1.0 || cut.height < 1.0 || cut.width > w || cut.height > h) continue;
    cut.top = std::floor(random.uniform(number + 2) * (h - cut.height + 1.0));
    cut.left = std::floor(random.uniform(number + 3) * (w - cut.width + 1.0));
    return cut;
  }
  cut.width = std::min(w, std::max(1.0, std::round(h * widest)));
  cut.height = std::min(h, std::max(1.0, std::round(w * widest)));
  cut.top = std::floor((h - cut.height) / 2);
  cut.left = std::floor((w - cut.width) / 2);
  return cut;
}

namespace detail {

/// The pixels, and their weights, of which each of n positions along an axis is the weighted mean.
struct axis_filter {
  /// The pixels of one position: first .. first + count - 1.
  struct range {
    index_t first = 0;
    index_t count = 0;
    std::size_t weights = 0;  ///< index, in `weights`, of the first pixel's weight
  };
  std::vector<range> ranges;   ///< of each position
  std::vector<float> weights;  ///< of all ranges, one after the other
};

/// Fills `filter` with triangles of half width max(1, length / n) around the centre of each of n equal parts
/// of the interval [start, start + length), cut off at the ends of an axis of `pixels` pixels; weights have
/// the sum 1. With `reversed` the positions are in reverse order, for a mirrored image.
inline void fill_filter(axis_filter& filter, double start, double length, index_t n, index_t pixels,
                        bool reversed) {
  const double step = length / static_cast<double>(n), reach = std::max(1.0, step);
  filter.ranges.clear();
  filter.weights.clear();
  for (index_t i = 0; i < n; ++i) {
    const double centre = start + (static_cast<double>(reversed ? n - 1 - i : i) + 0.5) * step;
    const auto first =
        std::clamp<index_t>(static_cast<index_t>(std::floor(centre - reach + 0.5)), 0, pixels - 1);
    const auto last =
        std::clamp<index_t>(static_cast<index_t>(std::floor(centre + reach + 0.5)), first + 1, pixels);
    const axis_filter::range range{first, last - first, filter.weights.size()};
    double sum = 0.0;
    for (index_t p = first; p < last; ++p) {
      const double weight = std::max(0.0, 1.0 - std::abs(static_cast<double>(p) + 0.5 - centre) / reach);
      filter.weights.push_back(static_cast<float>(weight));
      sum += weight;
    }
    for (index_t p = 0; p < range.count; ++p) {
      float& weight = filter.weights[range.weights + static_cast<std::size_t>(p)];
      weight = sum > 0.0 ? static_cast<float>(weight / sum) : 1.0F / static_cast<float>(range.count);
    }
    filter.ranges.push_back(range);
  }
}

}  // namespace detail

/// Scales windows of 8-bit RGB images. Its memory is reused by the next call. One thread at a time may use an
/// object.
///
///     window_scaler scaler;
///     const image_window middle = central_window(480, 640, 0.875);      // of a 480 x 640 image
///     std::vector<std::uint8_t> small(224 * 224 * 3);
///     scaler.run(pixels, 480, 640, middle, 224, 224, small.data());
class window_scaler {
 public:
  /// Scales a window to height x width x 3 values at `to`, by a triangle filter along each axis whose half
  /// width is one pixel of the larger of source and result: bilinear where it enlarges, an average over all
  /// pixels where it reduces. `pixels`: source_height x source_width x 3, dense; not overlapping `to`. The
  /// window is within the image. Results are rounded to the nearest whole value.
  void run(std::span<const std::uint8_t> pixels, index_t source_height, index_t source_width,
           const image_window& window, index_t height, index_t width, std::uint8_t* to) {
    detail::fill_filter(rows_, window.top, window.height, height, source_height, false);
    detail::fill_filter(columns_, window.left, window.width, width, source_width, window.flipped);
    const auto [left, right] = columns_used();
    line_.resize(static_cast<std::size_t>(3 * (right - left)));
    for (index_t y = 0; y < height; ++y) {
      average_rows(pixels, source_width, rows_.ranges[static_cast<std::size_t>(y)], left);
      for (index_t x = 0; x < width; ++x, to += 3)
        average_columns(columns_.ranges[static_cast<std::size_t>(x)], left, to);
    }
  }

 private:
  // First and end of the columns that some position uses; other columns are not averaged.
  std::pair<index_t, index_t> columns_used() const {
    index_t left = columns_.ranges.front().first, right = 0;
    for (const auto& range : columns_.ranges) {
      left = std::min(left, range.first);
      right = std::max(right, range.first + range.count);
    }
    return {left, right};
  }

  // Sets line_ to the weighted mean of the rows of a range, from column `left` on.
  void average_rows(std::span<const std::uint8_t> pixels, index_t source_width,
                    const detail::axis_filter::range& range, index_t left) {
    std::fill(line_.begin(), line_.end(), 0.0F);
    for (index_t i = 0; i < range.count; ++i) {
      const float weight = rows_.weights[range.weights + static_cast<std::size_t>(i)];
      const std::uint8_t* const row = pixels.data() + 3 * ((range.first + i) * source_width + left);
      float* const line = line_.data();
      for (std::size_t p = 0; p < line_.size(); ++p) line[p] += weight * static_cast<float>(row[p]);
    }
  }

  // Writes the weighted mean of the columns of a range to `to`, for each color, rounded to the nearest whole
  // value.
  void average_columns(const detail::axis_filter::range& range, index_t left, std::uint8_t* to) const {
    float sum[3] = {0.5F, 0.5F, 0.5F};
    const float* const line = line_.data() + 3 * (range.first - left);
    for (index_t i = 0; i < range.count; ++i) {
      const float weight = columns_.weights[range.weights + static_cast<std::size_t>(i)];
      for (index_t c = 0; c < 3; ++c) sum[c] += weight * line[3 * i + c];
    }
    for (index_t c = 0; c < 3; ++c) to[c] = static_cast<std::uint8_t>(std::clamp(sum[c], 0.0F, 255.0F));
  }

  detail::axis_filter rows_, columns_;
  std::vector<float> line_;  // means of the rows of one position, all columns in use
};

PUFFERFISH_NAMESPACE_END
