// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The gradient of the weight of a convolution, from blocks of pixels that are copied to shared memory once
/// for all taps. A thread block computes 64 input channels x 16, 32 or 64 output channels of all taps; warp
/// group g computes the taps of row g. The depth of the products is the 64 output pixels of a block
/// (block_layout).

#include <pufferfish/gpu/kernels/conv/halo_conv.hpp>
#include <pufferfish/gpu/kernels/conv/halo_operands.cuh>
#include <pufferfish/gpu/kernels/conv/slice_sum.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Arguments of `halo_weight_gradient`. in: the input x; gradient: the gradient dy of the output; out: the
/// gradient of the weight, [3][3][in_channels][out_channels] in float, or one such array for each slice if
/// there are several. size: number of elements of this gradient. add: whether the sums of a single slice are
/// added to the old values of `out`.
template <class T>
struct halo_gradient {
  const T* in;
  const T* gradient;
  float* out;
  conv_geometry geometry;
  block_grid blocks;
  index_t size;
  int slices;
  bool add;
};

/// Computes the sums of a slice for a tile of the weight, 64 input channels x `Columns` output channels.
/// Grid: blockIdx.x is the tile, numbered by output channels first; blockIdx.y is the slice. Slice s has the
/// blocks of pixels B s / slices .. B (s + 1) / slices - 1, where B is the number of all blocks. Dynamic
/// shared memory: halo_weight_slots sets of halo_weight_blocks pairs, each of a tile of x with its border and
/// a tile of dy. `Kind`: the halo_kind of the forward convolution.
template <class T, int Columns, class Kind>
static __global__ void __launch_bounds__(Kind::shape.kernel* group_threads, 1)
    halo_weight_gradient(grid_dependency earlier, halo_gradient<T> work) {
  earlier.wait();
#if !defined(PUFFERFISH_WARP_GROUPS)
  absent_mark();
#else
  constexpr halo_shape shape = Kind::shape;
  constexpr int taps = shape.kernel, threads = taps * group_threads, slots = plans::halo_weight_slots;
  constexpr int at_once = plans::halo_weight_blocks(shape), rows = plans::halo_weight_rows;
  constexpr block_layout in = shape.inputs(), out = shape.outputs();
  using inputs = pixel_tiles<T, in, rows, threads>;
  using gradients = pixel_tiles<T, out, Columns, threads>;
  const conv_geometry& g = work.geometry;
  const int thread = block_thread(), group = warp_group(), own = thread % group_threads;
  const int column_tiles = g.out_channels / Columns;
  const int first_row = static_cast<int>(blockIdx.x) / column_tiles * rows;
  const int first_column = static_cast<int>(blockIdx.x) % column_tiles * Columns;
  const block_grid& all = work.blocks;
  const int slice = static_cast<int>(blockIdx.y);
  const auto begin = [&](int of) {
    return static_cast<int>(static_cast<index_t>(all.blocks) * of / work.slices);
  };
  const int first = begin(slice), last = begin(slice + 1), units = ceil_div(last - first, at_once);

  unsigned char* const memory = dynamic_shared<unsigned char>();
  constexpr int pair_bytes = inputs::bytes + gradients::bytes, slot_bytes = at_once * pair_bytes;
  inputs xs(work.in, all.images, g.in_height, g.in_width, g.in_channels, thread);
  gradients dys(work.gradient, all.images, g.out_height, g.out_width, g.out_channels, thread);
  if constexpr (inputs::has_borders) {
    for (int i = 0; i < slots * at_once; ++i) xs.clear(memory + i * pair_bytes, 1);
    __syncthreads();
  }
  // Starts the copies of the tiles of a unit, which is halo_weight_blocks blocks of pixels.
  const auto copy = [&](int slot, int unit) {
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int block = first + unit * at_once + i;
      const block_pixel at = all.at(block < last ? block : all.blocks);
      unsigned char* const tile = memory + slot * slot_bytes + i * pair_bytes;
      xs.find(in.origin(at, g.padding_height, g.padding_width));
      xs.copy(tile, first_row);
      dys.find(at);
      dys.copy(tile + inputs::bytes, first_column);
    }
  };
#pragma unroll
  for (int unit = 0; unit < slots - 1; ++unit) {
    if (unit < units) copy(unit, unit);
    commit_copies();
  }
  array_of<group_sums<T, Columns>, taps> sums;
#pragma unroll
  for (int tap = 0; tap < taps; ++tap) sums[tap].clear();
  int slot = 0, to = slots - 1;
  for (int unit = 0; unit < units; ++unit) {
    wait_for_copies<slots - 2>();
    publish_to_products();
    __syncthreads();  // the tiles of this unit are complete, and no warp reads the previous ones any more
    begin_products(sums);
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      // 8 pixels in 8 channels are a block of 8 x 8 numbers whose rows are dense across the depth.
      const unsigned char* const tile = memory + slot * slot_bytes + i * pair_bytes;
      const block_matrix x(tile + in.place({0, group, 0}), inputs::plane, in.core());
      const block_matrix dy(tile + inputs::bytes, gradients::plane, out.core());
#pragma unroll
      for (int eight = 0; eight < 8; eight += 2) {
#pragma unroll
        for (int tap = 0; tap < taps; ++tap) {
          sums[tap].template add<dense::width, dense::width>(x.at(eight * in.core() + in.place({0, 0, tap})),
                                                             dy.at(eight * out.core()));
        }
      }
    }
    end_products();
    if (unit + slots - 1 < units) copy(to, unit + slots - 1);
    commit_copies();
    wait_for_products(sums);
    to = slot;
    slot = slot + 1 == slots ? 0 : slot + 1;
  }

  float* const target = work.out + (work.slices > 1 ? slice * work.size : 0);
  const int column = first_column + own % 4 * 2;
#pragma unroll
  for (int tap = 0; tap < taps; ++tap) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const index_t row =
          static_cast<index_t>(group * taps + tap) * g.in_channels + first_row + group_row(own, half);
      float* const to_row = target + row * g.out_channels + column;
#pragma unroll
      for (int j = 0; j < Columns / 8; ++j) {
        element_run<float, 2> run{
            {sums[tap].values[4 * j + 2 * half], sums[tap].values[4 * j + 2 * half + 1]}};
        if (work.add) {
          run.values[0] += to_row[8 * j];
          run.values[1] += to_row[8 * j + 1];
        }
        to_row[8 * j] = run.values[0];
        to_row[8 * j + 1] = run.values[1];
      }
    }
  }
#endif
}

/// Starts halo_weight_gradient for all tiles and slices, and then add_slices if there are several slices and
/// the sum is not computed later.
template <class T>
void halo_backward_weight(cudaStream_t stream, const conv_geometry& g, const halo_plan& plan, const T* x,
                          const T* dy, float* dw, bool accumulate, float* partials, slice_sums* later) {
  const launch_site site(stream);
  const index_t size = static_cast<index_t>(g.patch()) * g.out_channels;
  const halo_gradient<T> work{x,
                              dy,
                              plan.slices > 1 ? partials : dw,
                              g,
                              block_grid::of(g.images, g.out_height, g.out_width, plan.shape.side),
                              size,
                              plan.slices,
                              accumulate && plan.slices == 1};
  with_halo_kind<false>(plan, [&](auto kind, auto columns) {
    launch(site,
           {{static_cast<unsigned>(g.in_channels / plans::halo_weight_rows * (g.out_channels / columns)),
             static_cast<unsigned>(plan.slices)},
            kind.shape.kernel * group_threads,
            static_cast<std::size_t>(plan.shared_bytes)},
           halo_weight_gradient<T, columns, decltype(kind)>, work);
  });
  if (plan.slices == 1) return;
  add_slices_or_push(site, {dw, partials, size, plan.slices, accumulate, g.out_channels}, later);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                       \
  template void halo_backward_weight<T>(cudaStream_t, const conv_geometry&, const halo_plan&, const T*, \
                                        const T*, float*, bool, float*, slice_sums*);
PUFFERFISH_DEVICE_TYPES_16(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
