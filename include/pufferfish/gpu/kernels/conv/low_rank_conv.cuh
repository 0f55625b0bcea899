// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The low-rank convolution in one pass: a block computes all channels of `down` for its pixels, keeps them
/// in shared memory, and multiplies them by `up` from there. Ranks are padded with zeros to 16, 32 or 64. A
/// block has all ranks and all output channels of 64 or 128 pixels.

#include <pufferfish/gpu/kernels/conv/conv.cuh>
#include <pufferfish/gpu/kernels/conv/low_rank_conv.hpp>
#include <pufferfish/gpu/kernels/conv/tile_moments.cuh>

PUFFERFISH_KERNELS_BEGIN

/// The type of a block of 128 threads: Rows pixels, Rank channels between the factors, and 64 channels of the
/// output at a time. Dynamic shared memory in the first product: `slots` pairs of tiles (left: rows x depth
/// patches, right: depth x Rank of `down`). In the second product: the inner tile, rows x Rank, then `slots`
/// tiles of `up`, up_depth x chunk. At the end: `rows` gathered_pixel and the table of taps.
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
  moment_store moments;  ///< moments of the result; a part is a block
  int moment_place;      ///< byte of the dynamic shared memory at which that of save_moments begins
};

/// A copy of a target without bias, slices and addition. The compiler can then leave out the code for these.
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
  // The first barrier of the pipeline separates the writes to `kept` from the reads.
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
        if (work.moments.wanted()) {
          // The barrier of the next step separates the reads from the writes of the next chunk.
          save_moments<T>(work.moments, sums, pixels, chunk, static_cast<int>(blockIdx.x),
                          reinterpret_cast<float*>(dynamic_shared<unsigned char>() + work.moment_place));
        }
        sums.clear();
        used = 0;
        chunk += Block::chunk;
      });
  if (!work.moments.wanted()) return;
  static_assert(moment_doubles(Block::threads) * sizeof(double) <= Block::tiles);
  finish_moments_apart(work.moments, static_cast<int>(blockIdx.x), 0, 0, columns,
                       reinterpret_cast<double*>(after_loop(tiles)));
}

/// Calls f(tensor, padded rank) with both arguments as integral constants.
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
                           T* y, const moment_workspace& moments) {
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
      const index_t blocks = ceil_div(geometry.out_pixels(), block::rows);
      std::size_t bytes = block::bytes + tap_bytes<block::run>(geometry);
      work.moments = moment_store::of(moments, blocks, out_channels);
      if (moments.moments != nullptr) {
        bytes = ceil_div(bytes, 16) * 16;
        work.moment_place = static_cast<int>(bytes);
        bytes += tile_moments<typename block::up_product>::bytes;
      }
      launch(site, {static_cast<unsigned>(blocks), block::threads, bytes}, correlate_low_rank<T, block>,
             work);
    };
    using rows64 = std::integral_constant<int, 64>;
    using rows128 = std::integral_constant<int, 128>;
    if (!in_vectors) return start(rows64(), std::integral_constant<int, 1>());
    if (plan.rows == 128) return start(rows128(), std::integral_constant<int, width>());
    start(rows64(), std::integral_constant<int, width>());
  });
}

#define PUFFERFISH_INSTANTIATE(T)                                                                            \
  template void low_rank_conv_forward<T>(cudaStream_t, const conv_geometry&, const low_rank_plan&, const T*, \
                                         const T*, const T*, int, const T*, T*, T*,                          \
                                         const moment_workspace&);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
