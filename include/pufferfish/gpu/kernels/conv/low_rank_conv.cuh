// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The low-rank convolution in one pass. Forward: a block computes all channels of `down` for its pixels,
/// keeps them in shared memory, and multiplies them by `up` from there. Backward: a block uses the tile of dy
/// that it has read for both products, dt and dup.
///
/// Ranks are padded with zeros to 16, 32 or 64. Forward: a block has all ranks and all output channels of 64
/// or 128 pixels. Backward: a block has a slice of the pixels, in tiles of 64, and all output channels, 64 at
/// a time (32 for padded rank 64).

#include <pufferfish/gpu/kernels/conv/conv.cuh>
#include <pufferfish/gpu/kernels/conv/low_rank_conv.hpp>

PUFFERFISH_KERNELS_BEGIN

// ---------------------------------------------------------------------------------------------------------
// Forward

/// Rows pixels, Rank channels between the factors, 64 channels of the output at a time. 128 threads. Dynamic
/// shared memory: in the first product `slots` times (left: rows x depth patches, right: depth x Rank of
/// `down`); in the second one the inner tile, rows x Rank, then `slots` tiles of `up`, up_depth x chunk; at
/// the end `rows` gathered_pixel and the table of taps.
template <bool Tensor, class T, int Rows, int Rank, int Run>
struct low_rank_block {
  static constexpr int rows = Rows, rank = Rank, run = Run, chunk = 64, threads = 128, slots = 3;
  static constexpr int depth = static_cast<int>(conv_step * sizeof(float) / sizeof(T));
  /// Elements of the second product's sums in one step.
  static constexpr int up_depth = depth < Rank ? depth : Rank;

  static constexpr int thread_results = Rows * Rank / threads;
  static constexpr int thread_rows = thread_results >= 32 ? 8 : 4;
  static constexpr int warp_rows = Rows / 4;
  using down_product = std::conditional_t<
      Tensor, tensor_product<T, Rows, Rank, warp_rows, Rank, dense::depth, dense::width>,
      simt_product<Rows, Rank, thread_rows, thread_results / thread_rows, dense::depth, dense::width>>;
  using up_product = std::conditional_t<
      Tensor, tensor_product<T, Rows, chunk, Rows / 2, chunk / 2, dense::depth, dense::width>,
      simt_product<Rows, chunk, 8, Rows * chunk / threads / 8, dense::depth, dense::width>>;
  static_assert(down_product::threads == threads && up_product::threads == threads);

  // Memory of the first product's tiles; later of its result and of tiles of `up`.
  static constexpr int left_stride = tile_stride<T, dense::depth>(depth);
  static constexpr int right_stride = tile_stride<T, dense::width>(Rank);
  static constexpr int inner_stride = tile_stride<T, dense::depth>(Rank);
  static constexpr int up_stride = tile_stride<T, dense::width>(chunk);
  static constexpr int left = Rows * left_stride, right = depth * right_stride;
  static constexpr int inner = Rows * inner_stride, up = up_depth * up_stride;
  static constexpr std::size_t first_bytes = slots * (left + right) * sizeof(T);
  static constexpr std::size_t second_bytes = (inner + slots * up) * sizeof(T);
  static constexpr std::size_t tiles = first_bytes > second_bytes ? first_bytes : second_bytes;
  static constexpr std::size_t bytes = tiles + Rows * sizeof(gathered_pixel<T>);
};

/// Arguments of correlate_low_rank.
template <class T>
struct low_rank_correlation {
  const T* in;
  const T* down;
  const T* up;
  result_target<T> inner, result;
  conv_geometry geometry;  ///< geometry of `down`
  divider by_channels;
  bool down_vectors, up_vectors;
};

/// A copy of a target without bias, slices and addition, whose code the compiler can then leave out.
template <class T>
__device__ inline result_target<T> plain(const result_target<T>& target) {
  return {target.out, nullptr, nullptr, false, target.columns, target.runs};
}

/// Block bx: pixels bx rows .. of the output, all ranks and all output channels. First product: t = patches x
/// down, over the depth of the patch. Then the chunks of 64 output channels one after another, y = t
/// up + bias, up_depth elements of the rank a step.
template <class T, class Block>
static __global__ void __launch_bounds__(Block::threads, 3)
    correlate_low_rank(grid_dependency earlier, low_rank_correlation<T> work) {
  earlier.wait();
  const conv_geometry& g = work.geometry;
  const int thread = block_thread(), rank = g.out_channels;
  const index_t first_pixel = static_cast<index_t>(blockIdx.x) * Block::rows;
  const int pixels = remaining(g.out_pixels(), first_pixel, Block::rows);
  const gathering<T> patches(work.in, forward_rows(g), forward_columns(g), g.in_channels, work.by_channels);
  T* const tiles = dynamic_shared<T>();
  auto* const targets = reinterpret_cast<gathered_pixel<T>*>(dynamic_shared<unsigned char>() + Block::tiles);
  find_pixels<Block::rows, Block::threads, (Block::run > 1)>(targets, patches, first_pixel, g.images,
                                                             g.out_height, g.out_width, rank, thread);
  auto* const taps = reinterpret_cast<tap_place*>(targets + Block::rows);
  if constexpr (Block::run > 1) list_taps<Block::threads>(taps, patches, g.kernel_width, 0, thread);
  __syncthreads();

  patch_rows<T, Block::rows, Block::depth, Block::left_stride, Block::threads, Block::run> rows(
      patches, targets, taps, 0, thread);
  const row_tiles<T, Block::depth, Block::rank, Block::right_stride, Block::threads> downs(
      work.down, rank, patches.depth, rank, work.down_vectors, thread);
  typename Block::down_product inner(thread);
  pipeline<Block::slots>(
      0, ceil_div(patches.depth, Block::depth),
      [&](int slot, int) {
        T* const left = tiles + slot * (Block::left + Block::right);
        rows.copy(left);
        downs.copy(left + Block::left, rows.k());
        rows.advance();
      },
      [&](int slot, int) {
        const T* const left = tiles + slot * (Block::left + Block::right);
        inner.template multiply<Block::depth, Block::left_stride, Block::right_stride>(left,
                                                                                       left + Block::left);
      });

  T* const kept = tiles;
  inner.for_each([&](int row, int column, const auto& run) {
#pragma unroll
    for (int i = 0; i < Block::down_product::width; ++i) {
      kept[row * Block::inner_stride + column + i] = static_cast<T>(run.values[i]);
    }
  });
  if (work.inner.out != nullptr) {
    plain(work.inner).at(first_pixel * rank).store_rows(inner, 0, pixels);
  }

  T* const ups = tiles + Block::inner;
  const int columns = work.result.columns, up_steps = ceil_div(rank, Block::up_depth);
  typename Block::up_product sums(thread);
  result_target<T> result = plain(work.result).at(first_pixel * columns);
  result.bias = work.result.bias;
  row_tiles<T, Block::up_depth, Block::chunk, Block::up_stride, Block::threads> up_tiles(
      work.up, columns, rank, columns, work.up_vectors, thread);
  int loaded = 0, used = 0, chunk = 0;  // elements of the rank, copied and multiplied; first column
  // The pipeline's first barrier is between the writes to `kept` and the reads.
  pipeline<Block::slots>(
      0, ceil_div(columns, Block::chunk) * up_steps,
      [&](int slot, int) {
        up_tiles.copy(ups + slot * Block::up, loaded);
        loaded += Block::up_depth;
        if (loaded < rank) return;
        loaded = 0;
        up_tiles.move(Block::chunk);
      },
      [&](int slot, int) {
        sums.template multiply<Block::up_depth, Block::inner_stride, Block::up_stride>(
            kept + used, ups + slot * Block::up);
        used += Block::up_depth;
        if (used < rank) return;
        result.store_rows(sums, chunk, pixels);
        sums.clear();
        used = 0;
        chunk += Block::chunk;
      });
}

/// Calls f(tensor, padded rank) with integral constants.
template <class T, class F>
inline void with_rank(bool tensor, int rank, F f) {
  const auto ranks = [&](auto on) {
    const int padded = plans::padded_rank(rank);
    if (padded == 16) return f(on, std::integral_constant<int, 16>());
    if (padded == 32) return f(on, std::integral_constant<int, 32>());
    f(on, std::integral_constant<int, 64>());
  };
  if constexpr (sizeof(T) == 4) {
    if (!tensor) return ranks(std::false_type());
  }
  ranks(std::true_type());
}

/// Grid: tiles of plan.rows pixels (64 if the input's channels cannot be copied in vectors); 128 threads.
template <class T>
void low_rank_conv_forward(cudaStream_t stream, const conv_geometry& geometry, const low_rank_plan& plan,
                           const T* x, const T* down, const T* up, int out_channels, const T* bias, T* t,
                           T* y) {
  const launch_site site(stream);
  constexpr int width = vector_width<T>;
  const int rank = geometry.out_channels;
  low_rank_correlation<T> work{};
  work.in = x;
  work.down = down;
  work.up = up;
  work.inner = target_of<T>(t, nullptr, nullptr, false, rank);
  work.result = target_of(y, bias, nullptr, false, out_channels);
  work.geometry = geometry;
  work.by_channels = divider::by(geometry.in_channels);
  const bool in_vectors = patches_in_vectors(geometry, geometry.in_channels, x);
  work.down_vectors = whole_vectors<T>(rank, down);
  work.up_vectors = whole_vectors<T>(out_channels, up);
  with_rank<T>(plan.tensor, rank, [&](auto tensor, auto padded) {
    const auto start = [&](auto rows, auto run) {
      using block = low_rank_block<decltype(tensor)::value, T, decltype(rows)::value, decltype(padded)::value,
                                   decltype(run)::value>;
      launch(site,
             {static_cast<unsigned>(ceil_div(geometry.out_pixels(), block::rows)), block::threads,
              block::bytes + tap_bytes<block::run>(geometry)},
             correlate_low_rank<T, block>, work);
    };
    using rows64 = std::integral_constant<int, 64>;
    using rows128 = std::integral_constant<int, 128>;
    if (!in_vectors) return start(rows64(), std::integral_constant<int, 1>());
    if (plan.rows == 128) return start(rows128(), std::integral_constant<int, width>());
    start(rows64(), std::integral_constant<int, width>());
  });
}

// ---------------------------------------------------------------------------------------------------------
// Backward

/// 128 threads, 256 for rank 64. Dynamic shared memory: 2 times (gradient: rows x chunk, up: Rank x chunk), 2
/// times (t: rows x Rank), then the sums of dup, Rank x padded columns floats: plan.shared_bytes in all.
template <bool Tensor, class T, int Rank>
struct up_gradient_block {
  static constexpr int rows = plans::backward_rows, rank = Rank, chunk = plans::backward_chunk(Rank);
  static constexpr int threads = Rank == 64 ? 256 : 128, slots = 2;

  // dt: rows x Rank, over the chunk. dup: Rank x chunk, over the rows.
  static constexpr int inner_results = rows * Rank / threads, up_results = Rank * chunk / threads;
  using inner_product = std::conditional_t<
      Tensor,
      tensor_product<T, rows, Rank, Rank == 64 ? 32 : 16, Rank == 32 ? 32 : 16, dense::depth, dense::depth>,
      simt_product<rows, Rank, 4, inner_results / 4, dense::depth, dense::depth>>;
  using up_product =
      std::conditional_t<Tensor,
                         tensor_product<T, Rank, chunk, 16, Rank == 32 ? 32 : 16, dense::width, dense::width>,
                         simt_product<Rank, chunk, 4, up_results / 4, dense::width, dense::width>>;
  static_assert(inner_product::threads == threads && up_product::threads == threads);

  // Gradients are read along both of their directions: rows 16 bytes apart in the banks suit both.
  static constexpr int stride = tile_stride<T, dense::depth>(chunk);
  static constexpr int inner_stride = tile_stride<T, dense::depth>(Rank);
  static constexpr int gradient = rows * stride, up = Rank * stride, inner = rows * inner_stride;
  static_assert(gradient + up + inner == plans::backward_tiles(Rank, sizeof(T)));
};

/// Arguments of up_gradients. `slices`: number of blocks.
template <class T>
struct up_gradient {
  const T* t;
  const T* gradient;
  const T* up;
  result_target<T> inner;
  result_target<accumulate_t<T>> result;
  index_t pixels;
  int rank, slices;
  divider by_chunks;
  bool t_vectors, gradient_vectors, up_vectors;
};

/// x: slices of the pixels, in tiles of Block::rows. For each tile and each chunk of the output's channels,
/// the chunk's part of dt is added in registers, and that of dup in shared memory. Block bx: tiles tiles
/// bx / slices .. tiles (bx + 1) / slices - 1 of 64 pixels. Its part of dup is written to slice bx of the
/// partial results, which add_slices adds in order.
template <class T, class Block>
static __global__ void __launch_bounds__(Block::threads)
    up_gradients(grid_dependency earlier, up_gradient<T> work) {
  earlier.wait();
  const int thread = block_thread(), slice = static_cast<int>(blockIdx.x);
  const int columns = work.result.columns, chunks = ceil_div(columns, Block::chunk);
  const int sum_stride = chunks * Block::chunk;
  const index_t tiles = ceil_div(work.pixels, Block::rows), first_tile = tiles * slice / work.slices;
  const int own_tiles = static_cast<int>(tiles * (slice + 1) / work.slices - first_tile);
  T* const memory = dynamic_shared<T>();
  T* const inners = memory + Block::slots * (Block::gradient + Block::up);
  auto* const up_sums = reinterpret_cast<float*>(inners + Block::slots * Block::inner);
  for (int i = thread; i < Block::rank * sum_stride; i += Block::threads) up_sums[i] = 0.0F;

  typename Block::inner_product inner(thread);
  pipeline<Block::slots>(
      0, own_tiles * chunks,
      [&](int slot, int step) {
        const int tile = work.by_chunks.quotient(step);
        const int column = work.by_chunks.remainder(step, tile) * Block::chunk;
        const index_t pixel = (first_tile + tile) * Block::rows;
        const int rows = remaining(work.pixels, pixel, Block::rows);
        const int length = remaining(columns, column, Block::chunk);
        T* const gradient = memory + slot * (Block::gradient + Block::up);
        copy_tile<Block::rows, Block::chunk, Block::stride, Block::threads>(
            gradient, work.gradient + pixel * columns + column, columns, rows, length, work.gradient_vectors,
            thread);
        copy_tile<Block::rank, Block::chunk, Block::stride, Block::threads>(
            gradient + Block::gradient, work.up + column, columns, work.rank, length, work.up_vectors,
            thread);
        if (column > 0) return;
        // Slots are filled at most slots - 1 steps ahead, and so are at most slots - 1 tiles of t.
        copy_tile<Block::rows, Block::rank, Block::inner_stride, Block::threads>(
            inners + tile % Block::slots * Block::inner, work.t + pixel * work.rank, work.rank, rows,
            work.rank, work.t_vectors, thread);
      },
      [&](int slot, int step) {
        const int tile = work.by_chunks.quotient(step);
        const int column = work.by_chunks.remainder(step, tile) * Block::chunk;
        const T* const gradient = memory + slot * (Block::gradient + Block::up);
        inner.template multiply<Block::chunk, Block::stride, Block::stride>(gradient,
                                                                            gradient + Block::gradient);
        if (column + Block::chunk >= columns) {
          const index_t pixel = (first_tile + tile) * Block::rows;
          const int rows = remaining(work.pixels, pixel, Block::rows);
          plain(work.inner).at(pixel * work.rank).store_rows(inner, 0, rows);
          inner.clear();
        }
        typename Block::up_product up(thread);
        up.template multiply<Block::rows, Block::inner_stride, Block::stride>(
            inners + tile % Block::slots * Block::inner, gradient);
        // Every thread adds to elements of its own.
        up.for_each([&](int row, int channel, const auto& run) {
#pragma unroll
          for (int i = 0; i < Block::up_product::width; ++i) {
            up_sums[row * sum_stride + column + channel + i] += run.values[i];
          }
        });
      });

  float* const partials = work.result.partials + static_cast<index_t>(slice) * work.rank * columns;
  for (int row = 0; row < work.rank; ++row) {
    for (int column = thread; column < columns; column += Block::threads) {
      partials[static_cast<index_t>(row) * columns + column] = up_sums[row * sum_stride + column];
    }
  }
}

/// Grid: plan.slices blocks of 128 or 256 threads with plan.shared_bytes of shared memory, then add_slices.
template <class T>
void low_rank_conv_backward_up(cudaStream_t stream, const low_rank_plan& plan, index_t pixels, int rank,
                               int out_channels, const T* t, const T* dy, const T* up, accumulate_t<T>* dup,
                               bool accumulate, T* dt, float* partials) {
  const launch_site site(stream);
  up_gradient<T> work{};
  work.t = t;
  work.gradient = dy;
  work.up = up;
  work.inner = target_of<T>(dt, nullptr, nullptr, false, rank);
  work.result = target_of<accumulate_t<T>>(dup, nullptr, partials, accumulate, out_channels);
  work.pixels = pixels;
  work.rank = rank;
  work.slices = plan.slices;
  work.t_vectors = whole_vectors<T>(rank, t);
  work.gradient_vectors = whole_vectors<T>(out_channels, dy);
  work.up_vectors = whole_vectors<T>(out_channels, up);
  with_rank<T>(plan.tensor, rank, [&](auto tensor, auto padded) {
    using block = up_gradient_block<decltype(tensor)::value, T, decltype(padded)::value>;
    work.by_chunks = divider::by(ceil_div(out_channels, block::chunk));
    launch(site,
           {static_cast<unsigned>(plan.slices), block::threads, static_cast<std::size_t>(plan.shared_bytes)},
           up_gradients<T, block>, work);
  });
  add_slices(site, plan.slices, static_cast<index_t>(rank) * out_channels, work.result);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                            \
  template void low_rank_conv_forward<T>(cudaStream_t, const conv_geometry&, const low_rank_plan&, const T*, \
                                         const T*, const T*, int, const T*, T*, T*);                         \
  template void low_rank_conv_backward_up<T>(cudaStream_t, const low_rank_plan&, index_t, int, int,          \
                                             const T*, const T*, const T*, accumulate_t<T>*, bool, T*,       \
                                             float*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
