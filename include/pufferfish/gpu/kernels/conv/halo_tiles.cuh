// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: copies blocks of 8 x 8 pixels, with the border that a 3 x 3 kernel reads, to shared memory.
///
/// A tile consists of planes of 8 channels. In a plane, each pixel has 16 bytes, line by line. Any 8
/// consecutive pixels of a line are therefore a block of 8 x 8 numbers as products of warp groups read it
/// (warpgroup.cuh). The operand of another tap begins at another pixel of the same tile, so each pixel is
/// copied once for all taps.
///
/// Copies pass through the L1 cache. If they bypassed the cache, every 16 bytes would be a request of their
/// own, because channels that are adjacent in device memory are not adjacent in shared memory. On an H100,
/// copies that bypassed the L1 cache transferred twice as many bytes between the caches, in four times as
/// many requests.

#include <pufferfish/gpu/kernels/conv/conv_axis.hpp>
#include <pufferfish/gpu/kernels/conv/halo_plan.hpp>
#include <pufferfish/gpu/kernels/gemm/async_copy.cuh>
#include <pufferfish/gpu/kernels/gemm/warpgroup.cuh>
#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Position of a block of pixels: its image, and the line and column of its first pixel.
struct pixel_block {
  int image, y, x;
};

/// Numbers the blocks of 8 x 8 pixels that cover images: `down` x `over` blocks for each image, line by line.
/// Blocks at the lower and right edges may contain pixels outside of the image. `blocks`: the number of
/// blocks of all images, which must be below 2^31.
struct block_grid {
  int blocks;
  divider by_down, by_over;

  /// The grid for `images` images of height x width pixels.
  static block_grid of(index_t images, int height, int width) {
    const int down = ceil_div(height, plans::halo_side), over = ceil_div(width, plans::halo_side);
    return {static_cast<int>(images * (static_cast<index_t>(down) * over)), divider::by(down),
            divider::by(over)};
  }

  /// Position of block number `block`, 0 <= block < blocks.
  __device__ pixel_block at(int block) const {
    const int lines = by_over.quotient(block), image = by_down.quotient(lines);
    return {image, by_down.remainder(lines, image) * plans::halo_side,
            by_over.remainder(block, lines) * plans::halo_side};
  }
};

/// Copies tiles of Side x Side pixels of dense NHWC images, `Channels` channels each, to shared memory, by
/// `Threads` threads. Pixels outside of the image become zeros. T has 16 bits; Channels: 16, 32 or 64.
///
/// \code
/// pixel_tiles<T, 10, 32, 128> tiles(images, height, width, channels, thread);
/// tiles.find(image, y, x, true);
/// tiles.copy(tile, channel);  // starts the copies; commit_copies and wait_for_copies follow
/// \endcode
template <class T, int Side, int Channels, int Threads>
class pixel_tiles {
 public:
  /// Number of pixels and of planes of a tile.
  static constexpr int pixels = Side * Side, planes = Channels / 8;
  /// Number of bytes from a plane to the next one. The padding after a plane lets the threads of a quarter of
  /// a warp, which write adjacent channels and pixels at the same time, use different banks of shared memory.
  static constexpr int plane = pixels * 16 +
                               (planes == 2   ? 64
                                : planes == 4 ? 32
                                              : 16) -
                               pixels * 16 %
                                   (planes == 2   ? 128
                                    : planes == 4 ? 64
                                                  : 32);
  /// Number of bytes of a tile.
  static constexpr int bytes = planes * plane;

  /// images: address of the first image; each has height x width pixels of `channels` channels. `thread`:
  /// index of the calling thread, 0 .. Threads - 1.
  __device__ pixel_tiles(const T* images, int height, int width, int channels, int thread)
      : images_(images), height_(height), width_(width), channels_(channels) {
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      const int at = thread + i * Threads, pixel = at / planes;
      places_[i] = pixel / Side << 16 | pixel % Side << 8 | at % planes;
    }
    last_ = thread + (copies - 1) * Threads < pixels * planes;
  }

  /// Chooses the pixels that copy() copies: those of image number `image` from line y and column x on, both
  /// of which may be negative. With `exists` false, all pixels become zeros.
  __device__ void find(int image, int y, int x, bool exists) {
    first_ = images_ + ((static_cast<index_t>(image) * height_ + y) * width_ + x) * channels_;
    inside_ = 0;
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      const bool inside = static_cast<unsigned>(y + (places_[i] >> 16)) < static_cast<unsigned>(height_) &&
                          static_cast<unsigned>(x + (places_[i] >> 8 & 255)) < static_cast<unsigned>(width_);
      inside_ |= (inside && exists ? 1U : 0U) << i;
    }
  }

  /// Starts copies (copy_async) of the channels channel .. channel + Channels - 1 of the chosen pixels to
  /// `tile`, which has `bytes` bytes and is aligned to 16 bytes. All threads must call this function.
  __device__ void copy(unsigned char* tile, int channel) const {
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      const int y = places_[i] >> 16, x = places_[i] >> 8 & 255, number = places_[i] & 255;
      if (i == copies - 1 && !last_) break;
      copy_async<16, true>(tile + number * plane + (y * Side + x) * 16,
                           first_ + (y * width_ + x) * channels_ + channel + number * 8,
                           (inside_ >> i & 1U) != 0);
    }
  }

 private:
  // Number of copies that each thread starts for a tile; threads with high numbers may start one less.
  static constexpr int copies = ceil_div(pixels * planes, Threads);

  const T* images_;
  const T* first_ = nullptr;
  int height_, width_, channels_;
  array_of<int, copies> places_;  // line, column and plane of each copy of the thread
  unsigned inside_ = 0;           // bit i: whether the pixel of copy i is in the image
  bool last_;                     // whether the thread has a last copy, too
};

PUFFERFISH_KERNELS_END
