// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: how the images of a batch are cut into the tasks of a convolution. The cut depends on shapes
/// alone, so that results do not depend on the number of threads.

#include <algorithm>

#include <pufferfish/core/function_ref.hpp>
#include <pufferfish/ops/conv/tap_axis.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// The cut of a batch into tasks: each task computes a group of whole images or, where images are large, a
/// band of output lines. Images and lines are those of the output.
struct image_tasks {
  index_t images, lines;  ///< images of the batch, lines of an image
  index_t group, band;    ///< most images of a task, most lines of a task
  /// Chooses tasks of at least about 256 pixels; with a large weight, of at least one pixel for each KiB of
  /// weight, up to a quarter of the batch. An image of up to 1024 pixels is not cut if the batch has eight
  /// images or more. `line_pixels`: pixels of a line; `weight_bytes`: bytes of weight that each task reads.
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
  /// Number of bands of an image.
  index_t bands() const { return (lines + band - 1) / band; }
  /// Number of tasks.
  index_t count() const { return (images + group - 1) / group * bands(); }
  /// The images of a task.
  range image_range(index_t task) const {
    const index_t first = task / bands() * group;
    return {first, std::min(images, first + group)};
  }
  /// The lines of each image that a task computes.
  range line_range(index_t task) const {
    const index_t first = task % bands() * band;
    return {first, std::min(lines, first + band)};
  }
};

/// What a task calls when it has computed result pixels first .. first + count - 1, numbered through the
/// batch: after(task, first, count). Several tasks may call it at the same time.
using task_end = function_ref<void(index_t task, index_t first, index_t count)>;
inline constexpr auto nothing_after = [](index_t, index_t, index_t) {};

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
