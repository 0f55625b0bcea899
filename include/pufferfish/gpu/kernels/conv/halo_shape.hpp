// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// How warp groups cut a convolution into blocks of pixels, and the order of a block's pixels in shared
/// memory. Plain C++, for host compilers and for CUDA.

#include <pufferfish/gpu/kernels/conv/conv_axis.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

// Functions of these structs are always inlined: see conv_axis.hpp.

/// A pixel of a block: its image, line and column.
struct block_pixel {
  int image, y, x;
};

/// Number of images, of lines and of pixels in a line from a block's first pixel to the end of the tensor.
/// They may be larger than the block, or not positive.
struct block_extent {
  int images, height, width;
  /// Whether a pixel of the block exists.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr bool contains(const block_pixel& at) const {
    return at.image < images && at.y < height && at.x < width;
  }
};

/// The pixels of a tile in a plane of shared memory, 16 bytes (8 channels) each. A tile holds the inputs of a
/// block of `side` x `side` results in each of images() images, which are 64 results. Results are numbered
/// such that every 8 results, one after another, read 8 adjacent pixels of the tile for any tap, and so that
/// each 8 results begin core() bytes after the 8 results before. So the inputs of a tap are the left operand
/// of a product of warp groups (warpgroup.cuh), and the taps differ only in the operand's first address.
///
/// For that, a line of a tile has the pixels of the even columns first if the convolution has stride 2, then
/// those of the odd columns; and likewise the lines of a tile. Blocks of 4 x 4 pixels interleave four images:
/// the pixels of images 0 and 1 (or 2 and 3) alternate in a line, and lines of the two pairs alternate.
struct block_layout {
  int side;    ///< 8 or 4
  int patch;   ///< number of lines and columns of each image in the tile
  int step;    ///< number of lines and columns from the inputs of a result to those of the next one: 1 or 2
  int border;  ///< if side is 4: number of lines and columns of the tile before the image
  int apart;   ///< number of lines and columns of an image from a pixel of the tile to the next one

  /// Number of images that alternate in a line, and number of such sets of images.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr int sets() const { return 8 / side; }
  /// Number of images of a tile.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr int images() const { return sets() * sets(); }
  /// If `step` is 2, number of even lines and columns of the tile, which precede the odd ones.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr int half() const {
    return (patch + step - 1) / step;
  }
  /// Number of bytes before a pixel of the tile.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr int place(const block_pixel& at) const {
    const int line = (at.y % step * half() + at.y / step) * sets() + at.image / sets();
    return ((line * patch + at.x % step * half() + at.x / step) * sets() + at.image % sets()) * 16;
  }
  /// Number of bytes from the inputs of 8 results to those of the next 8 results.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr int core() const { return patch * sets() * 16; }
  /// The result in row `row` of the product, 0 <= row < 64.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr block_pixel result(int row) const {
    const int eight = row / 8, one = row % 8;
    return {eight % sets() * sets() + one % sets(), eight / sets(), one / sets()};
  }

  /// The tile's first pixel, for a block that begins at `result` and whose first tap reads (-top, -left) for
  /// the result (0, 0).
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr block_pixel origin(const block_pixel& result,
                                                                               int top, int left) const {
    return {result.image, result.y * step * apart - top, result.x * step * apart - left};
  }

  /// First line and column that is copied from each image, and their number. Of blocks of 4 x 4 pixels, which
  /// are whole images, only the image is copied: its border in the tile remains zero.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr int first() const {
    return side == 8 ? 0 : border;
  }
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr int copied() const {
    return side == 8 ? patch : side * step;
  }
  /// Number of pixels that are copied.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr int pixels() const {
    return copied() * copied() * images();
  }
  /// Pixel number `number` of those that are copied, in about the order of their places in the tile.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr block_pixel pixel(int number) const {
    const int lane = number % sets(), in_line = number / sets(), lines = in_line / copied();
    const auto ordered = [&](int at) {
      const int part = (copied() + step - 1) / step;
      return first() + at % part * step + at / part;
    };
    return {lines % sets() * sets() + lane, ordered(lines / sets()), ordered(in_line % copied())};
  }

  /// Number of bytes from a plane to the next one, of `channels` channels. The padding after a plane lets the
  /// threads of a quarter of a warp, which write adjacent channels and pixels at the same time, use different
  /// banks of shared memory.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr int plane(int channels) const {
    const int size = patch * patch * images() * 16, part = 1024 / channels;
    return size + (3 * part - size % (2 * part)) % (2 * part);
  }
  /// Number of bytes of a tile with 16, 32 or 64 channels.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr int bytes(int channels) const {
    return channels / 8 * plane(channels);
  }
};

/// A kind of convolution by warp groups: with 3 x 3 taps and stride 1 or 2, or with one tap and stride 2.
struct halo_shape {
  int side = 8;           ///< lines and columns of a block of results: 8 or 4
  int stride = 1;         ///< of the convolution, in both directions: 1 or 2
  bool backward = false;  ///< whether it is the gradient of the input
  int kernel = 3;         ///< number of taps in both directions: 3 or 1

  /// Number of all taps.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr int taps() const { return kernel * kernel; }
  /// Whether a block has results for four phases of the input's pixels: those of even or odd lines and even
  /// or odd columns. All four read the same block of output gradients.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr bool has_phases() const {
    return backward && stride == 2;
  }
  /// Number of blocks of 64 results that are computed from a tile. With one tap, the other phases are zero.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr int results() const {
    return has_phases() && kernel == 3 ? 4 : 1;
  }
  /// Number of lines and columns from a result of a block to the next one.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr int spacing() const {
    return has_phases() ? 2 : 1;
  }
  /// Whether the kernels can collect moments or, as a gradient of the input, sums for a batch norm. The
  /// kernels of gradients with phases have no registers left for these sums.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr bool collects() const { return !has_phases(); }
  /// The pixels that a block of results reads.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr block_layout inputs() const {
    if (kernel == 1) return {side, side, 1, 0, backward ? 1 : stride};
    const int step = backward ? 1 : stride;
    return {side, has_phases() ? side + 1 : side * step + 3 - step, step, has_phases() ? 0 : 1, 1};
  }
  /// The results of a block, without a border.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr block_layout outputs() const {
    return {side, side, 1, 0, 1};
  }
  /// The result that tap `tap` = 0 .. taps() - 1 adds to. Taps are numbered by increasing positions of their
  /// inputs.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr int result_of(int tap) const {
    return results() == 4 ? (tap / 3 + 1) % 2 * 2 + (tap % 3 + 1) % 2 : 0;
  }
  /// Number of bytes before the input of tap `tap` for the first result.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE constexpr int place_of(int tap) const {
    return inputs().place({0, tap / 3 / spacing(), tap % 3 / spacing()});
  }
};

PUFFERFISH_KERNEL_TYPES_END
