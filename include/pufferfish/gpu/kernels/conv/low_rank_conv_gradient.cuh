// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Gradients of `up` and of the rank-channel activation of a low-rank convolution in one pass over dy: a
/// block uses each tile of dy for both products, dt and dup. Ranks are padded with zeros to 16, 32 or 64. A
/// block has a slice of the pixels, in tiles of 64, and all output channels, 64 at a time (32 for padded rank
/// 64).

#include <pufferfish/gpu/kernels/conv/low_rank_conv.cuh>

PUFFERFISH_KERNELS_BEGIN

/// The type of a block of 128 threads, or 256 for rank 64. Dynamic shared memory (plan.shared_bytes): two
/// pairs of tiles (gradient: rows x chunk, up: Rank x chunk), two tiles of t (rows x Rank), then the sums of
/// dup (Rank x padded columns, in float).
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

  // Gradients are read along both of their directions. Rows that begin 16 bytes apart in the banks suit both.
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

/// Grid: x counts slices of the pixels. Block bx has the tiles tiles bx / slices .. tiles (bx + 1) / slices -
/// 1 of Block::rows = 64 pixels. For each tile and each chunk of the output's channels, the chunk's part of
/// dt is added in registers, and that of dup in shared memory. The block's part of dup is written to slice bx
/// of the partial results, which add_slices adds in order.
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
        // Every thread adds only to its own elements, so no barrier is needed.
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

/// Grid: plan.slices blocks of 128 or 256 threads with plan.shared_bytes of shared memory, then add_slices
/// if the sum is not computed later.
template <class T>
void low_rank_conv_backward_up(cudaStream_t stream, const low_rank_plan& plan, index_t pixels, int rank,
                               int out_channels, const T* t, const T* dy, const T* up, accumulate_t<T>* dup,
                               bool accumulate, T* dt, float* partials, slice_sums* later) {
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
  const index_t size = static_cast<index_t>(rank) * out_channels;
  add_slices_or_push(site, {dup, partials, size, plan.slices, accumulate, out_channels}, later);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                      \
  template void low_rank_conv_backward_up<T>(cudaStream_t, const low_rank_plan&, index_t, int, int,    \
                                             const T*, const T*, const T*, accumulate_t<T>*, bool, T*, \
                                             float*, slice_sums*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
