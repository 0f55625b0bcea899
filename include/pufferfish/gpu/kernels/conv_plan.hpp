// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// How the work of a convolution is cut into blocks. A plan follows from shapes alone, never from the device,
/// so that results do not depend on how many multiprocessors it has. Plain C++, for both sides.

#include <algorithm>

#include <pufferfish/gpu/kernels/conv_axis.hpp>

PUFFERFISH_KERNELS_BEGIN

/// Rows x columns of the result that one block computes. Rows are pixels (for gradients of weights: elements
/// of the patch), columns are channels of the output.
enum class conv_tile : int { t128x128, t128x64, t64x64, t128x32, t256x16, t128x16 };

struct conv_plan {
  conv_tile tile = conv_tile::t64x64;
  /// Products on tensor cores: for float with operands rounded to TF32. (16-bit types: always so.)
  bool tensor = false;
  /// Into how many parts the sums are cut; each gives a result of its own in `partials`, added up in order.
  int slices = 1;
  /// Floats that `partials` must have.
  index_t scratch = 0;
};

/// Sums are taken in steps of so many elements: 64 bytes of float.
inline constexpr int conv_step = 16;

namespace plans {

constexpr index_t cut(index_t size, index_t part) { return (size + part - 1) / part; }

constexpr index_t rows_of(conv_tile tile) {
  return tile == conv_tile::t256x16 ? 256 : tile == conv_tile::t64x64 ? 64 : 128;
}
constexpr index_t columns_of(conv_tile tile) {
  switch (tile) {
    case conv_tile::t128x128:
      return 128;
    case conv_tile::t128x32:
      return 32;
    case conv_tile::t256x16:
    case conv_tile::t128x16:
      return 16;
    default:
      return 64;
  }
}
constexpr index_t blocks_of(conv_tile tile, index_t rows, index_t columns) {
  return cut(rows, rows_of(tile)) * cut(columns, columns_of(tile));
}

/// Blocks that keep a large device busy: about two for each of its multiprocessors.
inline constexpr index_t enough_blocks = 256;

/// The largest tile that fits the columns without much waste and leaves enough blocks.
inline conv_tile tile_for(index_t rows, index_t columns) {
  if (columns <= 16) return conv_tile::t256x16;
  if (columns <= 32) return conv_tile::t128x32;
  const bool wide = (columns - 1) % 128 >= 64;
  if (wide && blocks_of(conv_tile::t128x128, rows, columns) >= enough_blocks) return conv_tile::t128x128;
  if (blocks_of(conv_tile::t128x64, rows, columns) >= enough_blocks) return conv_tile::t128x64;
  return conv_tile::t64x64;
}

/// Cuts sums of `steps` steps so that there are enough blocks: no part shorter than `least` steps, all parts
/// together no more than 64 MB.
inline int slices_for(index_t blocks, index_t steps, index_t least, index_t elements) {
  constexpr index_t most_floats = index_t{1} << 24;
  const index_t wanted = blocks >= enough_blocks / 2 ? 1 : cut(enough_blocks, std::max<index_t>(blocks, 1));
  const index_t room = std::min(steps / least, most_floats / std::max<index_t>(elements, 1));
  return static_cast<int>(std::max<index_t>(1, std::min(wanted, room)));
}

/// Rounding: float sums over more rows than this are cut.
inline constexpr index_t longest_sum = 4096;

inline conv_plan correlation_plan(index_t rows, index_t columns, index_t phases, index_t depth, bool tensor) {
  conv_plan plan;
  plan.tensor = tensor;
  plan.tile = tile_for(rows, columns);
  const index_t blocks = blocks_of(plan.tile, cut(rows, phases), columns) * phases;
  plan.slices = slices_for(blocks, cut(depth / phases, conv_step), 16, rows * columns);
  plan.scratch = plan.slices > 1 ? plan.slices * rows * columns : 0;
  return plan;
}

}  // namespace plans

/// For conv_forward: few pixels of many channels are cut along the sums.
inline conv_plan plan_conv_forward(const conv_geometry& g, bool tensor) {
  return plans::correlation_plan(g.out_pixels(), g.out_channels, 1, g.patch(), tensor);
}

/// For conv_backward_input. Each residue of a pixel's position modulo the stride sees taps of its own.
inline conv_plan plan_conv_backward_input(const conv_geometry& g, bool tensor) {
  const index_t phases =
      static_cast<index_t>(std::min(g.stride_height, g.in_height)) * std::min(g.stride_width, g.in_width);
  const index_t depth = static_cast<index_t>(g.kernel_height) * g.kernel_width * g.out_channels;
  return plans::correlation_plan(g.in_pixels(), g.in_channels, phases, depth, tensor);
}

/// For conv_backward_weight: long sums over pixels, a small result.
inline conv_plan plan_conv_backward_weight(const conv_geometry& g, bool tensor) {
  const index_t rows = g.patch(), columns = g.out_channels, pixels = g.out_pixels();
  conv_plan plan;
  plan.tensor = tensor;
  const bool wide = (columns - 1) % 128 >= 64;
  plan.tile = columns <= 16   ? conv_tile::t128x16
              : columns <= 32 ? conv_tile::t128x32
              : rows <= 64    ? conv_tile::t64x64
              : wide          ? conv_tile::t128x128
                              : conv_tile::t128x64;
  const index_t blocks = plans::blocks_of(plan.tile, rows, columns);
  const int busy = plans::slices_for(blocks, plans::cut(pixels, conv_step), 16, rows * columns);
  const int short_sums =
      plans::slices_for(1, plans::cut(pixels, conv_step), plans::longest_sum / conv_step, rows * columns);
  plan.slices = std::max(busy, short_sums);
  plan.scratch = plan.slices > 1 ? plan.slices * rows * columns : 0;
  return plan;
}

PUFFERFISH_KERNELS_END
