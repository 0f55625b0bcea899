// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Decides which convolutions are computed from blocks of pixels that are copied once for all taps, on
/// devices whose tensor cores read shared memory themselves. A halo is the border of a block that its taps
/// read, too. Plans depend on shapes alone.

#include <pufferfish/gpu/kernels/conv/conv_plan.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// How a convolution of 3 x 3 taps is computed from blocks of 8 x 8 pixels.
struct halo_plan {
  bool fits = false;         ///< whether the convolution is computed in this way
  int columns = 64;          ///< channels of the result that a thread block computes: 16, 32 or 64
  int chunk = 32;            ///< channels of the input that are copied at a time: 16 or 32, or 64 for weights
  int slices = 1;            ///< number of parts of the pixels in the gradient of the weight
  index_t scratch = 0;       ///< number of floats of `partials` in the gradient of the weight
  index_t shared_bytes = 0;  ///< shared memory of a thread block
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

namespace plans {

/// Pixels of a block in each direction, and those of its border on both sides together.
inline constexpr int halo_side = 8, halo_border = 2;
/// Warp groups of a thread block, and tiles of each of them in shared memory.
inline constexpr int halo_groups = 4, halo_slots = 3;
/// Thread blocks that run at the same time on a large device.
inline constexpr index_t halo_blocks = 132;
/// Shared memory that a thread block may have, in bytes.
inline constexpr index_t most_shared = index_t{227} * 1024;

/// Whether the images fill their blocks of pixels to three quarters, the kernel has 3 x 3 taps of stride and
/// dilation 1, and ten lines of an image have fewer than 2^31 elements. `channels`: the most channels that an
/// image has.
inline bool has_blocks(const conv_geometry& g, int channels) {
  const index_t line = static_cast<index_t>(std::max(g.in_width, g.out_width)) * channels;
  if (line > (index_t{1} << 31) / 10) return false;
  const index_t padded = cut(g.out_height, halo_side) * cut(g.out_width, halo_side) * halo_side * halo_side;
  return g.kernel_height == 3 && g.kernel_width == 3 && g.stride_height == 1 && g.stride_width == 1 &&
         g.dilation_height == 1 && g.dilation_width == 1 && g.padding_height <= 2 && g.padding_width <= 2 &&
         4 * static_cast<index_t>(g.out_height) * g.out_width >= 3 * padded;
}

/// Bytes of a tile of pixels with its border.
constexpr index_t halo_tile_bytes(int channels) {
  return channels == 16 ? 3200 : channels == 32 ? 6528 : 12928;
}
/// Bytes of a tile of pixels without a border.
constexpr index_t block_tile_bytes(int channels) {
  return channels == 16 ? 2176 : channels == 32 ? 4224 : 8320;
}

/// Of the gradient of the weight: channels of the input that a thread block computes, its warp groups, one
/// for each row of taps, blocks of pixels that it multiplies at a time, and how many of these are in shared
/// memory.
inline constexpr int halo_weight_rows = 64, halo_weight_groups = 3, halo_weight_blocks = 2;
inline constexpr int halo_weight_slots = 3;

/// The widest part of `columns` channels that a thread block computes, and its shared memory: the weight of
/// this part, padded, for `depth` channels of the input, the tiles, and `more` bytes for something else.
inline halo_plan halo_plan_for(int depth, int columns, index_t more = 0) {
  halo_plan plan;
  plan.chunk = depth % 32 == 0 ? 32 : 16;
  if (depth % 16 != 0 || columns % 16 != 0) return plan;
  for (plan.columns = 64; plan.columns >= 16; plan.columns /= 2) {
    if (columns % plan.columns != 0) continue;
    plan.shared_bytes = index_t{9} * depth * plan.columns * 2 + 16 * (plan.columns + depth) / 8 + more +
                        halo_groups * halo_slots * halo_tile_bytes(plan.chunk);
    plan.fits = plan.shared_bytes <= most_shared;
    if (plan.fits) return plan;
  }
  return plan;
}

}  // namespace plans

/// The plan of halo_forward.
inline halo_plan plan_halo_forward(const conv_geometry& g) {
  if (!plans::has_blocks(g, std::max(g.in_channels, g.out_channels))) return {};
  return plans::halo_plan_for(g.in_channels, g.out_channels);
}

/// The plan of halo_backward_input, which computes blocks of the input's pixels.
inline halo_plan plan_halo_backward_input(const conv_geometry& g) {
  conv_geometry swapped = g;
  std::swap(swapped.in_height, swapped.out_height);
  std::swap(swapped.in_width, swapped.out_width);
  if (!plans::has_blocks(swapped, std::max(g.in_channels, g.out_channels))) return {};
  return plans::halo_plan_for(g.out_channels, g.in_channels);
}

/// The plan of halo_low_rank_forward: `g` is the geometry of `down`, and `up` has `out_channels` columns. All
/// of `down` must fit into one thread block.
inline halo_plan plan_halo_low_rank(const conv_geometry& g, int out_channels) {
  if (!plans::has_blocks(g, std::max(g.in_channels, out_channels)) || out_channels % 64 != 0) return {};
  halo_plan plan = plans::halo_plan_for(g.in_channels, g.out_channels,
                                        static_cast<index_t>(g.out_channels) * out_channels * 2);
  plan.fits = plan.fits && plan.columns == g.out_channels;
  return plan;
}

namespace plans {

/// Estimated microseconds of halo_backward_weight on a device with halo_blocks multiprocessors: rounds of
/// thread blocks, each with its blocks of pixels one after the other, then two passes over all slices.
inline double halo_weight_time(index_t blocks, index_t tiles, int columns, int slices, index_t size) {
  const double block = columns == 64 ? 0.8 : columns == 32 ? 0.5 : 0.4, bytes_per_us = 2.5e6;
  return static_cast<double>(cut(tiles * slices, halo_blocks) * cut(blocks, slices)) * block +
         (slices > 1 ? 2.0 * 4.0 * slices * static_cast<double>(size) / bytes_per_us : 0.0);
}

}  // namespace plans

/// The plan of halo_backward_weight: of the possible numbers of columns, the one that takes the least time.
/// With fewer columns there are more tiles and fewer slices, whose sums pass through memory.
inline halo_plan plan_halo_backward_weight(const conv_geometry& g) {
  halo_plan plan;
  if (!plans::has_blocks(g, std::max(g.in_channels, g.out_channels)) ||
      g.in_channels % plans::halo_weight_rows != 0 || g.out_channels % 16 != 0) {
    return plan;
  }
  plan.fits = true;
  plan.chunk = plans::halo_weight_rows;
  const index_t size = static_cast<index_t>(g.patch()) * g.out_channels;
  const index_t blocks =
      g.images * plans::cut(g.out_height, plans::halo_side) * plans::cut(g.out_width, plans::halo_side);
  double least = 0.0;
  for (const int columns : {64, 32, 16}) {
    if (g.out_channels % columns != 0) continue;
    const index_t tiles = static_cast<index_t>(g.in_channels / plan.chunk) * (g.out_channels / columns);
    // Float sums of no more than 4096 rows, because of rounding, as long as the slices take no more memory
    // than those of other kernels.
    const index_t wanted = std::max(plans::halo_blocks / tiles, plans::cut(g.out_pixels(), 4096));
    const index_t most = std::clamp<index_t>(plans::most_partials / std::max<index_t>(size, 1), 1, 4096);
    const auto slices =
        static_cast<int>(std::clamp<index_t>(std::min(wanted, most), 1, std::max<index_t>(blocks, 1)));
    const double time = plans::halo_weight_time(blocks, tiles, columns, slices, size);
    if (least > 0.0 && time >= least) continue;
    least = time;
    plan.columns = columns;
    plan.slices = slices;
  }
  plan.shared_bytes = plans::halo_weight_slots * plans::halo_weight_blocks *
                      (plans::halo_tile_bytes(plan.chunk) + plans::block_tile_bytes(plan.columns));
  plan.scratch = plan.slices > 1 ? plan.slices * size : 0;
  return plan;
}

PUFFERFISH_KERNELS_END
