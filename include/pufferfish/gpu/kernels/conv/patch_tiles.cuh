// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: copies tiles of the matrix of patches, gathered pixel by pixel, and of the weight to shared
/// memory.

#include <type_traits>

#include <pufferfish/gpu/kernels/conv/conv_axis.hpp>
#include <pufferfish/gpu/kernels/conv/conv_tiles.cuh>
#include <pufferfish/gpu/kernels/gemm/tile_product.cuh>

PUFFERFISH_KERNELS_BEGIN

/// The patches of a correlation: its input, the axes of this block's outputs, and the elements of its sum,
/// which are numbered (tap row, tap column, channel). Element k of the sum has the channel k % channels of
/// tap k / channels; tap t has the tap row t / columns.taps and the tap column t % columns.taps.
template <class T>
struct gathering {
  const T* in;
  conv_axis rows, columns;
  int channels, depth;
  divider by_channels, by_columns, by_steps_of_line;

  __device__ gathering(const T* input, const conv_axis& row_axis, const conv_axis& column_axis,
                       int channel_count, const divider& by_channel_count)
      : in(input),
        rows(row_axis),
        columns(column_axis),
        channels(channel_count),
        depth(row_axis.taps * column_axis.taps * channel_count),
        by_channels(by_channel_count),
        by_columns(divider::by(column_axis.taps > 0 ? column_axis.taps : 1)),
        by_steps_of_line(divider::by(2 * max(row_axis.taps * column_axis.taps, 1))) {}

  /// Whether the input has the pixel.
  __device__ bool inside(int y, int x) const {
    return static_cast<unsigned>(y) < static_cast<unsigned>(rows.inputs) &&
           static_cast<unsigned>(x) < static_cast<unsigned>(columns.inputs);
  }

  /// The first element of the sum in a step of `Depth` elements: half a cache line of channels. If a pixel
  /// has several lines, all taps use one line before the next: the pixels of one tap are also neighbours of
  /// other taps, so that the L1 cache has most of them already.
  template <int Depth>
  __device__ int step_begin(int step) const {
    constexpr int line = static_cast<int>(128 / sizeof(T));
    static_assert(line == 2 * Depth);
    if (channels <= line || channels % line != 0) return step * Depth;
    const int number = by_steps_of_line.quotient(step), inside = by_steps_of_line.remainder(step, number);
    return inside / 2 * channels + number * line + inside % 2 * Depth;
  }

  /// An element of the sum: its position relative to the output's first tap.
  struct element {
    int y, x;    ///< in pixels of the input
    int offset;  ///< in elements
    int tap_row, tap_column, channel;
  };
  __device__ element at(int k) const {
    const int tap = by_channels.quotient(k), tap_row = by_columns.quotient(tap);
    const int tap_column = by_columns.remainder(tap, tap_row), channel = by_channels.remainder(k, tap);
    const int y = tap_row * rows.offset_step, x = tap_column * columns.offset_step;
    return {y, x, (y * columns.inputs + x) * channels + channel, tap_row, tap_column, channel};
  }
};

/// An output pixel: the position of its first tap in the input, and its own in the output.
struct gathered_pixel {
  index_t in;   ///< elements from the input's begin; may be outside of the image
  index_t out;  ///< elements from the output's begin; -1 for a pixel that does not exist
  int y, x;     ///< of the input
};

/// Writes the outputs first .. first + Rows - 1 of a correlation over `images` images to shared memory.
/// Outputs have `out_channels` channels, in images of out_height x out_width pixels. `pixels`: Rows entries
/// in shared memory; a barrier must follow before other threads read them. Outputs from images x area on do
/// not exist: out = -1, and all of their taps are outside.
template <int Rows, int Threads, class T>
__device__ inline void find_pixels(gathered_pixel* pixels, const gathering<T>& g, index_t first,
                                   index_t images, int out_height, int out_width, int out_channels,
                                   int thread) {
  // Divides in 64 bits once for the block, then in 32 bits.
  const int area = g.rows.outputs * g.columns.outputs;
  const index_t first_image = first / area;
  const auto first_inside = static_cast<unsigned>(first - first_image * area);
  for (int row = thread; row < Rows; row += Threads) {
    const unsigned inside = first_inside + static_cast<unsigned>(row);
    const unsigned passed = inside / static_cast<unsigned>(area);
    const int rest = static_cast<int>(inside - passed * static_cast<unsigned>(area));
    const int line = rest / g.columns.outputs, column = rest - line * g.columns.outputs;
    const index_t image = first_image + static_cast<index_t>(passed);
    gathered_pixel pixel;
    pixel.y = line * g.rows.in_step + g.rows.offset;
    pixel.x = column * g.columns.in_step + g.columns.offset;
    pixel.in = ((image * g.rows.inputs + pixel.y) * g.columns.inputs + pixel.x) * g.channels;
    pixel.out = ((image * out_height + g.rows.out_first + line * g.rows.out_step) * out_width +
                 g.columns.out_first + column * g.columns.out_step) *
                out_channels;
    if (image >= images) {
      pixel.out = -1;
      pixel.y = -(1 << 30);  // every tap misses the image
    }
    pixels[row] = pixel;
  }
}

/// Copies tiles of the matrix of patches: Rows pixels by Depth elements of the sum, Run elements at a time,
/// which divides the channels and the address. If Run > 1, a thread keeps its pixels in registers. Layout:
/// element k + c of pixel r is at r Stride + c of the tile. Thread t copies the columns (t % (Depth / Run))
/// Run .. of every (Threads Run / Depth)-th row. Taps outside of the image and elements from g.depth on
/// become zeros.
template <class T, int Rows, int Depth, int Stride, int Threads, int Run>
class patch_rows {
  static constexpr int runs = Depth / Run, rows_at_once = Threads / runs;
  static constexpr int own_rows = Rows / rows_at_once;
  static_assert(Threads % runs == 0 && Rows % rows_at_once == 0);

  struct own_pixel {
    const T* in;
    int y, x;
  };

 public:
  __device__ patch_rows(const gathering<T>& g, const gathered_pixel* pixels, int thread)
      : g_(&g), pixels_(pixels), along_(thread % runs * Run), first_row_(thread / runs) {
    if constexpr (Run > 1) {
#pragma unroll
      for (int i = 0; i < own_rows; ++i) own_[i] = pixel(i);
    }
  }

  /// Copies the elements from k on.
  __device__ void copy(T* tile, int k) const {
    const bool exists = k + along_ < g_->depth;
    const auto element = g_->at(exists ? k + along_ : 0);
#pragma unroll
    for (int i = 0; i < own_rows; ++i) {
      const own_pixel from = Run > 1 ? own_[i] : pixel(i);
      const bool inside = exists && g_->inside(from.y + element.y, from.x + element.x);
      copy_elements<Run, true>(tile + (first_row_ + i * rows_at_once) * Stride + along_,
                               from.in + element.offset, inside);
    }
  }

 private:
  __device__ own_pixel pixel(int i) const {
    const gathered_pixel& found = pixels_[first_row_ + i * rows_at_once];
    return {g_->in + found.in, found.y, found.x};
  }

  const gathering<T>* g_;
  const gathered_pixel* pixels_;
  int along_, first_row_;
  array_of<own_pixel, (Run > 1 ? own_rows : 1)> own_;
};

/// Copies a tile of the weight for the gradient of the input: Rows input channels from `first` on (of
/// `in_channels`) by Depth elements of the sum, whose channels are those of the convolution's output, from k
/// on. Layout: element (row, c) of the tile, at row Stride + c, is the weight [tap of
/// k + c][first + row][channel of k + c], zero outside of the weight.
template <int Rows, int Depth, int Stride, int Threads, class T>
__device__ inline void copy_turned_weight(T* tile, const gathering<T>& g, const T* weight, int kernel_width,
                                          int in_channels, int first, int k, bool in_vectors, int thread) {
  const auto copy = [&](auto count) {
    constexpr int run = decltype(count)::value, runs = Depth / run;
    static_assert(Threads % runs == 0, "a thread keeps its place in the depth");
    const int along = thread % runs * run;
    const bool exists = k + along < g.depth;
    const auto element = g.at(exists ? k + along : 0);
    const int cell = (g.rows.kernel + element.tap_row * g.rows.kernel_step) * kernel_width +
                     g.columns.kernel + element.tap_column * g.columns.kernel_step;
    const T* const from =
        weight + (static_cast<index_t>(cell) * in_channels + first) * g.channels + element.channel;
    for_own<Rows * runs, Threads, (run > 1)>(thread, [&](int at) {
      const int row = at / runs;
      copy_elements<run>(tile + row * Stride + along, from + row * g.channels,
                         exists && first + row < in_channels);
    });
  };
  if (in_vectors) {
    copy(std::integral_constant<int, vector_width<T>>());
  } else {
    copy(std::integral_constant<int, 1>());
  }
}

/// Copies a tile of the transposed matrix of patches of a forward convolution: Depth pixels by Columns
/// elements of the patch, Run at a time. A thread keeps its columns; images and pixels count from the block's
/// first pixel. Layout: column c of pixel r is at r Stride + c of the tile. Pixels from `last` on and taps
/// outside of the image become zeros.
template <class T, int Columns, int Depth, int Stride, int Threads, int Run>
class patch_columns {
  static constexpr int runs = Columns / Run, rows_at_once = Threads / runs;
  static_assert(Threads % runs == 0);

 public:
  /// The columns from `first_column` on of the patches of the pixels first .. last - 1.
  __device__ patch_columns(const gathering<T>& g, int first_column, index_t first, index_t last,
                           const divider& by_area, const divider& by_width, int thread)
      : g_(&g),
        by_area_(by_area),
        by_width_(by_width),
        first_row_(thread / runs),
        along_(thread % runs * Run) {
    const index_t area = static_cast<index_t>(g.rows.outputs) * g.columns.outputs, image = first / area;
    first_inside_ = static_cast<int>(first - image * area);
    count_ = static_cast<int>(last - first);
    images_ = g.in + image * g.rows.inputs * g.columns.inputs * g.channels;
    const auto element = g.at(first_column + along_ < g.depth ? first_column + along_ : 0);
    y_ = element.y + g.rows.offset;
    x_ = element.x + g.columns.offset;
    channel_ = element.channel;
    if (first_column + along_ >= g.depth) y_ = -(1 << 30);  // outside of every image
  }

  /// Copies the patches of pixels first .. first + Depth - 1 of this block.
  __device__ void copy(T* tile, int first) const {
#pragma unroll
    for (int i = 0; i < ceil_div(Depth, rows_at_once); ++i) {
      const int row = first_row_ + i * rows_at_once;
      if (Depth % rows_at_once != 0 && row >= Depth) break;
      const int pixel = first + row, at = first_inside_ + pixel;
      const int image = by_area_.quotient(at), rest = by_area_.remainder(at, image);
      const int line = by_width_.quotient(rest);
      const int y = line * g_->rows.in_step + y_;
      const int x = by_width_.remainder(rest, line) * g_->columns.in_step + x_;
      const bool inside = pixel < count_ && g_->inside(y, x);
      const index_t line_of_all = static_cast<index_t>(image) * g_->rows.inputs + y;
      copy_elements<Run>(tile + row * Stride + along_,
                         images_ + (line_of_all * g_->columns.inputs + x) * g_->channels + channel_, inside);
    }
  }

 private:
  const gathering<T>* g_;
  const T* images_;
  divider by_area_, by_width_;
  int first_inside_, count_;
  int first_row_, along_;
  int y_, x_, channel_;
};

PUFFERFISH_KERNELS_END
