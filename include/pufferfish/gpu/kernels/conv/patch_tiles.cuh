// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: copies tiles of the matrix of patches, gathered pixel by pixel, and of the weight to shared
/// memory.

#include <pufferfish/gpu/kernels/conv/conv_tiles.cuh>
#include <pufferfish/gpu/kernels/conv/patch_walk.cuh>
#include <pufferfish/gpu/kernels/gemm/tile_product.cuh>

PUFFERFISH_KERNELS_BEGIN

/// An output pixel: the position of its first tap in the input, and its own position in the output.
template <class T>
struct gathered_pixel {
  const T* in;       ///< address of the first tap; may be outside of the image
  index_t out;       ///< offset of the pixel in the output, in elements; -1 for a pixel that does not exist
  int y, x;          ///< pixel of the first tap in the input image
  unsigned outside;  ///< see taps_outside; set only if Bits of find_pixels is true
};

/// Writes the outputs first .. first + Rows - 1 of a correlation over `images` images to shared memory.
/// Outputs have `out_channels` channels, in images of out_height x out_width pixels. `pixels`: Rows entries
/// in shared memory; a barrier must follow before other threads read them. Outputs from images x area on do
/// not exist: they have out = -1, and all of their taps are outside. Bits: whether `outside` is computed.
template <int Rows, int Threads, bool Bits, class T>
__device__ inline void find_pixels(gathered_pixel<T>* pixels, const gathering<T>& g, index_t first,
                                   index_t images, int out_height, int out_width, int out_channels,
                                   int thread) {
  // One division in 64 bits for the block is followed by divisions in 32 bits.
  const int area = g.rows.outputs * g.columns.outputs;
  const index_t first_image = first / area;
  const auto first_inside = static_cast<unsigned>(first - first_image * area);
#pragma unroll 1
  for (int row = thread; row < Rows; row += Threads) {
    const unsigned inside = first_inside + static_cast<unsigned>(row);
    const unsigned passed = inside / static_cast<unsigned>(area);
    const int rest = static_cast<int>(inside - passed * static_cast<unsigned>(area));
    const int line = rest / g.columns.outputs, column = rest - line * g.columns.outputs;
    const index_t image = first_image + static_cast<index_t>(passed);
    gathered_pixel<T> pixel;
    pixel.y = line * g.rows.in_step + g.rows.offset;
    pixel.x = column * g.columns.in_step + g.columns.offset;
    if constexpr (Bits) pixel.outside = taps_outside(g, pixel.y, pixel.x);
    pixel.in = g.in + ((image * g.rows.inputs + pixel.y) * g.columns.inputs + pixel.x) * g.channels;
    pixel.out = ((image * out_height + g.rows.out_first + line * g.rows.out_step) * out_width +
                 g.columns.out_first + column * g.columns.out_step) *
                out_channels;
    if (image >= images) {
      pixel.out = -1;
      pixel.y = -(1 << 30);  // every tap misses the image
      pixel.outside = ~0U;
    }
    pixels[row] = pixel;
  }
}

/// Copies tiles of the matrix of patches, step after step: Rows pixels by Depth elements of the sum, Run
/// elements at a time. Run must divide the number of channels, and addresses must be aligned to Run elements.
/// Element k + c of pixel r is stored at r Stride + c of the tile. Thread t copies the columns (t % (Depth /
/// Run)) Run .. of every (Threads Run / Depth)-th row, and keeps its pixels in registers. Taps outside of the
/// image and elements from g.depth on become zeros.
template <class T, int Rows, int Depth, int Stride, int Threads, int Run>
class patch_rows {
  static constexpr int runs = Depth / Run, rows_at_once = Threads / runs;
  static constexpr int own_rows = Rows / rows_at_once;
  static_assert(Threads % runs == 0 && Rows % rows_at_once == 0);

  // One of the thread's pixels: address of its first tap, and its taps outside of the image.
  struct own_pixel {
    const T* in;
    unsigned outside;
  };

 public:
  /// Begins at step `step` of the sum. `taps`: the table written by list_taps.
  __device__ patch_rows(const gathering<T>& g, const gathered_pixel<T>* pixels, const tap_place* taps,
                        int step, int thread)
      : walk_(g, taps, step, thread % runs * Run), at_(thread / runs * Stride + thread % runs * Run) {
#pragma unroll
    for (int i = 0; i < own_rows; ++i) {
      const gathered_pixel<T>& pixel = pixels[thread / runs + i * rows_at_once];
      own_[i] = {pixel.in, pixel.outside};
    }
  }

  /// Copies the current step's tile.
  __device__ void copy(T* tile) const {
    const int offset = walk_.tap().offset + walk_.channel();
#pragma unroll
    for (int i = 0; i < own_rows; ++i) {
      copy_elements<Run, true>(tile + at_ + i * rows_at_once * Stride, own_[i].in + offset,
                               (own_[i].outside & walk_.tap().bits) == 0);
    }
  }
  /// Moves to the next step.
  __device__ void advance() { walk_.advance(); }
  /// This thread's position in the sum.
  __device__ const sum_walk<T, Depth>& walk() const { return walk_; }
  /// First element of the sum in the current step.
  __device__ int k() const { return walk_.k(); }

 private:
  sum_walk<T, Depth> walk_;
  int at_;
  array_of<own_pixel, own_rows> own_;
};

/// The copies of patch_rows, one element at a time, for channels that are not whole vectors and for large
/// kernels. No table of taps is used.
template <class T, int Rows, int Depth, int Stride, int Threads>
class patch_rows<T, Rows, Depth, Stride, Threads, 1> {
  static constexpr int rows_at_once = Threads / Depth;
  static_assert(Threads % Depth == 0 && Rows % rows_at_once == 0);

 public:
  __device__ patch_rows(const gathering<T>& g, const gathered_pixel<T>* pixels, const tap_place*, int step,
                        int thread)
      : g_(&g), pixels_(pixels), along_(thread % Depth), first_row_(thread / Depth), step_(step) {}

  __device__ void copy(T* tile) const {
    const int own = k() + along_;
    const bool exists = own < g_->depth;
    const auto element = g_->at(exists ? own : 0);
#pragma unroll
    for (int i = 0; i < Rows / rows_at_once; ++i) {
      const gathered_pixel<T>& pixel = pixels_[first_row_ + i * rows_at_once];
      copy_elements<1>(tile + (first_row_ + i * rows_at_once) * Stride + along_, pixel.in + element.offset,
                       exists && g_->inside(pixel.y + element.y, pixel.x + element.x));
    }
  }
  __device__ void advance() { ++step_; }
  __device__ int k() const { return g_->template step_begin<Depth>(step_); }

 private:
  const gathering<T>* g_;
  const gathered_pixel<T>* pixels_;
  int along_, first_row_, step_;
};

/// Copies tiles of the weight for the gradient of the input: Rows input channels from `first` on (of
/// `in_channels`) by Depth elements of the sum, whose channels are those of the convolution's output. Element
/// (row, c) of the tile, stored at row Stride + c, is the weight [tap of k + c][first + row][channel of k +
/// c], or zero outside of the weight.
template <class T, int Rows, int Depth, int Stride, int Threads>
class turned_weight {
 public:
  __device__ turned_weight(const gathering<T>& g, const T* weight, int kernel_width, int in_channels,
                           int first, bool in_vectors, int thread)
      : g_(&g),
        weight_(weight + static_cast<index_t>(first) * g.channels),
        kernel_width_(kernel_width),
        in_channels_(in_channels),
        rows_(in_channels - first),
        thread_(thread),
        in_vectors_(in_vectors) {
    own_ = weight_ + static_cast<index_t>(thread / runs) * g.channels;
    own_rows_ = rows_ - thread / runs;
  }

  /// Copies the tile of the current step of `rows`, a patch_rows in which each thread has the same elements
  /// of the sum as in this object.
  template <class R>
  __device__ void copy(T* tile, const R& rows) const {
    if constexpr (requires { rows.walk(); }) {
      if (in_vectors_) return copy_vectors(tile, rows.walk());
    }
    copy_single(tile, rows.k());
  }

 private:
  static constexpr int width = vector_width<T>, runs = Depth / width, rows_at_once = Threads / runs;
  static_assert(Threads % runs == 0, "a thread keeps its place in the depth");

  // Copies the tile by vectors of 16 bytes.
  __device__ void copy_vectors(T* tile, const sum_walk<T, Depth>& walk) const {
    const T* const from = own_ + (walk.tap().weight + walk.channel());
    const int rows = (walk.tap().bits & beyond_bit) == 0 ? own_rows_ : 0;
    T* const to = tile + thread_ / runs * Stride + thread_ % runs * width;
#pragma unroll
    for (int i = 0; i < ceil_div(Rows, rows_at_once); ++i) {
      if (Rows % rows_at_once != 0 && thread_ / runs + i * rows_at_once >= Rows) break;
      copy_elements<width>(to + i * rows_at_once * Stride, from + i * rows_at_once * g_->channels,
                           i * rows_at_once < rows);
    }
  }

  // Copies the tile element by element.
  __device__ void copy_single(T* tile, int k) const {
    const int along = thread_ % Depth;
    const bool exists = k + along < g_->depth;
    const auto element = g_->at(exists ? k + along : 0);
    const int cell = (g_->rows.kernel + element.tap_row * g_->rows.kernel_step) * kernel_width_ +
                     g_->columns.kernel + element.tap_column * g_->columns.kernel_step;
    const T* const from =
        weight_ + static_cast<index_t>(cell) * in_channels_ * g_->channels + element.channel;
    for_own<Rows * Depth, Threads, false>(thread_, [&](int at) {
      const int row = at / Depth;
      copy_elements<1>(tile + row * Stride + along, from + row * g_->channels, exists && row < rows_);
    });
  }

  const gathering<T>* g_;
  const T *weight_, *own_;
  int kernel_width_, in_channels_, rows_, own_rows_, thread_;
  bool in_vectors_;
};

PUFFERFISH_KERNELS_END
