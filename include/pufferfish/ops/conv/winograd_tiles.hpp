// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the tiles of a convolution by Winograd's algorithm (winograd.hpp): their positions, and the
/// addresses of their pixels.

#include <algorithm>

#include <pufferfish/linalg/gemm/loops.hpp>
#include <pufferfish/ops/conv/conv_shape.hpp>
#include <pufferfish/ops/conv/tap_axis.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// The 4 x 4 tiles that cover the outputs of a batch of images, numbered image by image and row by row. Tiles
/// at the lower and right edges may extend beyond the image.
struct winograd_tiles {
  static constexpr index_t edge = 4, points = 36;
  /// A transform prefetches the pixels of the tile that it will reach after this number of tiles.
  static constexpr index_t ahead = 4;

  index_t images, height, width;  ///< images and extents of the output
  index_t rows, columns;          ///< tiles of an image, down and across

  winograd_tiles(index_t count, index_t h, index_t w)
      : images(count), height(h), width(w), rows((h + edge - 1) / edge), columns((w + edge - 1) / edge) {}
  /// Number of tiles of an image.
  index_t of_image() const { return rows * columns; }
  /// Number of tiles of the batch.
  index_t count() const { return images * of_image(); }

  /// Position of a tile: its image, and the line and column of its first pixel.
  struct place {
    index_t image, line, column;
  };
  /// The position of tile number `tile`.
  place operator[](index_t tile) const {
    const index_t in_image = tile % of_image();
    return {tile / of_image(), in_image / columns * edge, in_image % columns * edge};
  }
  /// Position of the first of the 6 x 6 input pixels of tile number `tile`; negative in the padding.
  place inputs(index_t tile, const size2& padding) const {
    place at = (*this)[tile];
    at.line -= padding.height;
    at.column -= padding.width;
    return at;
  }
};

/// Writes to pixels[i] the address of pixel i, channel `channel`, of the square of Edge x Edge pixels that
/// begins at position `at` of dense NHWC images with extents `shape`; nullptr outside the image.
template <index_t Edge, class T>
void point_at_square(T* data, const extents<4>& shape, const winograd_tiles::place& at, index_t channel,
                     T** pixels) {
  T* const image = data + at.image * shape[1] * shape[2] * shape[3] + channel;
  for (index_t y = at.line; y < at.line + Edge; ++y) {
    for (index_t x = at.column; x < at.column + Edge; ++x, ++pixels) {
      const bool real = y >= 0 && y < shape[1] && x >= 0 && x < shape[2];
      *pixels = real ? image + (y * shape[2] + x) * shape[3] : nullptr;
    }
  }
}

/// Prefetches channels of the pixels that a tile adds to those of the tiles before it: the square of
/// Edge x Edge pixels at position `at` without its first Edge - 4 lines and columns, which the tiles above
/// and on the left have read, unless the tile is the first one of its column or row.
template <index_t Edge, class T>
void prefetch_square(T* data, const extents<4>& shape, const winograd_tiles::place& at,
                     const range& channels) {
  constexpr index_t shared = Edge - winograd_tiles::edge;
  const auto added = [](index_t first, index_t extent) {
    return range{first <= 0 ? 0 : std::min(first + shared, extent), std::min(first + Edge, extent)};
  };
  const range lines = added(at.line, shape[1]), columns = added(at.column, shape[2]);
  for (index_t line = lines.begin; line < lines.end; ++line) {
    const index_t pixel = (at.image * shape[1] + line) * shape[2] + columns.begin;
    pufferfish::detail::prefetch_block(data + pixel * shape[3] + channels.begin, shape[3], columns.length(),
                                       channels.length());
  }
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
