// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Convolutions as matrix products whose left operand, the matrix of patches, is gathered tile by tile and
/// exists in shared memory only.
///
/// The three products, rows x depth times depth x columns:
/// - forward: rows = output pixels, columns = output channels, depth = patch (taps x input channels);
/// - gradient of the input: rows = input pixels of one phase, columns = input channels, depth = taps of the
///   phase x output channels. Pixels whose row and column are equal modulo the strides form a phase, because
///   they have the same taps;
/// - gradient of the weight: rows = patch, columns = output channels, depth = output pixels.
///
/// A block computes one tile of rows x columns (conv_tile). It reads the depth in steps of 64 bytes per row
/// (conv_step floats, or twice as many 16-bit numbers), through a ring of three pairs of tiles in shared
/// memory (pipeline). If there are few tiles, the depth is also cut into slices, each of which stores its own
/// partial result in float; add_slices adds these in double, in a fixed order.

#include <pufferfish/gpu/kernels/conv/conv.hpp>
#include <pufferfish/gpu/kernels/conv/conv_block.cuh>
#include <pufferfish/gpu/kernels/conv/conv_tiles.cuh>
#include <pufferfish/gpu/kernels/conv/patch_columns.cuh>
#include <pufferfish/gpu/kernels/conv/patch_tiles.cuh>
#include <pufferfish/gpu/kernels/conv/result_target.cuh>
#include <pufferfish/gpu/kernels/conv/slice_sum.cuh>
#include <pufferfish/gpu/kernels/conv/tile_moments.cuh>

PUFFERFISH_KERNELS_BEGIN

// ---------------------------------------------------------------------------------------------------------
// Forward, and the gradient of the input

/// Arguments of `correlate`. `in`: x, or dy for the gradient of the input. The result has out_pixels x
/// out_channels elements, or in_pixels x in_channels.
template <class T>
struct correlation {
  const T* in;
  const T* weight;
  result_target<T> result;
  conv_geometry geometry;
  index_t elements;     ///< number of elements of the result
  divider by_channels;  ///< division by the channels of `in`
  int slices;           ///< number of parts into which sums are cut
  bool weight_vectors;  ///< whether rows of the weight can be read in vectors
  /// Moments of a forward result without slices, or sums for `norm` over a gradient without slices and
  /// phases; a part is a tile of pixels.
  moment_store moments = {};
  gradient_sum_input<T> norm = {};
};

/// Layout of the dynamic shared memory of `correlate`: `slots` times (left, right), then Block::rows
/// gathered_pixel and the table of taps. Left tile: rows x depth. Right tile: depth x columns, or for the
/// gradient of the input columns x depth.
template <class T, class Block, bool Backward>
struct correlation_memory {
  static constexpr dense weight_layout = Backward ? dense::depth : dense::width;
  static constexpr int left_stride = tile_stride<T, dense::depth>(Block::depth);
  static constexpr int right_stride = tile_stride<T, weight_layout>(Backward ? Block::depth : Block::columns);
  static constexpr int left = Block::rows * left_stride;
  static constexpr int right = (Backward ? Block::columns : Block::depth) * right_stride;
  static constexpr std::size_t tiles = Block::slots * (left + right) * sizeof(T);
  static constexpr std::size_t bytes =
      tiles + Block::rows * sizeof(gathered_pixel<T>);  ///< without the table of taps
};

/// Grid: x counts tiles of the result, columns fastest, so that blocks that run at the same time share
/// patches; the weight fits into the second-level cache anyway. y counts phases of a gradient, z slices.
template <class T, class Block, bool Backward>
static __global__ void __launch_bounds__(Block::threads, Block::blocks_at_once)
    /// Block (bx, by, bz): tile bx / column tiles of the pixels and bx % column tiles of the columns; phase
    /// by = row phase (number of column phases) + column phase, always 0 forward; slice bz has the steps
    /// steps bz / slices .. steps (bz + 1) / slices - 1. Threads: Block::threads in one dimension.
    correlate(grid_dependency earlier, correlation<T> work) {
  earlier.wait();
  using memory = correlation_memory<T, Block, Backward>;
  using product = typename Block::template product<dense::depth, memory::weight_layout>;
  const conv_geometry& g = work.geometry;
  const int thread = block_thread();
  const unsigned column_tiles = static_cast<unsigned>(ceil_div(work.result.columns, Block::columns));
  const index_t first_pixel = static_cast<index_t>(blockIdx.x / column_tiles) * Block::rows;
  const int first_column = static_cast<int>(blockIdx.x % column_tiles) * Block::columns;

  const int phases = min(g.stride_width, g.in_width), phase = static_cast<int>(blockIdx.y);
  const gathering<T> patches(work.in, Backward ? backward_rows(g, phase / phases) : forward_rows(g),
                             Backward ? backward_columns(g, phase % phases) : forward_columns(g),
                             Backward ? g.out_channels : g.in_channels, work.by_channels);
  const index_t pixels = g.images * (static_cast<index_t>(patches.rows.outputs) * patches.columns.outputs);
  if (first_pixel >= pixels) return;
  // No tap reaches these pixels, so there is nothing to add to their old values.
  if (Backward && patches.depth == 0 && work.result.add && work.result.partials == nullptr) return;

  T* const tiles = dynamic_shared<T>();
  auto* const targets = reinterpret_cast<gathered_pixel<T>*>(dynamic_shared<unsigned char>() + memory::tiles);
  find_pixels<Block::rows, Block::threads, (Block::run > 1)>(
      targets, patches, first_pixel, g.images, Backward ? g.in_height : g.out_height,
      Backward ? g.in_width : g.out_width, work.result.columns, thread);
  auto* const taps = reinterpret_cast<tap_place*>(targets + Block::rows);
  if constexpr (Block::run > 1) {
    list_taps<Block::threads>(taps, patches, g.kernel_width, g.in_channels * g.out_channels, thread);
  }
  __syncthreads();

  const int steps = ceil_div(patches.depth, Block::depth), slice = static_cast<int>(blockIdx.z);
  const int first = static_cast<int>(static_cast<index_t>(steps) * slice / work.slices);
  patch_rows<T, Block::rows, Block::depth, memory::left_stride, Block::threads, Block::run> rows(
      patches, targets, taps, first, thread);
  const auto weight = [&] {
    if constexpr (Backward) {
      return turned_weight<T, Block::columns, Block::depth, memory::right_stride, Block::threads>(
          patches, work.weight, g.kernel_width, g.in_channels, first_column, work.weight_vectors, thread);
    } else {
      return row_tiles<T, Block::depth, Block::columns, memory::right_stride, Block::threads>(
          work.weight + first_column, work.result.columns, patches.depth, work.result.columns - first_column,
          work.weight_vectors, thread);
    }
  }();
  product sums(thread);
  pipeline<Block::slots>(
      first, static_cast<int>(static_cast<index_t>(steps) * (slice + 1) / work.slices),
      [&](int slot, int) {
        T* const left = tiles + slot * (memory::left + memory::right);
        T* const right = left + memory::left;
        rows.copy(left);
        if constexpr (Backward) {
          weight.copy(right, rows);
        } else {
          weight.copy(right, rows.k());
        }
        rows.advance();
      },
      [&](int slot, int) {
        const T* const left = tiles + slot * (memory::left + memory::right);
        sums.template multiply<Block::depth, memory::left_stride, memory::right_stride>(left,
                                                                                        left + memory::left);
      });

  result_target<T> result = work.result;
  if (result.partials != nullptr) result.partials += slice * work.elements;
  if constexpr (Backward) {
    result.store(sums, first_column, [&](int row) { return targets[row].out; });
    if constexpr (collects_gradient_sums<T>) {
      if (!work.moments.wanted()) return;
      static_assert(tile_moments<product>::bytes <= memory::tiles);
      T* const unused = after_loop(tiles);
      const int part = static_cast<int>(first_pixel / Block::rows);
      save_gradient_sums<T>(work.moments, sums, work.norm, first_pixel,
                            remaining(pixels, first_pixel, Block::rows), first_column, part,
                            reinterpret_cast<float*>(unused));
      finish_moments_apart<gradient_total>(work.moments, part, first_column / Block::columns, first_column,
                                           Block::columns, reinterpret_cast<double*>(unused));
    }
  } else {
    result.add = false;
    result.at(first_pixel * result.columns)
        .store_rows(sums, first_column, remaining(pixels, first_pixel, Block::rows));
    if (!work.moments.wanted()) return;
    static_assert(tile_moments<product>::bytes <= memory::tiles);
    static_assert(moment_doubles(Block::threads) * sizeof(double) <= memory::tiles);
    T* const unused = after_loop(tiles);
    const int part = static_cast<int>(first_pixel / Block::rows);
    save_moments<T>(work.moments, sums, remaining(pixels, first_pixel, Block::rows), first_column, part,
                    reinterpret_cast<float*>(unused));
    finish_moments_apart(work.moments, part, first_column / Block::columns, first_column, Block::columns,
                         reinterpret_cast<double*>(unused));
  }
}

/// Fills in the members of `work` that follow from the others, starts `correlate`, and adds the slices if
/// there are several.
template <class T, bool Backward>
inline void run_correlation(const launch_site& site, const conv_plan& plan, correlation<T> work,
                            const moment_workspace& moments = {}) {
  const conv_geometry& g = work.geometry;
  if (work.elements == 0) return;
  const int channels = Backward ? g.out_channels : g.in_channels;
  work.slices = plan.slices;
  work.by_channels = divider::by(channels);
  const bool in_vectors = patches_in_vectors(g, channels, work.in);
  work.weight_vectors = whole_vectors<T>(g.out_channels, work.weight);
  const int row_phases = Backward ? std::min(g.stride_height, g.in_height) : 1;
  const int column_phases = Backward ? std::min(g.stride_width, g.in_width) : 1;
  // The first phase has the most pixels.
  const index_t pixels = Backward ? g.images * (static_cast<index_t>(ceil_div(g.in_height, g.stride_height)) *
                                                ceil_div(g.in_width, g.stride_width))
                                  : g.out_pixels();
  with_block<T, 256>(plan, in_vectors, [&](auto block) {
    using shape = decltype(block);
    const dim3 blocks(
        static_cast<unsigned>(ceil_div(pixels, shape::rows) * ceil_div(work.result.columns, shape::columns)),
        static_cast<unsigned>(row_phases * column_phases), static_cast<unsigned>(plan.slices));
    work.moments = moment_store::of(moments, ceil_div(pixels, shape::rows), work.result.columns);
    launch(site,
           {blocks, shape::threads, correlation_memory<T, shape, Backward>::bytes + tap_bytes<shape::run>(g)},
           correlate<T, shape, Backward>, work);
  });
  if (plan.slices > 1) add_slices(site, plan.slices, work.elements, work.result);
}

/// Grid: (tiles of pixels times tiles of channels, 1, slices).
template <class T>
void conv_forward(cudaStream_t stream, const conv_geometry& geometry, const conv_plan& plan, const T* x,
                  const T* w, const T* bias, T* y, float* partials, const moment_workspace& moments) {
  const auto result = target_of(y, bias, plan.slices > 1 ? partials : nullptr, false, geometry.out_channels);
  const index_t elements = geometry.out_pixels() * geometry.out_channels;
  run_correlation<T, false>(stream, plan, {x, w, result, geometry, elements, {}, 1, false}, moments);
}

/// Grid: (tiles of the first phase's pixels times tiles of channels, phases, slices).
template <class T>
void conv_backward_input(cudaStream_t stream, const conv_geometry& geometry, const conv_plan& plan,
                         const T* dy, const T* w, T* dx, bool add, float* partials,
                         const moment_workspace& sums, const gradient_sum_input<T>& norm) {
  const auto result =
      target_of<T>(dx, nullptr, plan.slices > 1 ? partials : nullptr, add, geometry.in_channels);
  const index_t elements = geometry.in_pixels() * geometry.in_channels;
  run_correlation<T, true>(stream, plan, {dy, w, result, geometry, elements, {}, 1, false, {}, norm}, sums);
}

// ---------------------------------------------------------------------------------------------------------
// Gradient of the weight

/// Arguments of correlate_weight. `elements`: patch x out_channels.
template <class T>
struct weight_gradient {
  const T* in;
  const T* gradient;
  result_target<accumulate_t<T>> result;
  conv_geometry geometry;
  index_t elements;
  divider by_channels, by_area, by_width;
  int slices;
  bool gradient_vectors;
};

/// Layout of the dynamic shared memory of correlate_weight: `slots` times (left, right), then the places of
/// pixels. Left tile: depth (pixels) x rows (elements of the patch). Right tile: depth x columns (output
/// channels).
template <class T, class Block>
struct weight_gradient_memory {
  static constexpr int left_stride = tile_stride<T, dense::width>(Block::rows);
  static constexpr int right_stride = tile_stride<T, dense::width>(Block::columns);
  static constexpr int left = Block::depth * left_stride, right = Block::depth * right_stride;
  static constexpr std::size_t tiles = Block::slots * (left + right) * sizeof(T);
  static constexpr std::size_t bytes =
      tiles +
      patch_columns<T, Block::rows, Block::depth, left_stride, Block::threads, Block::run>::first_bytes;
};

/// The gradient of the weight for one tile: rows are elements of the patch, columns are output channels, and
/// sums run over a slice of the pixels. y of the grid counts slices.
template <class T, class Block>
static __global__ void __launch_bounds__(Block::threads, Block::blocks_at_once)
    /// Block (bx, by): tile bx / column tiles of the patch and bx % column tiles of the channels; slice by of
    /// the pixels, in whole steps of Block::depth pixels. Threads: Block::threads in one dimension.
    correlate_weight(grid_dependency earlier, weight_gradient<T> work) {
  earlier.wait();
  using memory = weight_gradient_memory<T, Block>;
  using product = typename Block::template product<dense::width, dense::width>;
  const conv_geometry& g = work.geometry;
  const int thread = block_thread();
  const unsigned column_tiles = static_cast<unsigned>(ceil_div(g.out_channels, Block::columns));
  const int first_row = static_cast<int>(blockIdx.x / column_tiles) * Block::rows;
  const int first_column = static_cast<int>(blockIdx.x % column_tiles) * Block::columns;
  const index_t pixels = g.out_pixels(), all_steps = ceil_div(pixels, Block::depth);
  const int slice = static_cast<int>(blockIdx.y);
  const index_t first_step = all_steps * slice / work.slices;
  const int steps = static_cast<int>(all_steps * (slice + 1) / work.slices - first_step);
  const index_t first = first_step * Block::depth;
  const index_t last = min(first + static_cast<index_t>(steps) * Block::depth, pixels);

  const gathering<T> patches(work.in, forward_rows(g), forward_columns(g), g.in_channels, work.by_channels);
  T* const tiles = dynamic_shared<T>();
  using gathered =
      patch_columns<T, Block::rows, Block::depth, memory::left_stride, Block::threads, Block::run>;
  const gathered columns(patches,
                         reinterpret_cast<first_tap<T>*>(dynamic_shared<unsigned char>() + memory::tiles),
                         first_row, first, last, work.by_area, work.by_width, thread);
  for (int step = 0; step < Block::slots; ++step) columns.find(step);
  __syncthreads();
  const row_tiles<T, Block::depth, Block::columns, memory::right_stride, Block::threads> gradients(
      work.gradient + first * g.out_channels + first_column, g.out_channels, static_cast<int>(last - first),
      g.out_channels - first_column, work.gradient_vectors, thread);
  product sums(thread);
  pipeline<Block::slots>(
      0, steps,
      [&](int slot, int step) {
        T* const left = tiles + slot * (memory::left + memory::right);
        columns.copy(left, step);
        gradients.copy(left + memory::left, step * Block::depth);
      },
      [&](int slot, int step) {
        columns.find(step + Block::slots);
        const T* const left = tiles + slot * (memory::left + memory::right);
        sums.template multiply<Block::depth, memory::left_stride, memory::right_stride>(left,
                                                                                        left + memory::left);
      });

  result_target<accumulate_t<T>> result = work.result;
  if (result.partials != nullptr) result.partials += slice * work.elements;
  result.bias = nullptr;
  result.at(static_cast<index_t>(first_row) * g.out_channels)
      .store_rows(sums, first_column, remaining(patches.depth, first_row, Block::rows));
}

/// Grid: (tiles of the patch times tiles of the channels, slices).
template <class T>
void conv_backward_weight(cudaStream_t stream, const conv_geometry& geometry, const conv_plan& plan,
                          const T* x, const T* dy, accumulate_t<T>* dw, bool accumulate, float* partials,
                          slice_sums* later) {
  const launch_site site(stream);
  weight_gradient<T> work{};
  work.in = x;
  work.gradient = dy;
  work.result = target_of<accumulate_t<T>>(dw, nullptr, plan.slices > 1 ? partials : nullptr, accumulate,
                                           geometry.out_channels);
  work.geometry = geometry;
  work.elements = static_cast<index_t>(geometry.patch()) * geometry.out_channels;
  work.by_channels = divider::by(geometry.in_channels);
  work.by_area = divider::by(std::max(1, geometry.out_height * geometry.out_width));
  work.by_width = divider::by(std::max(1, geometry.out_width));
  work.slices = plan.slices;
  work.gradient_vectors = whole_vectors<T>(geometry.out_channels, dy);
  const bool in_vectors = whole_vectors<T>(geometry.in_channels, x);
  with_block<T, 128>(plan, in_vectors, [&](auto block) {
    using shape = decltype(block);
    const dim3 blocks(static_cast<unsigned>(ceil_div(geometry.patch(), shape::rows) *
                                            ceil_div(geometry.out_channels, shape::columns)),
                      static_cast<unsigned>(plan.slices));
    launch(site, {blocks, shape::threads, weight_gradient_memory<T, shape>::bytes},
           correlate_weight<T, shape>, work);
  });
  if (plan.slices == 1) return;
  add_slices_or_push(site, {dw, partials, work.elements, plan.slices, accumulate, geometry.out_channels},
                     later);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                         \
  template void conv_forward<T>(cudaStream_t, const conv_geometry&, const conv_plan&, const T*, const T*, \
                                const T*, T*, float*, const moment_workspace&);                           \
  template void conv_backward_input<T>(cudaStream_t, const conv_geometry&, const conv_plan&, const T*,    \
                                       const T*, T*, bool, float*, const moment_workspace&,               \
                                       const gradient_sum_input<T>&);                                     \
  template void conv_backward_weight<T>(cudaStream_t, const conv_geometry&, const conv_plan&, const T*,   \
                                        const T*, accumulate_t<T>*, bool, float*, slice_sums*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
