// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `image_set`: labelled images in memory, from any source (io/dataset.hpp reads files).

#include <cstdint>
#include <vector>

#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// `count` images and their labels. The loaders of io/dataset.hpp guarantee three conditions: `pixels` has
/// count * height * width * channels values, `labels` has `count` values, and each label is at least 0 and
/// less than classes. Pixel (y, x), channel c of image n is pixels[((n height + y) width + x) channels + c].
/// Classes that read a set check these conditions (loader, measure_normalization) or rely on them.
/// \code
///   image_set set{2, 1, 1, 3, 10, {255, 0, 0, 0, 255, 0}, {7, 4}};  // two images of one pixel
/// \endcode
struct image_set {
  index_t count = 0;                 ///< number of images
  index_t height = 0;                ///< rows of an image, in pixels
  index_t width = 0;                 ///< columns of an image, in pixels
  index_t channels = 0;              ///< values of a pixel: 1 for gray images, 3 for red, green and blue
  index_t classes = 0;               ///< number of classes
  std::vector<std::uint8_t> pixels;  ///< NHWC, as stored in the file: not scaled
  std::vector<std::int32_t> labels;  ///< class of each image
};

PUFFERFISH_NAMESPACE_END
