// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of halo_conv.hpp. A thread block keeps its weight in shared memory: all columns, or the part of
/// them that it computes. Each of its four warp groups computes one block of pixels after another,
/// independently of the other groups. The 64 pixels of a block (block_layout) are the rows of a matrix
/// product. For another tap, the left operand of the product begins at another pixel of the same tile.

#include <algorithm>

#include <pufferfish/gpu/kernels/conv/halo_conv.hpp>
#include <pufferfish/gpu/kernels/conv/halo_moments.cuh>
#include <pufferfish/gpu/kernels/conv/halo_norm.cuh>
#include <pufferfish/gpu/kernels/conv/halo_operands.cuh>
#include <pufferfish/gpu/kernels/conv/halo_store.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Computes a halo_correlation. Grid: blockIdx.y is the part of `Columns` columns. Of the gridDim.x thread
/// blocks of a part, warp group g of thread block b computes the blocks of pixels b + (g + 4 n) gridDim.x,
/// n = 0, 1, ... Dynamic shared memory: the weight, then `up` if Paired, then the sums of halo_moments if
/// moments are wanted, then the numbers of halo_norm if Normalizes, then the tiles of each group.
///
/// `Chunk`: number of input channels in a tile. `Kind`: a halo_kind, the taps and the blocks; if it is a
/// gradient of the input, the weight has the layout and order of taps of halo_weight<Backward = true>.
/// `Paired`: the results are rounded to T and multiplied by `up`, without leaving the registers; a thread
/// block then computes all columns. `Normalizes`: work.in is normalized in shared memory (work.input); a tile
/// is normalized while the one before it is multiplied.
template <class T, int Columns, int Chunk, class Kind, bool Paired, bool Normalizes = false>
static __global__ void __launch_bounds__(plans::halo_groups* group_threads, 1)
    correlate_halo(grid_dependency earlier, halo_correlation<T> work) {
  earlier.wait();
#if !defined(PUFFERFISH_WARP_GROUPS)
  absent_mark();
#else
  constexpr halo_shape shape = Kind::shape;
  constexpr int slots = plans::halo_slots, spacing = shape.spacing(), results = shape.results();
  constexpr block_layout layout = shape.inputs();
  using tiles = pixel_tiles<T, layout, Chunk, group_threads, Normalizes>;
  using weights = halo_weight<T, Columns, shape>;
  using target = block_target<T, layout>;
  constexpr int threads = plans::halo_groups * group_threads, up_chunk = 64;
  const int thread = block_thread(), group = warp_group(), own = thread % group_threads;
  const int first_column = static_cast<int>(blockIdx.y) * Columns;

  unsigned char* memory = dynamic_shared<unsigned char>();
  const weights weight(memory, work);
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
  const bool collects = shape.collects() && work.moments.wanted();
  const int moment_columns = Paired ? work.up_columns : Columns;
  std::conditional_t<shape.backward, halo_gradient_sums<T>, halo_moments> moments(
      memory, moment_columns, group * (group_threads / warp_threads) + own / warp_threads);
  if (collects) memory += plans::halo_moment_bytes(moment_columns);
  if constexpr (shape.backward) {
    if (collects) moments.clear(work.norm.mean + first_column);
  }
  unsigned char* const norm_numbers = memory;
  if constexpr (Normalizes) memory += plans::halo_norm_bytes(work.depth);
  unsigned char* const all_tiles = memory;
  memory += group * slots * tiles::bytes;
  const bool is_first_part = blockIdx.y == 0;
  [[maybe_unused]] const halo_norm<T, tiles> norm(
      norm_numbers, all_tiles + (plans::halo_groups * slots + group) * tiles::bytes, work.input, work.depth,
      is_first_part);
  if constexpr (Normalizes) norm.load(thread, threads, is_first_part && blockIdx.x == 0);

  const block_grid& all = work.blocks;
  const int step = static_cast<int>(gridDim.x) * plans::halo_groups;
  const int first = static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) * group;
  const int chunks = work.depth / Chunk, rounds = ceil_div(all.blocks, step);
  const int units = rounds * chunks;

  tiles copies(work.in, all.images, work.in_height, work.in_width, work.depth, own);
  if constexpr (tiles::has_borders) {
    copies.clear(memory, slots);
    group_barrier(group);
  }
  int copied = first;  // block of pixels of the next copies; copied_chunk: its chunk, to: their slot
  int copied_chunk = 0, to = 0;
  // Starts the copies of the next chunk of channels. The tiles of a group are used in turn.
  const auto copy_next = [&] {
    if (copied_chunk == 0) {
      copies.find(layout.origin(all.at(copied), work.top, work.left));
    }
    copies.copy(memory + to * tiles::bytes, copied_chunk * Chunk);
    to = to + 1 == slots ? 0 : to + 1;
    if (++copied_chunk < chunks) return;
    copied_chunk = 0;
    copied += step;
  };
  // Normalizes a chunk of a block of pixels, in slot `at`, and starts the copies of the addend for the chunk
  // after it, `next`, if there is one.
  [[maybe_unused]] const auto normalize = [&](int of_block, int of_chunk, int at, int next) {
    wait_for_copies<slots - 2>();
    norm.template apply<shape.side>(copies, memory + at * tiles::bytes,
                                    layout.origin(all.at(of_block), work.top, work.left), of_chunk * Chunk);
    if (next < units) norm.copy_addend(copies, (copied_chunk == 0 ? chunks : copied_chunk) * Chunk - Chunk);
    commit_copies();
  };
#pragma unroll
  for (int unit = 0; unit < slots - 1; ++unit) {
    if (unit < units) copy_next();
    if constexpr (Normalizes) {
      if (unit == 0) norm.copy_addend(copies, 0);
    }
    commit_copies();
  }
  wait_for_copies<slots - 1>();
  publish_to_products();
  __syncthreads();  // the weight is now visible to all threads
  if constexpr (Normalizes) normalize(first, 0, 0, 1);

  array_of<group_sums<T, Columns>, results> sums;
#pragma unroll
  for (auto& each : sums) each.clear();
  const block_matrix right = weight.first();
  int block = first;
  int chunk = 0, slot = 0;
  for (int unit = 0; unit < units; ++unit) {
    if constexpr (!Normalizes) wait_for_copies<slots - 2>();
    publish_to_products();
    group_barrier(group);  // the tile of this unit is complete, and no warp reads the previous one any more
    const block_matrix left(memory + slot * tiles::bytes, layout.core(), tiles::plane);
    begin_products(sums);
#pragma unroll
    for (int tap = 0; tap < shape.taps(); ++tap) {
#pragma unroll
      for (int k = 0; k < Chunk; k += 16) {
        sums[shape.result_of(tap)].template add<dense::depth, weights::layout>(
            left.at(shape.place_of(tap) + k / 8 * tiles::plane),
            right.at(weight.place(tap, chunk * Chunk + k)));
      }
    }
    end_products();
    if (unit + slots - 1 < units) copy_next();
    commit_copies();
    if constexpr (Normalizes) {
      const bool same = chunk + 1 < chunks;  // whether the next chunk is of the same block of pixels
      if (unit + 1 < units) {
        normalize(same ? block : block + step, same ? chunk + 1 : 0, slot + 1 == slots ? 0 : slot + 1,
                  unit + 2);
      }
    }
    wait_for_products(sums);
    slot = slot + 1 == slots ? 0 : slot + 1;
    if (++chunk < chunks) continue;
    chunk = 0;

    const block_pixel at = all.at(block);
    block += step;
#pragma unroll
    for (int phase = 0; phase < spacing * spacing; ++phase) {
      if (phase >= results && work.add) break;  // the sums of other phases are zeros
      auto& result = sums[phase < results ? phase : 0];
      // The first result of this phase in the block, and what exists from there on.
      const int y = at.y * spacing + phase / 2, x = at.x * spacing + phase % 2;
      const block_extent extent{all.images - at.image, ceil_div(work.out_height - y, spacing),
                                ceil_div(work.out_width - x, spacing)};
      const index_t pixel = (static_cast<index_t>(at.image) * work.out_height + y) * work.out_width + x;
      const int image = work.out_height * work.out_width, line = work.out_width * spacing;
      const bool inside[] = {extent.contains(layout.result(group_row(own, 0))),
                             extent.contains(layout.result(group_row(own, 1)))};
      if constexpr (!shape.backward) {
        if (collects) moments.new_block(inside[0], inside[1]);
      }
      if constexpr (!Paired) {
        const T* const bias = work.bias == nullptr ? nullptr : work.bias + first_column;
        target{work.out + pixel * work.columns + first_column,
               bias,
               extent,
               image * work.columns,
               line * work.columns,
               spacing * work.columns,
               work.add}
            .store(result, own);
        if constexpr (shape.backward) {
          if (collects) {
            const auto row = [&](int which) {
              const block_pixel one = layout.result(group_row(own, which));
              return (one.image * image + one.y * line + one.x * spacing) * work.columns;
            };
            const index_t from = pixel * work.columns + first_column;
            const auto* const mask = reinterpret_cast<const std::uint8_t*>(work.norm.mask);
            moments.add(result, work.norm.x + from, mask == nullptr ? mask : mask + from / 8,
                        {row(0), row(1)}, inside);
          }
        } else if (collects) {
          moments.add(result, 0);
        }
      } else {
        // Sums of a thread, rounded to 16 bits, are a left operand in registers.
        array_of<std::uint32_t[4], Columns / 16> words;
#pragma unroll
        for (int k = 0; k < Columns / 16; ++k) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            words[k][i] = packed<T>(result.values[8 * k + 2 * i], result.values[8 * k + 2 * i + 1]);
          }
        }
        if (work.inner != nullptr) {
          target{
              work.inner + pixel * Columns, nullptr, extent, image * Columns, line * Columns, Columns, false}
              .store(result, own);
        }
        for (int column = 0; column < work.up_columns; column += up_chunk) {
          group_sums<T, up_chunk> products;
          products.clear();
          const block_matrix up(ups + column / 8 * up_plane, up_plane, 128);
          begin_products(products);
#pragma unroll
          for (int k = 0; k < Columns / 16; ++k) {
            products.template add<dense::width>(words[k], up.at(k * 256));
          }
          end_products();
          wait_for_products(products);
          const T* const bias = work.bias == nullptr ? nullptr : work.bias + column;
          target{work.out + pixel * work.up_columns + column,
                 bias,
                 extent,
                 image * work.up_columns,
                 line * work.up_columns,
                 work.up_columns,
                 false}
              .store(products, own);
          if (collects) moments.add(products, column);
        }
      }
      result.clear();
    }
  }
  if (collects) {
    moments.finish(work.moments, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y), first_column,
                   all_tiles);
  }
#endif
}

/// Starts correlate_halo. About as many thread blocks as run at the same time on a large device share the
/// blocks of pixels and the parts of the columns. Throws backend_error if the launch fails.
template <class T, bool Backward, bool Paired>
inline void run_halo(const launch_site& site, const halo_plan& plan, halo_correlation<T> work,
                     const moment_workspace& moments, const norm_request<T>& norm = {}) {
  const index_t parts = work.columns / plan.columns;
  const index_t at_once = std::max<index_t>(plans::halo_blocks / parts, 1);
  const index_t blocks = std::min<index_t>(work.blocks.blocks, at_once);
  work.moments = moment_store::of(moments, blocks, Paired ? work.up_columns : work.columns);
  index_t shared = plan.shared_bytes;
  if (work.moments.wanted()) shared += plans::halo_moment_bytes(Paired ? work.up_columns : plan.columns);
  if (norm.wanted()) {
    work.in = norm.m.x;
    work.input = halo_norm_input<T>::of(norm);
    shared += plans::halo_norm_bytes(plan, work.depth, norm.tail.addend != nullptr);
  }
  const grid threads{{static_cast<unsigned>(blocks), static_cast<unsigned>(parts)},
                     plans::halo_groups * group_threads,
                     static_cast<std::size_t>(shared)};
  const auto start = [&](auto kind, auto columns, auto chunk) {
    if constexpr (plans::halo_normalizes(kind.shape, columns, Paired)) {
      if (norm.wanted()) {
        return launch(site, threads, correlate_halo<T, columns, chunk, decltype(kind), Paired, true>, work);
      }
    }
    launch(site, threads, correlate_halo<T, columns, chunk, decltype(kind), Paired>, work);
  };
  with_halo_kind<Backward>(plan, [&](auto kind, auto columns) {
    constexpr halo_shape shape = kind.shape;
    if constexpr (plans::halo_supports(shape, columns) && !(Paired && !plans::halo_pairs(shape))) {
      constexpr int most = plans::most_chunk(shape);
      if constexpr (most == 32) {
        if (plan.chunk == 16) return start(kind, columns, std::integral_constant<int, 16>());
      }
      start(kind, columns, std::integral_constant<int, most>());
    }
  });
}

bool halo_available() {
  return has_warp_groups(
      reinterpret_cast<const void*>(correlate_halo<__nv_bfloat16, 64, 32, halo_kind<8, 1, false, 3>, false>));
}

template <class T>
void halo_forward(cudaStream_t stream, const conv_geometry& g, const halo_plan& plan, const T* x, const T* w,
                  const T* bias, T* y, const moment_workspace& moments, const norm_request<T>& norm) {
  run_halo<T, false, false>(
      stream, plan,
      {x, w, nullptr, bias, nullptr, y, block_grid::of(g.images, g.out_height, g.out_width, plan.shape.side),
       g.in_height, g.in_width, g.in_channels, g.out_height, g.out_width, g.out_channels, 0, g.padding_height,
       g.padding_width, false},
      moments, norm);
}

template <class T>
void halo_backward_input(cudaStream_t stream, const conv_geometry& g, const halo_plan& plan, const T* dy,
                         const T* w, T* dx, bool add, const moment_workspace& sums,
                         const gradient_sum_input<T>& norm) {
  const int spacing = plan.shape.spacing();
  const bool phases = plan.shape.has_phases();
  run_halo<T, true, false>(
      stream, plan,
      {dy, w, nullptr, nullptr, nullptr, dx,
       block_grid::of(g.images, ceil_div(g.in_height, spacing), ceil_div(g.in_width, spacing),
                      plan.shape.side),
       g.out_height, g.out_width, g.out_channels, g.in_height, g.in_width, g.in_channels, 0,
       phases ? 0 : 2 - g.padding_height, phases ? 0 : 2 - g.padding_width, add, norm},
      sums);
}

template <class T>
void halo_low_rank_forward(cudaStream_t stream, const conv_geometry& g, const halo_plan& plan, const T* x,
                           const T* down, const T* up, int out_channels, const T* bias, T* t, T* y,
                           const moment_workspace& moments, const norm_request<T>& norm) {
  run_halo<T, false, true>(
      stream, plan,
      {x, down, up, bias, t, y, block_grid::of(g.images, g.out_height, g.out_width, plan.shape.side),
       g.in_height, g.in_width, g.in_channels, g.out_height, g.out_width, g.out_channels, out_channels,
       g.padding_height, g.padding_width, false},
      moments, norm);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                            \
  template void halo_forward<T>(cudaStream_t, const conv_geometry&, const halo_plan&, const T*, const T*,    \
                                const T*, T*, const moment_workspace&, const norm_request<T>&);              \
  template void halo_backward_input<T>(cudaStream_t, const conv_geometry&, const halo_plan&, const T*,       \
                                       const T*, T*, bool, const moment_workspace&,                          \
                                       const gradient_sum_input<T>&);                                        \
  template void halo_low_rank_forward<T>(cudaStream_t, const conv_geometry&, const halo_plan&, const T*,     \
                                         const T*, const T*, int, const T*, T*, T*, const moment_workspace&, \
                                         const norm_request<T>&);
PUFFERFISH_DEVICE_TYPES_16(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
