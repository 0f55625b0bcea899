// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of halo_conv.hpp. A thread block keeps its weight in shared memory: all columns, or the part of
/// them that it computes. Each of its four warp groups computes one block of 8 x 8 pixels after another,
/// independently of the other groups. The 64 pixels are the rows of a matrix product. For another tap, the
/// left operand of the product begins at another pixel of the same tile.

#include <algorithm>

#include <pufferfish/gpu/kernels/conv/halo_conv.hpp>
#include <pufferfish/gpu/kernels/conv/halo_moments.cuh>
#include <pufferfish/gpu/kernels/conv/halo_store.cuh>
#include <pufferfish/gpu/kernels/conv/halo_tiles.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Arguments of `correlate_halo`: a correlation of `in`, whose images have in_height x in_width pixels of
/// `depth` channels, with results of out_height x out_width pixels of `columns` channels. Output (y, x) reads
/// the inputs (y - top, x - left) .. (y - top + 2, x - left + 2). Inputs outside of the image count as zeros.
/// `weight`: see halo_weight.
///
/// With `up` (columns x up_columns, dense), `inner` receives the results, unless it is null, and `out`
/// receives the product of the results and `up`. Without `up`, `out` receives the results, which are added to
/// its old values if `add` is set. `bias` (one element for each channel of `out`) may be null.
template <class T>
struct halo_correlation {
  const T* in;
  const T* weight;
  const T* up;
  const T* bias;
  T* inner;
  T* out;
  block_grid blocks;  ///< blocks of pixels of the result
  int in_height, in_width, depth;
  int out_height, out_width, columns, up_columns;
  int top, left;
  bool add;
  moment_store moments = {};  ///< moments of `out`, forward only
};

/// The weight in shared memory, as the right operand of products: `Columns` columns from column `first` on,
/// for all taps.
///
/// Forward: the weight in device memory is [tap][depth][columns], and planes of 8 columns in shared memory
/// hold its rows [tap][depth], 16 bytes each. Backward: the weight in device memory is [tap][columns][depth],
/// and planes of 8 elements of the depth hold its rows [tap][column], with the taps in reverse order. 16
/// bytes of padding follow each plane.
template <class T, int Columns, bool Backward>
class halo_weight {
 public:
  /// `memory`: bytes() bytes of shared memory, aligned to 16 bytes.
  __device__ halo_weight(unsigned char* memory, const halo_correlation<T>& work)
      : memory_(memory), depth_(work.depth), plane_((Backward ? 9 * Columns : 9 * work.depth) * 16 + 16) {}

  /// Number of bytes of shared memory that the weight occupies, with its padding.
  __device__ int bytes() const { return plane_ * (Backward ? depth_ : Columns) / 8; }

  /// Starts the copies (copy_async) of the columns first .. first + Columns - 1, by all `threads` threads of
  /// the block, of which the calling thread is number `thread`.
  __device__ void copy(const halo_correlation<T>& work, int first, int thread, int threads) const {
    const int runs = (Backward ? depth_ : Columns) / 8, rows = 9 * (Backward ? Columns : depth_);
    for (int at = thread; at < rows * runs; at += threads) {
      const int row = at / runs, run = at - row * runs;
      const T* from = nullptr;
      if constexpr (Backward) {
        const int tap = row / Columns, column = row - tap * Columns;
        from =
            work.weight + (static_cast<index_t>(8 - tap) * work.columns + first + column) * depth_ + run * 8;
      } else {
        from = work.weight + static_cast<index_t>(row) * work.columns + first + run * 8;
      }
      copy_async<16, true>(memory_ + run * plane_ + row * 16, from);
    }
  }

  /// Whether the 8 numbers in a row of the operand's blocks are consecutive along or across the depth.
  static constexpr dense layout = Backward ? dense::depth : dense::width;
  /// The operand of the first tap and the first 16 elements of the depth.
  __device__ block_matrix first() const {
    return Backward ? block_matrix(memory_, 128, plane_) : block_matrix(memory_, plane_, 128);
  }
  /// Number of bytes from first() to the operand of a tap and the depth elements k .. k + 15; k is a multiple
  /// of 16.
  __device__ int place(int tap, int k) const {
    return Backward ? tap * Columns * 16 + k / 8 * plane_ : (tap * depth_ + k) * 16;
  }

 private:
  unsigned char* memory_;
  int depth_, plane_;
};

/// Computes a halo_correlation. Grid: blockIdx.y is the part of `Columns` columns. Of the gridDim.x thread
/// blocks of a part, warp group g of thread block b computes the blocks of pixels b + (g + 4 n) gridDim.x,
/// n = 0, 1, ... Dynamic shared memory: the weight, then `up` if Paired, then the sums of halo_moments if
/// moments are wanted, then the tiles of each group.
///
/// `Chunk`: number of input channels in a tile. `Backward`: the weight has the layout and order of taps of
/// the gradient of the input. `Paired`: the results are rounded to T and multiplied by `up`, without leaving
/// the registers; a thread block then computes all columns.
template <class T, int Columns, int Chunk, bool Backward, bool Paired>
static __global__ void __launch_bounds__(plans::halo_groups* group_threads, 1)
    correlate_halo(grid_dependency earlier, halo_correlation<T> work) {
  earlier.wait();
#if !defined(PUFFERFISH_WARP_GROUPS)
  absent_mark();
#else
  constexpr int side = plans::halo_side + plans::halo_border, slots = plans::halo_slots;
  using tiles = pixel_tiles<T, side, Chunk, group_threads>;
  static_assert(tiles::bytes == plans::halo_tile_bytes(Chunk));
  constexpr int threads = plans::halo_groups * group_threads, up_chunk = 64;
  const int thread = block_thread(), group = warp_group(), own = thread % group_threads;
  const int first_column = static_cast<int>(blockIdx.y) * Columns;

  unsigned char* memory = dynamic_shared<unsigned char>();
  const halo_weight<T, Columns, Backward> weight(memory, work);
  weight.copy(work, first_column, thread, threads);
  memory += weight.bytes();
  unsigned char* const ups = memory;
  constexpr int up_plane = Columns * 16;
  if constexpr (Paired) {
    const int runs = work.up_columns / 8;
    for (int at = thread; at < Columns * runs; at += threads) {
      const int row = at / runs, run = at - row * runs;
      copy_async<16, true>(ups + run * up_plane + row * 16, work.up + row * work.up_columns + run * 8);
    }
    memory += Columns * work.up_columns * static_cast<int>(sizeof(T));
  }
  commit_copies();
  const bool collects = !Backward && work.moments.wanted();
  const int moment_columns = Paired ? work.up_columns : Columns;
  halo_moments moments(memory, moment_columns, group * (group_threads / warp_threads) + own / warp_threads);
  if (collects) memory += plans::halo_moment_bytes(moment_columns);
  unsigned char* const all_tiles = memory;
  memory += group * slots * tiles::bytes;

  const block_grid& all = work.blocks;
  const int step = static_cast<int>(gridDim.x) * plans::halo_groups;
  const int first = static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) * group;
  const int chunks = work.depth / Chunk, rounds = ceil_div(all.blocks, step);
  const int units = rounds * chunks;

  tiles copies(work.in, work.in_height, work.in_width, work.depth, own);
  int copied = first;  // block of pixels of the next copies; copied_chunk: its chunk, to: their slot
  int copied_chunk = 0, to = 0;
  // Starts the copies of the next chunk of channels. The tiles of a group are used in turn.
  const auto copy_next = [&] {
    if (copied_chunk == 0) {
      const pixel_block at = all.at(copied < all.blocks ? copied : 0);
      copies.find(at.image, at.y - work.top, at.x - work.left, copied < all.blocks);
    }
    copies.copy(memory + to * tiles::bytes, copied_chunk * Chunk);
    to = to + 1 == slots ? 0 : to + 1;
    if (++copied_chunk < chunks) return;
    copied_chunk = 0;
    copied += step;
  };
#pragma unroll
  for (int unit = 0; unit < slots - 1; ++unit) {
    if (unit < units) copy_next();
    commit_copies();
  }
  wait_for_copies<slots - 1>();
  publish_to_products();
  __syncthreads();  // the weight is now visible to all threads

  group_sums<T, Columns> sums;
  sums.clear();
  const block_matrix right = weight.first();
  int block = first;
  int chunk = 0, slot = 0;
  for (int unit = 0; unit < units; ++unit) {
    wait_for_copies<slots - 2>();
    publish_to_products();
    group_barrier(group);  // the tile of this unit is complete, and no warp reads the previous one any more
    const block_matrix left(memory + slot * tiles::bytes, side * 16, tiles::plane);
    begin_products(sums);
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) {
#pragma unroll
      for (int k = 0; k < Chunk; k += 16) {
        sums.template add<dense::depth, halo_weight<T, Columns, Backward>::layout>(
            left.at((tap / 3 * side + tap % 3) * 16 + k / 8 * tiles::plane),
            right.at(weight.place(tap, chunk * Chunk + k)));
      }
    }
    end_products();
    if (unit + slots - 1 < units) copy_next();
    commit_copies();
    wait_for_products(sums);
    slot = slot + 1 == slots ? 0 : slot + 1;
    if (++chunk < chunks) continue;
    chunk = 0;

    const pixel_block at = all.at(block < all.blocks ? block : 0);
    const int height = block < all.blocks ? work.out_height - at.y : 0, width = work.out_width - at.x;
    const index_t pixel = (static_cast<index_t>(at.image) * work.out_height + at.y) * work.out_width + at.x;
    block += step;
    if (collects) moments.new_block(height, width);
    if constexpr (!Paired) {
      const T* const bias = work.bias == nullptr ? nullptr : work.bias + first_column;
      block_target<T>{work.out + pixel * work.columns + first_column,
                      bias,
                      height,
                      width,
                      work.out_width * work.columns,
                      work.columns,
                      work.add}
          .store(sums, own);
      if (collects) moments.add(sums, 0, height, width);
    } else {
      // Sums of a thread, rounded to 16 bits, are a left operand in registers.
      array_of<std::uint32_t[4], Columns / 16> words;
#pragma unroll
      for (int k = 0; k < Columns / 16; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          words[k][i] = packed<T>(sums.values[8 * k + 2 * i], sums.values[8 * k + 2 * i + 1]);
        }
      }
      if (work.inner != nullptr) {
        block_target<T>{work.inner + pixel * Columns, nullptr, height, width,
                        work.out_width * Columns,     Columns, false}
            .store(sums, own);
      }
      for (int column = 0; column < work.up_columns; column += up_chunk) {
        group_sums<T, up_chunk> results;
        results.clear();
        const block_matrix up(ups + column / 8 * up_plane, up_plane, 128);
        begin_products(results);
#pragma unroll
        for (int k = 0; k < Columns / 16; ++k) {
          results.template add<dense::width>(words[k], up.at(k * 256));
        }
        end_products();
        wait_for_products(results);
        const T* const bias = work.bias == nullptr ? nullptr : work.bias + column;
        block_target<T>{work.out + pixel * work.up_columns + column,
                        bias,
                        height,
                        width,
                        work.out_width * work.up_columns,
                        work.up_columns,
                        false}
            .store(results, own);
        if (collects) moments.add(results, column, height, width);
      }
    }
    sums.clear();
  }
  if (collects) {
    moments.finish(work.moments, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y), first_column,
                   all_tiles);
  }
#endif
}

/// Calls f(columns, chunk) with plan.columns and plan.chunk as integral constants.
template <class F>
inline void with_halo_plan(const halo_plan& plan, F f) {
  const auto chunks = [&](auto columns) {
    if (plan.chunk == 16) return f(columns, std::integral_constant<int, 16>());
    f(columns, std::integral_constant<int, 32>());
  };
  if (plan.columns == 16) return chunks(std::integral_constant<int, 16>());
  if (plan.columns == 32) return chunks(std::integral_constant<int, 32>());
  chunks(std::integral_constant<int, 64>());
}

/// Starts correlate_halo. About as many thread blocks as run at the same time on a large device share the
/// blocks of pixels and the parts of the columns. Throws backend_error if the launch fails.
template <class T, bool Backward, bool Paired>
inline void run_halo(const launch_site& site, const halo_plan& plan, halo_correlation<T> work,
                     const moment_workspace& moments = {}) {
  const index_t parts = work.columns / plan.columns;
  const index_t at_once = std::max<index_t>(plans::halo_blocks / parts, 1);
  const index_t blocks = std::min<index_t>(work.blocks.blocks, at_once);
  work.moments = moment_store::of(moments, blocks, Paired ? work.up_columns : work.columns);
  const index_t more =
      work.moments.wanted() ? plans::halo_moment_bytes(Paired ? work.up_columns : plan.columns) : 0;
  with_halo_plan(plan, [&](auto columns, auto chunk) {
    launch(site,
           {{static_cast<unsigned>(blocks), static_cast<unsigned>(parts)},
            plans::halo_groups * group_threads,
            static_cast<std::size_t>(plan.shared_bytes + more)},
           correlate_halo<T, columns, chunk, Backward, Paired>, work);
  });
}

bool halo_available() {
  return has_warp_groups(reinterpret_cast<const void*>(correlate_halo<__nv_bfloat16, 64, 32, false, false>));
}

template <class T>
void halo_forward(cudaStream_t stream, const conv_geometry& g, const halo_plan& plan, const T* x, const T* w,
                  const T* bias, T* y, const moment_workspace& moments) {
  run_halo<T, false, false>(
      stream, plan,
      {x, w, nullptr, bias, nullptr, y, block_grid::of(g.images, g.out_height, g.out_width), g.in_height,
       g.in_width, g.in_channels, g.out_height, g.out_width, g.out_channels, 0, g.padding_height,
       g.padding_width, false},
      moments);
}

template <class T>
void halo_backward_input(cudaStream_t stream, const conv_geometry& g, const halo_plan& plan, const T* dy,
                         const T* w, T* dx, bool add) {
  run_halo<T, true, false>(
      stream, plan,
      {dy, w, nullptr, nullptr, nullptr, dx, block_grid::of(g.images, g.in_height, g.in_width), g.out_height,
       g.out_width, g.out_channels, g.in_height, g.in_width, g.in_channels, 0, 2 - g.padding_height,
       2 - g.padding_width, add});
}

template <class T>
void halo_low_rank_forward(cudaStream_t stream, const conv_geometry& g, const halo_plan& plan, const T* x,
                           const T* down, const T* up, int out_channels, const T* bias, T* t, T* y,
                           const moment_workspace& moments) {
  run_halo<T, false, true>(stream, plan,
                           {x, down, up, bias, t, y, block_grid::of(g.images, g.out_height, g.out_width),
                            g.in_height, g.in_width, g.in_channels, g.out_height, g.out_width, g.out_channels,
                            out_channels, g.padding_height, g.padding_width, false},
                           moments);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                         \
  template void halo_forward<T>(cudaStream_t, const conv_geometry&, const halo_plan&, const T*, const T*, \
                                const T*, T*, const moment_workspace&);                                   \
  template void halo_backward_input<T>(cudaStream_t, const conv_geometry&, const halo_plan&, const T*,    \
                                       const T*, T*, bool);                                               \
  template void halo_low_rank_forward<T>(cudaStream_t, const conv_geometry&, const halo_plan&, const T*,  \
                                         const T*, const T*, int, const T*, T*, T*,                       \
                                         const moment_workspace&);
PUFFERFISH_INSTANTIATE(__nv_bfloat16)
PUFFERFISH_INSTANTIATE(__half)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
