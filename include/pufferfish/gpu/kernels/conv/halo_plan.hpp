// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Decides which convolutions are computed by warp groups (gpu/kernels/gemm/warpgroup.cuh) from blocks of
/// pixels that are copied to shared memory once for all taps. The halo of a block is the border of pixels
/// around it that its taps read, too. Plans depend on shapes alone, never on the device.

#include <pufferfish/gpu/kernels/conv/conv_plan.hpp>
#include <pufferfish/gpu/kernels/conv/halo_shape.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// How a convolution is computed from blocks of pixels.
struct halo_plan {
  /// Whether the kernels support the convolution. The other members are valid only if `fits` is true.
  bool fits = false;
  /// The taps and the blocks of pixels.
  halo_shape shape = {};
  /// Number of channels of the result that a thread block computes: 16, 32 or 64.
  int columns = 64;
  /// Number of channels of the input that are copied at a time: 16 or 32; 64 for one tap and for the gradient
  /// of the weight.
  int chunk = 32;
  /// For the gradient of the weight: number of parts of the pixels that are summed separately.
  int slices = 1;
  /// For the gradient of the weight: number of floats of device memory for the sums of the slices.
  index_t scratch = 0;
  /// Shared memory of a thread block, in bytes.
  index_t shared_bytes = 0;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Internal: the rules of the plans.
namespace plans {

/// Number of warp groups of a thread block, and number of tiles in shared memory for each of them. While one
/// tile is multiplied, the others are filled.
inline constexpr int halo_groups = 4, halo_slots = 3;
/// Number of bytes of shared memory for the moments of `columns` channels (halo_moments): three numbers in
/// each channel and one other number for each of the 16 warps.
constexpr index_t halo_moment_bytes(index_t columns) { return halo_groups * 4 * (3 * columns + 1) * 4; }
/// Number of bytes of shared memory for the numbers of `channels` channels that are normalized (halo_norm).
constexpr int halo_norm_bytes(int channels) { return 3 * channels * 4; }
/// The same with the addend's tile of each warp group, if the normalization `sums`.
constexpr index_t halo_norm_bytes(const halo_plan& plan, int channels, bool sums) {
  return halo_norm_bytes(channels) + (sums ? halo_groups * plan.shape.inputs().bytes(plan.chunk) : 0);
}
/// Number of thread blocks that run at the same time on a large device: one on each of the 132
/// multiprocessors of an H100.
inline constexpr index_t halo_blocks = 132;
/// Largest shared memory of a thread block on devices of compute capability 9.0, in bytes.
inline constexpr index_t most_shared = index_t{227} * 1024;

/// The shape of a convolution with results of height x width pixels (for a gradient of the input with stride
/// 2: those of a phase), if the kernels support it, else one with side 0. The convolution has 3 x 3 taps, no
/// dilation, the same stride of 1 or 2 in both directions, and a padding of at most 2; of 1 for a gradient of
/// the input with stride 2. Or it has one tap, stride 2 and no padding. At least three quarters of the pixels
/// in the blocks exist. Blocks of 4 x 4 pixels are whole images, with a padding of 1 for 3 x 3 taps. Offsets
/// within twenty lines of an image need no more than 31 bits. `channels`: the most channels of an image.
inline halo_shape shape_of(const conv_geometry& g, bool backward, int channels) {
  const int stride = g.stride_height, spacing = halo_shape{8, stride, backward}.spacing(),
            kernel = g.kernel_height;
  const index_t height = cut(backward ? g.in_height : g.out_height, spacing);
  const index_t width = cut(backward ? g.in_width : g.out_width, spacing);
  const bool centred = 2 * g.padding_height == kernel - 1 && 2 * g.padding_width == kernel - 1;
  halo_shape shape{0, stride, backward, kernel};
  if ((kernel != 3 && (kernel != 1 || stride != 2 || !centred)) || g.kernel_width != kernel ||
      g.stride_width != stride || stride > 2 || g.dilation_height != 1 || g.dilation_width != 1 ||
      g.padding_height > 2 || g.padding_width > 2 || (spacing == 2 && !centred) ||
      static_cast<index_t>(std::max(g.in_width, g.out_width)) * channels > (index_t{1} << 31) / 20) {
    return shape;
  }
  const auto filled = [&](int side) {
    return 4 * height * width >= 3 * cut(height, side) * cut(width, side) * side * side;
  };
  if (filled(8)) {
    shape.side = 8;
  } else if (centred && height <= 4 && width <= 4 && filled(4)) {
    shape.side = 4;
  }
  return shape;
}

/// For the gradient of the weight: number of channels of the input that a thread block computes, and number
/// of sets of halo_weight_blocks blocks of pixels in shared memory.
inline constexpr int halo_weight_rows = 64, halo_weight_slots = 3;
/// Number of blocks of pixels that are multiplied at a time.
constexpr int halo_weight_blocks(const halo_shape& shape) { return shape.inputs().step == 2 ? 1 : 2; }
/// Shared memory of a thread block of the gradient of the weight, in bytes.
constexpr index_t halo_weight_bytes(const halo_shape& shape, int columns) {
  return halo_weight_slots * halo_weight_blocks(shape) *
         (shape.inputs().bytes(halo_weight_rows) + shape.outputs().bytes(columns));
}

/// Most channels that are copied at a time.
constexpr int most_chunk(const halo_shape& shape) {
  return shape.kernel == 1 ? 64 : shape.side == 8 && shape.stride == 1 ? 32 : 16;
}
/// Whether there are kernels with this number of columns: no more than 32 with four results for each tile, 64
/// only with one tap.
constexpr bool halo_supports(const halo_shape& shape, int columns) {
  return shape.kernel == 1 ? columns == 64 : columns * shape.results() <= 128;
}
/// Whether there are kernels that multiply the result by another factor.
constexpr bool halo_pairs(const halo_shape& shape) { return shape.kernel == 3 && shape.side == 8; }
/// Whether there are kernels that normalize their input: forward, with 3 x 3 taps and stride 1. With 64
/// columns and another factor (`paired`), registers are too few.
constexpr bool halo_normalizes(const halo_shape& shape, int columns, bool paired) {
  return !shape.backward && shape.stride == 1 && shape.kernel == 3 && !(paired && columns == 64);
}

/// The plan of a correlation of `depth` channels with a result of `columns` channels: the largest number of
/// columns for which there are kernels and the shared memory of a thread block suffices. The shared memory
/// holds the weight of these columns, with padding, the tiles, and `more` bytes for other data. The plan does
/// not fit if a number of channels is not a multiple of 16, or of 64 with one tap.
inline halo_plan halo_plan_for(const halo_shape& shape, int depth, int columns, index_t more = 0) {
  halo_plan plan;
  plan.shape = shape;
  if (shape.side == 0 || depth % 16 != 0 || columns % 16 != 0) return plan;
  plan.chunk = most_chunk(shape);
  if (plan.chunk == 32 && depth % 32 != 0) plan.chunk = 16;
  if (depth % plan.chunk != 0) return plan;
  for (plan.columns = 64; plan.columns >= 16; plan.columns /= 2) {
    if (columns % plan.columns != 0 || !halo_supports(shape, plan.columns)) continue;
    plan.shared_bytes = static_cast<index_t>(shape.taps()) * depth * plan.columns * 2 +
                        16 * (plan.columns + depth) / 8 + more +
                        halo_groups * halo_slots * shape.inputs().bytes(plan.chunk);
    plan.fits = plan.shared_bytes <= most_shared;
    if (plan.fits) return plan;
  }
  return plan;
}

}  // namespace plans

/// The plan of halo_forward. It fits if the kernels have the convolution's shape (plans::shape_of), the
/// numbers of channels are multiples of 16 (of 64 with one tap), and the weight of 16 columns fits into
/// shared memory.
inline halo_plan plan_halo_forward(const conv_geometry& g) {
  return plans::halo_plan_for(plans::shape_of(g, false, std::max(g.in_channels, g.out_channels)),
                              g.in_channels, g.out_channels);
}

/// The plan of halo_backward_input, which correlates dy and computes blocks of the input's pixels. It fits
/// under the conditions of plan_halo_forward, with input and output exchanged.
inline halo_plan plan_halo_backward_input(const conv_geometry& g) {
  return plans::halo_plan_for(plans::shape_of(g, true, std::max(g.in_channels, g.out_channels)),
                              g.out_channels, g.in_channels);
}

/// The plan of halo_low_rank_forward. `g` is the geometry of `down`, and `up` has `out_channels` columns. It
/// fits if the kernels have the convolution's shape (plans::shape_of), in blocks of 8 x 8 pixels, in_channels
/// is a multiple of 16, the rank is 16, 32 or 64, out_channels is a multiple of 64, and all of `down` and
/// `up` fit into the shared memory of one thread block.
inline halo_plan plan_halo_low_rank(const conv_geometry& g, int out_channels) {
  const halo_shape shape = plans::shape_of(g, false, std::max(g.in_channels, out_channels));
  if (!plans::halo_pairs(shape) || out_channels % 64 != 0) return {};
  halo_plan plan = plans::halo_plan_for(shape, g.in_channels, g.out_channels,
                                        static_cast<index_t>(g.out_channels) * out_channels * 2);
  plan.fits = plan.fits && plan.columns == g.out_channels;
  return plan;
}

/// Whether halo_forward (`columns`: plan.columns) or halo_low_rank_forward (`columns`: the output channels)
/// can collect moments: the shared memory of a thread block suffices.
inline bool halo_moments_fit(const halo_plan& plan, index_t columns) {
  return plan.shared_bytes + plans::halo_moment_bytes(columns) <= plans::most_shared;
}
/// Whether halo_forward (`up_columns`: 0) or halo_low_rank_forward (`up_columns`: the output channels) can
/// normalize its input, at the same time as it collects the moments that halo_moments_fit allows. `sums`:
/// whether the normalization has an addend. The convolution has a padding of 1, and at most two thread blocks
/// normalize a pixel, since each computes a part of the result's channels.
inline bool halo_norm_fits(const conv_geometry& g, const halo_plan& plan, index_t up_columns, bool sums) {
  const index_t columns = up_columns == 0 ? plan.columns : up_columns;
  const index_t moments = halo_moments_fit(plan, columns) ? plans::halo_moment_bytes(columns) : 0;
  return plans::halo_normalizes(plan.shape, plan.columns, up_columns != 0) && g.padding_height == 1 &&
         g.padding_width == 1 && g.out_channels <= 2 * plan.columns &&
         plan.shared_bytes + moments + plans::halo_norm_bytes(plan, g.in_channels, sums) <=
             plans::most_shared;
}
/// Whether halo_backward_input can collect sums for a batch norm.
inline bool halo_gradient_sums_fit(const halo_plan& plan) {
  return plan.shape.collects() && halo_moments_fit(plan, plan.columns);
}

namespace plans {

/// Estimated time of halo_backward_weight, in microseconds, on a device with halo_blocks multiprocessors.
/// `blocks`: number of blocks of pixels; `tiles`: number of tiles of the result; `size`: number of elements
/// of the result. The time is the number of rounds of thread blocks times the blocks of pixels of a slice, at
/// 0.4 to 0.8 microseconds each, plus two passes over the sums of all slices at 2.5 TB/s. Blocks of a
/// convolution of 3 x 3 taps and stride 2 are assumed, not measured, to take twice as long: they read 4.5
/// times the pixels.
inline double halo_weight_time(const halo_shape& shape, index_t blocks, index_t tiles, int columns,
                               int slices, index_t size) {
  const double one = columns == 64 ? 0.8 : columns == 32 ? 0.5 : 0.4, bytes_per_us = 2.5e6;
  const double block = shape.inputs().step * one;
  return static_cast<double>(cut(tiles * slices, halo_blocks) * cut(blocks, slices)) * block +
         (slices > 1 ? 2.0 * 4.0 * slices * static_cast<double>(size) / bytes_per_us : 0.0);
}

}  // namespace plans

/// The plan of halo_backward_weight: of the possible numbers of columns, the one with the least estimated
/// time. Fewer columns mean more tiles and fewer slices, and the sums of all slices pass through device
/// memory. The plan fits if the kernels have the convolution's shape (plans::shape_of), in_channels is a
/// multiple of 64 and out_channels a multiple of 16.
inline halo_plan plan_halo_backward_weight(const conv_geometry& g) {
  halo_plan plan;
  plan.shape = plans::shape_of(g, false, std::max(g.in_channels, g.out_channels));
  plan.fits = plan.shape.side > 0 && g.in_channels % plans::halo_weight_rows == 0 && g.out_channels % 16 == 0;
  if (!plan.fits) return plan;
  plan.chunk = plans::halo_weight_rows;
  const index_t size = static_cast<index_t>(g.patch()) * g.out_channels;
  const int side = plan.shape.side;
  const index_t blocks = plans::cut(g.images, plan.shape.inputs().images()) * plans::cut(g.out_height, side) *
                         plans::cut(g.out_width, side);
  double least = 0.0;
  for (const int columns : {64, 32, 16}) {
    if (g.out_channels % columns != 0) continue;
    const index_t tiles = static_cast<index_t>(g.in_channels / plan.chunk) * (g.out_channels / columns);
    // Each slice has at most about 4096 pixels, which limits the rounding error of its float sums, as long as
    // all slices take no more memory than those of other kernels.
    const index_t wanted = std::max(plans::halo_blocks / tiles, plans::cut(g.out_pixels(), 4096));
    const index_t most = std::clamp<index_t>(plans::most_partials / std::max<index_t>(size, 1), 1, 4096);
    const auto slices =
        static_cast<int>(std::clamp<index_t>(std::min(wanted, most), 1, std::max<index_t>(blocks, 1)));
    const double time = plans::halo_weight_time(plan.shape, blocks, tiles, columns, slices, size);
    if (least > 0.0 && time >= least) continue;
    least = time;
    plan.columns = columns;
    plan.slices = slices;
  }
  plan.shared_bytes = plans::halo_weight_bytes(plan.shape, plan.columns);
  plan.scratch = plan.slices > 1 ? plan.slices * size : 0;
  return plan;
}

PUFFERFISH_KERNELS_END
