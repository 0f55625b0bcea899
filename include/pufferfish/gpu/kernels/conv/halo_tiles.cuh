// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: copies blocks of pixels, with the border that their taps read, to shared memory.
///
/// A tile consists of planes of 8 channels. In a plane, each pixel has 16 bytes, in the order of
/// block_layout. The operand of another tap begins at another pixel of the same tile, so each pixel is copied
/// once for all taps.
///
/// Copies pass through the L1 cache. If they bypassed the cache, every 16 bytes would be a request of their
/// own, because channels that are adjacent in device memory are not adjacent in shared memory. On an H100,
/// copies that bypassed the L1 cache transferred twice as many bytes between the caches, in four times as
/// many requests.

#include <pufferfish/gpu/kernels/conv/halo_shape.hpp>
#include <pufferfish/gpu/kernels/gemm/async_copy.cuh>
#include <pufferfish/gpu/kernels/gemm/warpgroup.cuh>
#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Numbers the blocks of pixels that cover images: `down` x `over` blocks for each image, or each four images
/// if blocks have 4 x 4 pixels, line by line. Blocks may contain pixels and images that do not exist.
/// `blocks`: the number of all blocks. It and the number of images must be below 2^31.
struct block_grid {
  int blocks, images, side;
  divider by_down, by_over;

  /// The grid for `images` images of height x width pixels, and blocks of side x side pixels.
  static block_grid of(index_t images, int height, int width, int side) {
    const int down = ceil_div(height, side), over = ceil_div(width, side), at_once = 64 / (side * side);
    return {static_cast<int>((images + at_once - 1) / at_once * (static_cast<index_t>(down) * over)),
            static_cast<int>(images), side, divider::by(down), divider::by(over)};
  }

  /// First pixel of block number `block` >= 0. Its image does not exist if block >= blocks.
  __device__ block_pixel at(int block) const {
    const int lines = by_over.quotient(block), set = by_down.quotient(lines);
    return {set * (64 / (side * side)), by_down.remainder(lines, set) * side,
            by_over.remainder(block, lines) * side};
  }
};

/// Copies tiles of pixels of dense NHWC images, `Channels` channels each, to shared memory, by `Threads`
/// threads. Pixels outside of the image become zeros. T has 16 bits; Channels: 16, 32 or 64. Frugal: whether
/// each call computes addresses anew, with fewer registers.
///
/// \code
/// pixel_tiles<T, layout, 32, 128> tiles(images, count, height, width, channels, thread);
/// if (tiles.has_borders) { tiles.clear(tile, 1); }  // and a barrier
/// tiles.find({image, y, x});
/// tiles.copy(tile, channel);  // starts the copies; commit_copies and wait_for_copies follow
/// \endcode
template <class T, block_layout Layout, int Channels, int Threads, bool Frugal = false>
class pixel_tiles {
 public:
  /// Number of planes of a tile, number of bytes from a plane to the next one, and number of bytes of a tile.
  static constexpr int planes = Channels / 8, plane = Layout.plane(Channels), bytes = Layout.bytes(Channels);
  /// Number of copies that each thread starts for a tile; threads with high numbers may start one less.
  static constexpr int copies = ceil_div(Layout.pixels() * planes, Threads);
  /// Whether a tile has pixels that are never copied. They must be set to zeros before the first copy.
  static constexpr bool has_borders = Layout.copied() < Layout.patch;

  /// images: address of the first of `count` images, each of which has height x width pixels of `channels`
  /// channels. `thread`: index of the calling thread, 0 .. Threads - 1.
  __device__ pixel_tiles(const T* images, int count, int height, int width, int channels, int thread)
      : images_(images), count_(count), height_(height), width_(width), channels_(channels), thread_(thread) {
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      const int number = thread + i * Threads;
      const block_pixel at = Layout.pixel(number / planes);
      const int to = Layout.place(at) + number % planes * plane;
      places_[i] = to / 16 << 15 | at.image << 13 | at.y << 8 | at.x << 3 | number % planes;
    }
    last_ = thread + (copies - 1) * Threads < Layout.pixels() * planes;
  }

  /// Sets `count` tiles at `tiles` to zeros. All threads must call this function.
  __device__ void clear(unsigned char* tiles, int count) const {
    for (int at = thread_; at < count * bytes / 16; at += Threads) {
      reinterpret_cast<element_run<std::uint32_t, 4>*>(tiles)[at] = {};
    }
  }

  /// Chooses the pixels that copy() copies. `first`: the image, line and column of the tile's first pixel;
  /// both of the latter may be negative. Pixels of images that do not exist become zeros, too.
  __device__ void find(const block_pixel& first) {
    first_ = images_ + place_of(first);
    inside_ = 0;
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      inside_ |= (is_inside(first, pixel_at(place_of_copy(i))) ? 1U : 0U) << i;
    }
  }

  /// Starts copies (copy_async) of the channels channel .. channel + Channels - 1 of the chosen pixels to
  /// `tile`, which has `bytes` bytes and is aligned to 16 bytes. All threads must call this function.
  __device__ void copy(unsigned char* tile, int channel) const { copy_from(first_, tile, channel); }
  /// The same for other images of the same size.
  __device__ void copy_other(const T* images, unsigned char* tile, int channel) const {
    copy_from(images + (first_ - images_), tile, channel);
  }

  /// Calls use(at, place) for each copy of the calling thread to a tile: pixel `at`, counted from the tile's
  /// first pixel in the image, is copied to `place` bytes after the tile's beginning.
  template <class F>
  __device__ void for_each(F use) const {
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      if (i == copies - 1 && !last_) break;
      const int place = place_of_copy(i);
      use(pixel_at(place), (place >> 15) * 16);
    }
  }
  /// The plane of all copies of the calling thread.
  __device__ int own_plane() const { return places_[0] & 7; }
  /// Whether pixel `at` of the tile that begins at `first` exists.
  __device__ bool is_inside(const block_pixel& first, const block_pixel& at) const {
    return static_cast<unsigned>(first.y + at.y) < static_cast<unsigned>(height_) &&
           static_cast<unsigned>(first.x + at.x) < static_cast<unsigned>(width_) &&
           first.image + at.image < count_;
  }
  /// Number of elements from the first image to the pixel `first`, and from there to `at` of its tile.
  __device__ index_t place_of(const block_pixel& first) const {
    return ((static_cast<index_t>(first.image) * height_ + first.y) * width_ + first.x) * channels_;
  }
  __device__ int offset(const block_pixel& at) const {
    return ((at.image * height_ + at.y) * width_ + at.x) * channels_;
  }

 private:
  // Starts the copies to `tile`; `first`: address of the tile's first pixel.
  __device__ void copy_from(const T* first, unsigned char* tile, int channel) const {
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      if (i == copies - 1 && !last_) break;
      const int place = place_of_copy(i);
      copy_async<16, true>(tile + (place >> 15) * 16,
                           first + offset(pixel_at(place)) + channel + (place & 7) * 8,
                           (inside_ >> i & 1U) != 0);
    }
  }
  // Element i of places_. If Frugal, the compiler does not know that the value is the same at each call.
  __device__ int place_of_copy(int i) const {
    int place = places_[i];
#if !defined(PUFFERFISH_EMULATED_DEVICE)
    if constexpr (Frugal) asm volatile("" : "+r"(place));
#endif
    return place;
  }
  // The pixel of a copy, counted from the tile's first pixel in the image. `place`: element of places_.
  __device__ static block_pixel pixel_at(int place) {
    return {Layout.images() == 1 ? 0 : place >> 13 & 3, (place >> 8 & 31) * Layout.apart,
            (place >> 3 & 31) * Layout.apart};
  }

  static_assert(Threads % planes == 0 && copies <= 32 && bytes < 1 << 20 && Layout.patch <= 32);

  const T* images_;
  const T* first_ = nullptr;
  int count_, height_, width_, channels_, thread_;
  // For each copy of the thread, from the lowest bit on: 3 bits for the plane, 5 each for the pixel's column
  // and line, 2 for its image, and the number of 16 bytes before its place in the tile.
  array_of<int, copies> places_;
  unsigned inside_ = 0;  // bit i: whether the pixel of copy i is in an image
  bool last_;            // whether the thread has a last copy, too
};

PUFFERFISH_KERNELS_END
