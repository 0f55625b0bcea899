// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: copies tiles of the transposed matrix of patches to shared memory, for gradients of weights.

#include <pufferfish/gpu/kernels/conv/conv_tiles.cuh>
#include <pufferfish/gpu/kernels/conv/patch_walk.cuh>
#include <pufferfish/gpu/kernels/gemm/tile_product.cuh>

PUFFERFISH_KERNELS_BEGIN

/// The position of the first tap of an output: its address in the input, and its pixel (y, x) in the image.
template <class T>
struct alignas(16) first_tap {
  const T* in;
  int y, x;
};

/// Copies tiles of the transposed matrix of patches of a forward convolution: Depth pixels by Columns
/// elements of the patch, Run elements at a time. Column c of pixel r is stored at r Stride + c of the tile.
/// Pixels from `last` on and taps outside of the image become zeros. A thread always copies the same columns.
/// The first taps of a step's pixels are found by one warp, a different one in each step, before the step's
/// copies start.
template <class T, int Columns, int Depth, int Stride, int Threads, int Run>
class patch_columns {
  static constexpr int runs = Columns / Run, rows_at_once = Threads / runs;
  static constexpr int own_rows = ceil_div(Depth, rows_at_once), group = own_rows < 4 ? own_rows : 4;
  static constexpr bool every_thread = Depth % rows_at_once == 0;
  static_assert(Threads % runs == 0 && own_rows % group == 0 && Depth <= warp_threads);

 public:
  /// Number of steps whose first taps are in shared memory: more than the slots of the pipeline.
  static constexpr int kept = 4;
  /// Bytes of shared memory for these first taps.
  static constexpr std::size_t first_bytes = kept * Depth * sizeof(first_tap<T>);

  /// Prepares the copies of the columns from `first_column` on of the patches of the pixels first .. last -
  /// 1. `places`: kept * Depth entries in shared memory.
  __device__ patch_columns(const gathering<T>& g, first_tap<T>* places, int first_column, index_t first,
                           index_t last, const divider& by_area, const divider& by_width, int thread)
      : g_(&g),
        places_(places),
        by_area_(by_area),
        by_width_(by_width),
        thread_(thread),
        count_(static_cast<int>(last - first)) {
    const index_t area = static_cast<index_t>(g.rows.outputs) * g.columns.outputs, image = first / area;
    first_inside_ = static_cast<int>(first - image * area);
    images_ = g.in + image * g.rows.inputs * g.columns.inputs * g.channels;
    const int own = first_column + thread % runs * Run;
    const auto element = g.at(own < g.depth ? own : 0);
    y_ = own < g.depth ? element.y : -(1 << 30);  // outside of every image
    x_ = element.x;
    offset_ = element.offset;
  }

  /// Writes the first taps of the pixels step Depth .. step Depth + Depth - 1 of this block, in place of
  /// those of step step - kept. A barrier must follow before the step is copied.
  __device__ void find(int step) const {
    if (thread_ / warp_threads != step % (Threads / warp_threads) || thread_ % warp_threads >= Depth) return;
    const int row = thread_ % warp_threads, pixel = step * Depth + row, at = first_inside_ + pixel;
    const int image = by_area_.quotient(at), rest = by_area_.remainder(at, image);
    const int line = by_width_.quotient(rest);
    const int y = line * g_->rows.in_step + g_->rows.offset;
    const int x = by_width_.remainder(rest, line) * g_->columns.in_step + g_->columns.offset;
    const index_t image_begin =
        static_cast<index_t>(image) * (g_->rows.inputs * g_->columns.inputs * g_->channels);
    places_[step % kept * Depth + row] = {
        images_ + (image_begin + (y * g_->columns.inputs + x) * g_->channels),
        pixel < count_ ? y : -(1 << 29), x};
  }

  /// Copies the patches of a step's pixels to a tile.
  __device__ void copy(T* tile, int step) const {
    const int own = thread_ / runs;
    T* const to = tile + own * Stride + thread_ % runs * Run;
    const first_tap<T>* const places = places_ + step % kept * Depth + own;
#pragma unroll
    for (int i = 0; i < own_rows; i += group) {
      // The places of several copies are loaded before these copies start, because the compiler keeps the
      // order of copies.
      array_of<first_tap<T>, group> place;
#pragma unroll
      for (int d = 0; d < group; ++d) {
        if (every_thread || own + (i + d) * rows_at_once < Depth) place[d] = places[(i + d) * rows_at_once];
      }
#pragma unroll
      for (int d = 0; d < group; ++d) {
        if (!every_thread && own + (i + d) * rows_at_once >= Depth) break;
        copy_elements<Run>(to + (i + d) * rows_at_once * Stride, place[d].in + offset_,
                           g_->inside(place[d].y + y_, place[d].x + x_));
      }
    }
  }

 private:
  const gathering<T>* g_;
  first_tap<T>* places_;
  const T* images_;
  divider by_area_, by_width_;
  int thread_, count_, first_inside_, y_, x_, offset_;
};

PUFFERFISH_KERNELS_END
