// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: how the operands of a convolution's products get from device memory into tiles of shared memory,
/// and results back: patches gathered pixel by pixel, weights and activations as the matrices that they are.

#include <pufferfish/gpu/kernels/async_copy.cuh>
#include <pufferfish/gpu/kernels/conv_axis.hpp>
#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/tile_product.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Copies Count elements into shared memory, or zeros where not `inside` (`from` is not read then).
/// Asynchronous but for elements of less than 4 bytes.
template <int Count, class T>
__device__ inline void copy_elements(T* to, const T* from, bool inside) {
  constexpr int bytes = Count * static_cast<int>(sizeof(T));
  if constexpr (bytes == 4 || bytes == 8 || bytes == 16) {
    copy_async<bytes>(to, from, inside);
  } else {
    static_assert(Count == 1);
    *to = inside ? *from : T{};
  }
}

/// Runs load(slot, step) for the steps first .. last - 1 and, Slots - 1 steps later, use(slot, step): a ring
/// of slots in shared memory, filled in the background. All threads of the block take part.
template <int Slots, class Load, class Use>
__device__ inline void pipeline(int first, int last, Load load, Use use) {
  int next = first;
#pragma unroll
  for (int slot = 0; slot < Slots - 1; ++slot, ++next) {
    if (next < last) load(slot, next);
    commit_copies();
  }
  int free_slot = Slots - 1, full_slot = 0;
  for (int step = first; step < last; ++step, ++next) {
    wait_for_copies<Slots - 2>();
    __syncthreads();  // this step's tiles are there, and everyone is done with those of the step before
    if (next < last) load(free_slot, next);
    commit_copies();
    use(full_slot, step);
    free_slot = full_slot;
    full_slot = full_slot + 1 == Slots ? 0 : full_slot + 1;
  }
  wait_for_copies<0>();
  __syncthreads();
}

// ---------------------------------------------------------------------------------------------------------
// Matrices

/// How many of `most` rows or columns there are from `first` on.
__device__ inline int remaining(index_t size, index_t first, int most) {
  const index_t rest = size - first;
  return rest < most ? static_cast<int>(rest) : most;
}

/// Copies a tile of a matrix, `Rows` rows of `Length` elements, of which `rows` x `length` are there; the
/// others become zeros. `in_vectors`: addresses, steps and lengths are multiples of 16 bytes.
template <int Rows, int Length, int Stride, int Threads, class T>
__device__ inline void copy_tile(T* tile, const T* matrix, index_t row_step, int rows, int length,
                                 bool in_vectors, int thread) {
  const auto copy = [&](auto count) {
    constexpr int run = decltype(count)::value, runs = Length / run;
#pragma unroll
    for (int i = 0; i < ceil_div(Rows * runs, Threads); ++i) {
      const int at = thread + i * Threads;
      if (Rows * runs % Threads != 0 && at >= Rows * runs) break;
      const int row = at / runs, column = at % runs * run;
      const bool inside = row < rows && column < length;
      copy_elements<run>(tile + row * Stride + column, inside ? matrix + row * row_step + column : matrix,
                         inside);
    }
  };
  if (in_vectors) {
    copy(std::integral_constant<int, vector_width<T>>());
  } else {
    copy(std::integral_constant<int, 1>());
  }
}

// ---------------------------------------------------------------------------------------------------------
// Patches

/// A correlation that gathers: its input, the axes of this block's outputs, and its sum's elements, which are
/// numbered (tap row, tap column, channel).
template <class T>
struct gathering {
  const T* in;
  conv_axis rows, columns;
  int channels, depth;
  divider by_channels, by_columns;

  __device__ gathering(const T* input, const conv_axis& row_axis, const conv_axis& column_axis,
                       int channel_count, const divider& by_channel_count)
      : in(input),
        rows(row_axis),
        columns(column_axis),
        channels(channel_count),
        depth(row_axis.taps * column_axis.taps * channel_count),
        by_channels(by_channel_count),
        by_columns(divider::by(column_axis.taps > 0 ? column_axis.taps : 1)) {}

  /// An element of the sum: where it is, relative to the output's first tap.
  struct element {
    int y, x;    ///< of the input
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

/// An output pixel: the input of its first tap, and where it is itself.
struct gathered_pixel {
  index_t in;   ///< elements from the input's begin; may lie outside the image
  index_t out;  ///< elements from the output's begin; -1 for a pixel that does not exist
  int y, x;     ///< of the input
};

/// The outputs first .. first + Rows - 1 of a correlation over `images` images, into shared memory. Outputs
/// have `out_channels` channels, in images of out_height x out_width pixels.
template <int Rows, int Threads, class T>
__device__ inline void find_pixels(gathered_pixel* pixels, const gathering<T>& g, index_t first,
                                   index_t images, int out_height, int out_width, int out_channels,
                                   int thread) {
  // Once for the block in 64 bits; from there on in 32.
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

/// Copies a tile of the matrix of patches: Rows pixels by Depth elements of the sum from k on.
template <int Rows, int Depth, int Stride, int Threads, class T>
__device__ inline void gather_tile(T* tile, const gathering<T>& g, const gathered_pixel* pixels, int k,
                                   bool in_vectors, int thread) {
  const auto gather = [&](auto count) {
    constexpr int run = decltype(count)::value, runs = Depth / run, rows_at_once = Threads / runs;
    static_assert(Threads % runs == 0);
    const int along = thread % runs * run;
    const bool exists = k + along < g.depth;
    const auto element = g.at(exists ? k + along : 0);
#pragma unroll
    for (int i = 0; i < ceil_div(Rows, rows_at_once); ++i) {
      const int row = thread / runs + i * rows_at_once;
      if (Rows % rows_at_once != 0 && row >= Rows) break;
      const gathered_pixel& pixel = pixels[row];
      const bool inside =
          exists && static_cast<unsigned>(pixel.y + element.y) < static_cast<unsigned>(g.rows.inputs) &&
          static_cast<unsigned>(pixel.x + element.x) < static_cast<unsigned>(g.columns.inputs);
      copy_elements<run>(tile + row * Stride + along, inside ? g.in + (pixel.in + element.offset) : g.in,
                         inside);
    }
  };
  if (in_vectors) {
    gather(std::integral_constant<int, vector_width<T>>());
  } else {
    gather(std::integral_constant<int, 1>());
  }
}

/// Copies a tile of the weight of a convolution that goes backward: Rows input channels from `first` on (of
/// `in_channels`) by Depth elements of the sum, whose channels are those of the convolution's output, from k
/// on.
template <int Rows, int Depth, int Stride, int Threads, class T>
__device__ inline void copy_turned_weight(T* tile, const gathering<T>& g, const T* weight, int kernel_width,
                                          int in_channels, int first, int k, bool in_vectors, int thread) {
  const auto copy = [&](auto count) {
    constexpr int run = decltype(count)::value, runs = Depth / run, rows_at_once = Threads / runs;
    static_assert(Threads % runs == 0);
    const int along = thread % runs * run;
    const bool exists = k + along < g.depth;
    const auto element = g.at(exists ? k + along : 0);
    const int cell = (g.rows.kernel + element.tap_row * g.rows.kernel_step) * kernel_width +
                     g.columns.kernel + element.tap_column * g.columns.kernel_step;
    const T* const from = weight + static_cast<index_t>(cell) * in_channels * g.channels + element.channel;
#pragma unroll
    for (int i = 0; i < ceil_div(Rows, rows_at_once); ++i) {
      const int row = thread / runs + i * rows_at_once;
      if (Rows % rows_at_once != 0 && row >= Rows) break;
      const bool inside = exists && first + row < in_channels;
      copy_elements<run>(tile + row * Stride + along,
                         inside ? from + static_cast<index_t>(first + row) * g.channels : weight, inside);
    }
  };
  if (in_vectors) {
    copy(std::integral_constant<int, vector_width<T>>());
  } else {
    copy(std::integral_constant<int, 1>());
  }
}

/// Copies a tile of the transposed matrix of patches of a forward convolution: Depth pixels from `pixel` on,
/// by Columns elements of the patch. Images and pixels in them count from those of `first`, the block's
/// first.
template <class T, int Columns, int Depth, int Stride, int Threads>
class patch_columns {
 public:
  /// The columns from `first_column` on of the patches of the pixels first .. last - 1.
  __device__ patch_columns(const gathering<T>& g, int first_column, index_t first, index_t last,
                           const divider& by_area, const divider& by_width, bool in_vectors, int thread)
      : g_(&g), by_area_(by_area), by_width_(by_width), in_vectors_(in_vectors), thread_(thread) {
    const int area = g.rows.outputs * g.columns.outputs;
    const index_t image = first / area;
    first_inside_ = static_cast<int>(first - image * area);
    count_ = static_cast<int>(last - first);
    images_ = g.in + image * g.rows.inputs * g.columns.inputs * g.channels;
    const int column =
        thread % (Columns / (in_vectors ? vector_width<T> : 1)) * (in_vectors ? vector_width<T> : 1);
    exists_ = first_column + column < g.depth;
    const auto element = g.at(exists_ ? first_column + column : 0);
    y_ = element.y + g.rows.offset;
    x_ = element.x + g.columns.offset;
    channel_ = element.channel;
  }

  /// The pixels `pixel` .. pixel + Depth - 1 of this block's.
  __device__ void copy(T* tile, int pixel) const {
    if (in_vectors_) {
      copy_runs<vector_width<T>>(tile, pixel);
    } else {
      copy_runs<1>(tile, pixel);
    }
  }

 private:
  template <int Run>
  __device__ void copy_runs(T* tile, int first) const {
    constexpr int runs = Columns / Run, rows_at_once = Threads / runs;
    static_assert(Threads % runs == 0, "a thread keeps its column");
#pragma unroll
    for (int i = 0; i < ceil_div(Depth, rows_at_once); ++i) {
      const int row = thread_ / runs + i * rows_at_once;
      if (Depth % rows_at_once != 0 && row >= Depth) break;
      const int pixel = first + row, at = first_inside_ + pixel;
      const int image = by_area_.quotient(at), rest = by_area_.remainder(at, image);
      const int line = by_width_.quotient(rest);
      const int y = line * g_->rows.in_step + y_;
      const int x = by_width_.remainder(rest, line) * g_->columns.in_step + x_;
      const bool inside = exists_ && pixel < count_ &&
                          static_cast<unsigned>(y) < static_cast<unsigned>(g_->rows.inputs) &&
                          static_cast<unsigned>(x) < static_cast<unsigned>(g_->columns.inputs);
      const index_t line_of_all = static_cast<index_t>(image) * g_->rows.inputs + y;
      copy_elements<Run>(
          tile + row * Stride + thread_ % runs * Run,
          inside ? images_ + (line_of_all * g_->columns.inputs + x) * g_->channels + channel_ : g_->in,
          inside);
    }
  }

  const gathering<T>* g_;
  const T* images_;
  divider by_area_, by_width_;
  int first_inside_, count_;
  int y_, x_, channel_;
  bool exists_, in_vectors_;
  int thread_;
};

// ---------------------------------------------------------------------------------------------------------
// Results

/// Where results go: to `out`, with a bias for each column or on top of what is there; or, where sums are cut
/// into slices, to this slice's part of `partials`.
template <class T>
struct result_target {
  T* out;
  const T* bias;    ///< null: none
  float* partials;  ///< null: results are whole
  bool add;
  int columns;  ///< of the matrix

  /// Stores Width results of one row, which starts at element `row`, from `column` on.
  template <int Width>
  __device__ void store(index_t row, int column, const element_run<float, Width>& run) const {
    if (column + Width <= columns && Width > 1 && columns % Width == 0 && aligned<Width>()) {
      if (partials != nullptr) return store_run<Width>(partials + row + column, run);
      return finish_run<Width>(row, column, run);
    }
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      if (column + i >= columns) return;
      const element_run<float, 1> value{{run.values[i]}};
      if (partials != nullptr) {
        store_run<1>(partials + row + column + i, value);
      } else {
        finish_run<1>(row, column + i, value);
      }
    }
  }

 private:
  template <int Width>
  __device__ bool aligned() const {
    const auto address = partials != nullptr ? reinterpret_cast<std::uintptr_t>(partials) / sizeof(float)
                                             : reinterpret_cast<std::uintptr_t>(out) / sizeof(T);
    return address % Width == 0;
  }
  template <int Width>
  __device__ void finish_run(index_t row, int column, const element_run<float, Width>& run) const {
    element_run<T, Width> result{};
    if (add) result = *reinterpret_cast<const element_run<T, Width>*>(out + row + column);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      float value = run.values[i];
      if (bias != nullptr) value += static_cast<float>(bias[column + i]);
      if (add) value += static_cast<float>(result.values[i]);
      result.values[i] = static_cast<T>(value);
    }
    *reinterpret_cast<element_run<T, Width>*>(out + row + column) = result;
  }
  template <int Width>
  __device__ static void store_run(float* to, const element_run<float, Width>& run) {
    *reinterpret_cast<element_run<float, Width>*>(to) = run;
  }
};

PUFFERFISH_KERNELS_END
