// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: tiles of a depthwise 3x3 convolution: which pixels each result of a tile depends on, the
/// arguments of the kernels that compute tiles, and the positions of tiles in the images.

#include <algorithm>
#include <utility>

#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/ops/conv/tap_axis.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// A tile of 2 x 4 results of a forward 3x3 convolution with stride `Stride`, and the pixels that the results
/// depend on. cell(at, result) returns the kernel element that multiplies pixel `at` of the tile for result
/// number `result`, or -1 if the result does not depend on the pixel. Pixels, results and kernel elements are
/// numbered row by row.
///
/// next_rows, next_columns: size of the block of pixels that the tile below reads and that neither this tile
/// nor the left neighbour of the tile below reads. A kernel prefetches this block.
template <index_t Stride>
struct depthwise_forward_taps {
  static constexpr index_t result_rows = 2, result_columns = 4;
  static constexpr index_t pixel_rows = Stride + 3, pixel_columns = 3 * Stride + 3;
  static constexpr index_t results = result_rows * result_columns, pixels = pixel_rows * pixel_columns;
  static constexpr index_t next_rows = 2 * Stride, next_columns = 4 * Stride;
  static constexpr index_t next_pixels = next_rows * next_columns;

  static constexpr index_t cell(index_t at, index_t result) {
    const index_t row = at / pixel_columns - result / result_columns * Stride;
    const index_t column = at % pixel_columns - result % result_columns * Stride;
    return row < 0 || row > 2 || column < 0 || column > 2 ? -1 : 3 * row + column;
  }
};

/// A tile of 2 x 4 results of the gradient of the input for stride 2: the "pixels" are gradients of the
/// output, the results are gradients of the input. Members as in depthwise_forward_taps. On each axis,
/// results 2 m and 2 m + 1, counted from minus the padding, depend on gradients m - 1 and m: the even result
/// through kernel elements 2 and 0, the odd result through kernel element 1 of gradient m only.
struct depthwise_backward2_taps {
  static constexpr index_t result_rows = 2, result_columns = 4;
  static constexpr index_t pixel_rows = 2, pixel_columns = 3;
  static constexpr index_t results = result_rows * result_columns, pixels = pixel_rows * pixel_columns;
  static constexpr index_t next_rows = 1, next_columns = 2, next_pixels = next_rows * next_columns;

  /// One axis of cell(): the kernel element that multiplies gradient `at` for result `result`, or -1 if there
  /// is none.
  static constexpr index_t element(index_t at, index_t result) {
    const index_t behind = result / 2 + 1 - at;  // 0: gradient m, 1: gradient m - 1
    if (behind < 0 || behind > 1) return -1;
    return result % 2 == 0 ? 2 * behind : behind == 0 ? 1 : -1;
  }
  static constexpr index_t cell(index_t at, index_t result) {
    const index_t row = element(at / pixel_columns, result / result_columns);
    const index_t column = element(at % pixel_columns, result % result_columns);
    return row < 0 || column < 0 ? -1 : 3 * row + column;
  }
};

/// A block of pixels that a kernel prefetches: its first element, and the row stride of the images in
/// elements.
template <class T>
struct depthwise_fetch {
  const T* from;
  index_t line;
};

/// Arguments of the kernel that computes one tile of results. Pointers to pixels outside the images point to
/// a row of zeros, pointers to such results to an unused row.
template <class T>
struct depthwise_tile {
  const T* const* pixels;  ///< one pointer for each pixel of the tile
  const T* weight;         ///< [9][channels]
  const T* bias;           ///< `channels` elements, or nullptr for no bias
  T* const* results;       ///< one pointer for each result of the tile
  index_t channels;
  bool add;                  ///< add to the old results instead of overwriting them
  bool stream;               ///< write results past the caches (see streams_past_cache)
  depthwise_fetch<T> fetch;  ///< pixels to prefetch
};

/// Arguments of the kernel that adds the contribution of one tile to the gradient of a weight. Pointers to
/// pixels and gradients outside the images point to a row of zeros.
template <class T>
struct depthwise_gradient_tile {
  const T* const* pixels;     ///< one pointer for each pixel of the tile
  const T* const* gradients;  ///< one pointer for each result of the tile
  T* sums;                    ///< [9][channels], added to
  index_t channels;
  depthwise_fetch<T> fetch, fetch_gradients;  ///< pixels and gradients to prefetch
};

/// A tap of a result pixel: an input pixel and the weights that multiply its channels, `channels` elements
/// each.
template <class T>
struct depthwise_tap {
  const T* pixel;
  const T* weight;
};

#define PUFFERFISH_KERNELS depthwise_kernels
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/conv/depthwise_conv.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// One axis of a grid of tiles: number of tiles, and positions of the first result and of the first pixel of
/// each tile. Positions may be outside the image.
struct depthwise_axis {
  index_t tiles, result_first, result_step, pixel_first, pixel_step;

  /// Positions of the first result and of the first pixel of a tile.
  index_t result(index_t tile) const { return result_first + tile * result_step; }
  index_t pixel(index_t tile) const { return pixel_first + tile * pixel_step; }

  /// Number of results inside an image of `length` that the tiles before tile number `tile` compute.
  index_t results_before(index_t tile, index_t length) const {
    return std::clamp<index_t>(result(tile), 0, length);
  }
};

/// Tiles of `in_tile` results that cover all outputs of an axis of a forward pass. Results of the last tile
/// may be outside the image.
inline depthwise_axis depthwise_forward_axis(index_t outputs, index_t in_tile, index_t stride,
                                             index_t padding) {
  return {(outputs + in_tile - 1) / in_tile, 0, in_tile, -padding, in_tile * stride};
}

/// Tiles of `in_tile` results that cover one axis of the gradient of the input. For stride 1 this is the axis
/// of a forward pass with the flipped kernel. For stride 2 a tile consists of pairs of inputs, the first of
/// which begins at -padding; pairs without an input inside the image are left out.
inline depthwise_axis depthwise_backward_axis(index_t inputs, index_t in_tile, index_t stride,
                                              index_t padding) {
  if (stride == 1) return depthwise_forward_axis(inputs, in_tile, 1, 2 - padding);
  const index_t first = padding / 2, end = (inputs - 1 + padding) / 2 + 1, pairs = in_tile / 2;
  return {(end - first + pairs - 1) / pairs, 2 * first - padding, in_tile, first - 1, pairs};
}

/// list[i] = address of pixel i of a block of rows x columns pixels, which begins at (row, column) of image
/// number `image` of NHWC images with extents `shape`. Pixels outside the image have the address `outside`.
template <class T>
void point_at_block(T* images, const extents<4>& shape, index_t image, index_t row, index_t column,
                    index_t rows, index_t columns, T* outside, T** list) {
  const index_t line = shape[2] * shape[3];
  index_t first = (image * shape[1] + row) * line + column * shape[3];
  const bool inside = row >= 0 && column >= 0 && row + rows <= shape[1] && column + columns <= shape[2];
  for (index_t r = 0; r < rows; ++r, first += line) {
    for (index_t c = 0; c < columns; ++c) {
      const bool there =
          inside || (row + r >= 0 && row + r < shape[1] && column + c >= 0 && column + c < shape[2]);
      *list++ = there ? images + (first + c * shape[3]) : outside;
    }
  }
}

/// The block to prefetch for the next row of tiles: begins at the given row and column of an image. Rows
/// below the image belong to the next image of the batch, which is read next. After the last image the
/// address is clamped to the last element, and the prefetch has no use.
template <class T>
depthwise_fetch<T> fetch_below(const tensor_view<const T, 4>& images, index_t image, index_t row,
                               index_t column) {
  const index_t channels = images.extent(3), line = images.extent(2) * channels;
  const index_t at = (image * images.extent(1) + row) * line + column * channels;
  return {images.data() + std::clamp<index_t>(at, 0, std::max<index_t>(images.size() - 1, 0)), line};
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
