// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: how the images of a batch are cut into the tasks of a convolution. The cut depends on shapes
/// alone, so that results do not depend on the number of threads.

#include <algorithm>

#include <pufferfish/ops/conv/tap_axis.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// How a correlation is cut into tasks: groups of images, or bands of lines where an image is large.
struct image_tasks {
  index_t images, lines;  ///< images of the batch, lines of an image
  index_t group, band;    ///< images and lines of a task
  /// `line_pixels`: pixels of a line; `weight_bytes`: what a task reads besides its pixels. A task has about
  /// 256 pixels or more; images of up to 1024 pixels are not cut if there are at least 8.
  image_tasks(index_t image_count, index_t line_count, index_t line_pixels, index_t weight_bytes)
      : images(image_count), lines(line_count) {
    // Each task reads the whole weight, so a large weight needs more pixels in a task.
    constexpr index_t fewest = 256, many = 1024;
    const index_t quarter = image_count * line_count * line_pixels / 4;
    const index_t few = std::clamp<index_t>(weight_bytes / 1024, fewest, std::max(fewest, quarter));
    const index_t pixels = std::max<index_t>(1, line_count * line_pixels);
    group = std::clamp<index_t>(few / pixels, 1, std::max<index_t>(1, image_count));
    const bool whole = pixels <= many && image_count >= 8;
    band = whole ? line_count : (few + line_pixels - 1) / std::max<index_t>(1, line_pixels);
    band = std::clamp<index_t>(band, 1, std::max<index_t>(1, line_count));
  }
  index_t bands() const { return (lines + band - 1) / band; }
  index_t count() const { return (images + group - 1) / group * bands(); }
  range image_range(index_t task) const {
    const index_t first = task / bands() * group;
    return {first, std::min(images, first + group)};
  }
  range line_range(index_t task) const {
    const index_t first = task % bands() * band;
    return {first, std::min(lines, first + band)};
  }
};

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
