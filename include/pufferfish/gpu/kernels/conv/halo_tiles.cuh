// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: copies blocks of 8 x 8 pixels, with the border that a 3 x 3 kernel reads, to shared memory.
///
/// A tile has planes of 8 channels. In a plane each pixel has 16 bytes, line by line. So 8 pixels of a line
/// are a block of 8 x 8 numbers as products of warp groups read it, wherever the line begins: the pixels of
/// another tap begin 16 bytes per pixel further in the same tile, and no patch is copied twice.
///
/// Copies pass through the L1 cache. Past it, each 16 bytes would be a request of their own, because
/// neighbouring channels are not neighbours in shared memory: on an H100 twice as many bytes passed between
/// the caches, and four times as many requests.

#include <pufferfish/gpu/kernels/conv/conv_axis.hpp>
#include <pufferfish/gpu/kernels/conv/halo_plan.hpp>
#include <pufferfish/gpu/kernels/gemm/async_copy.cuh>
#include <pufferfish/gpu/kernels/gemm/warpgroup.cuh>
#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// A position of a block of pixels: its image, and its first line and column.
struct pixel_block {
  int image, y, x;
};

/// The blocks of 8 x 8 pixels of images: `down` x `over` of each image, numbered line by line. Blocks at the
/// lower and right edges may have pixels outside of the image. There are fewer than 2^31 blocks.
struct block_grid {
  int blocks;
  divider by_down, by_over;

  /// The blocks of `images` images of height x width pixels.
  static block_grid of(index_t images, int height, int width) {
    const int down = ceil_div(height, plans::halo_side), over = ceil_div(width, plans::halo_side);
    return {static_cast<int>(images * (static_cast<index_t>(down) * over)), divider::by(down),
            divider::by(over)};
  }

  __device__ pixel_block at(int block) const {
    const int lines = by_over.quotient(block), image = by_down.quotient(lines);
    return {image, by_down.remainder(lines, image) * plans::halo_side,
            by_over.remainder(block, lines) * plans::halo_side};
  }
};

/// Copies tiles of Side x Side pixels of NHWC images, `Channels` channels each, by Threads threads. Pixels
/// outside of the image become zeros.
template <class T, int Side, int Channels, int Threads>
class pixel_tiles {
 public:
  static constexpr int pixels = Side * Side, planes = Channels / 8;
  /// Bytes from a plane to the next one. The threads of a quarter of a warp, which copy neighbouring channels
  /// and pixels, use all banks.
  static constexpr int plane = pixels * 16 +
                               (planes == 2   ? 64
                                : planes == 4 ? 32
                                              : 16) -
                               pixels * 16 %
                                   (planes == 2   ? 128
                                    : planes == 4 ? 64
                                                  : 32);
  static constexpr int bytes = planes * plane;

  __device__ pixel_tiles(const T* images, int height, int width, int channels, int thread)
      : images_(images), height_(height), width_(width), channels_(channels) {
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      const int at = thread + i * Threads, pixel = at / planes;
      places_[i] = pixel / Side << 16 | pixel % Side << 8 | at % planes;
    }
    last_ = thread + (copies - 1) * Threads < pixels * planes;
  }

  /// Chooses the pixels: (y, x) is the first one, and may be outside. `exists`: whether there is such an
  /// image.
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

  /// Starts the copies of the channels channel .. channel + Channels - 1 of the chosen pixels.
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
  static constexpr int copies = ceil_div(pixels * planes, Threads);

  const T* images_;
  const T* first_ = nullptr;
  int height_, width_, channels_;
  array_of<int, copies> places_;  // line, column and plane of each of the thread's copies
  unsigned inside_ = 0;           // a bit for each copy
  bool last_;                     // whether the thread takes part in the last copies
};

PUFFERFISH_KERNELS_END
