// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Cuts the work of a convolution into blocks. A plan depends on shapes alone, never on the device, so that
/// results do not depend on the device's number of multiprocessors. Plain C++, for host compilers and for
/// CUDA.

#include <algorithm>
#include <utility>

#include <pufferfish/gpu/kernels/conv/conv_axis.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Rows x columns of the result that one block computes. Rows are pixels (for gradients of weights: elements
/// of the patch), columns are channels of the output.
enum class conv_tile : int { t128x128, t128x64, t64x64, t128x32, t256x16, t128x16 };

/// How the work of a convolution is cut into blocks and slices.
struct conv_plan {
  conv_tile tile = conv_tile::t64x64;  ///< part of the result that a block computes
  /// Whether products are computed on tensor cores. For float, operands are then rounded to TF32. 16-bit
  /// types always use tensor cores.
  bool tensor = false;
  /// Number of slices into which the sums are cut. Each slice has a result of its own in `partials`; these
  /// results are added in order.
  int slices = 1;
  /// Number of floats of `partials`.
  index_t scratch = 0;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Number of elements of a sum in one step: 64 bytes of float.
inline constexpr int conv_step = 16;

/// Internal: the rules of the plans.
namespace plans {

/// Number of parts of at most `part` elements that cover `size` elements.
constexpr index_t cut(index_t size, index_t part) { return (size + part - 1) / part; }

/// Number of rows of a tile.
constexpr index_t rows_of(conv_tile tile) {
  return tile == conv_tile::t256x16 ? 256 : tile == conv_tile::t64x64 ? 64 : 128;
}
/// Number of columns of a tile.
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
/// Number of tiles that cover rows x columns.
constexpr index_t blocks_of(conv_tile tile, index_t rows, index_t columns) {
  return cut(rows, rows_of(tile)) * cut(columns, columns_of(tile));
}

/// Blocks that keep a large device busy: about two for each of its multiprocessors.
inline constexpr index_t enough_blocks = 256;

/// The largest tile that fits the columns without much waste and leaves enough blocks. Channels that are not
/// copied in vectors have two tiles (conv.cuh).
inline conv_tile tile_for(index_t rows, index_t columns, index_t channels, int vector) {
  if (columns <= 16) return conv_tile::t256x16;
  if (channels % vector != 0) return conv_tile::t64x64;
  if (columns <= 32) return conv_tile::t128x32;
  const bool wide = (columns - 1) % 128 >= 64;
  if (wide && blocks_of(conv_tile::t128x128, rows, columns) >= enough_blocks) return conv_tile::t128x128;
  if (blocks_of(conv_tile::t128x64, rows, columns) >= enough_blocks) return conv_tile::t128x64;
  return conv_tile::t64x64;
}

/// The tile for gradients of weights, whose sums are cut if blocks are few: the tile with the least work. The
/// work of the smaller tiles counts 10 and 25 % more.
inline conv_tile weight_tile_for(index_t rows, index_t columns, index_t channels, int vector) {
  if (columns <= 16) return conv_tile::t128x16;
  if (channels % vector != 0) return conv_tile::t64x64;
  if (columns <= 32) return conv_tile::t128x32;
  const auto cost = [&](conv_tile tile, index_t percent) {
    return blocks_of(tile, rows, columns) * rows_of(tile) * columns_of(tile) * percent;
  };
  conv_tile best = conv_tile::t128x128;
  index_t least = cost(best, 100);
  for (const auto& [tile, percent] :
       {std::pair(conv_tile::t128x64, 110), std::pair(conv_tile::t64x64, 125)}) {
    if (cost(tile, percent) >= least) continue;
    best = tile;
    least = cost(tile, percent);
  }
  return best;
}

/// Largest number of slices, which are one dimension of a grid.
inline constexpr index_t most_slices = 32768;

/// Largest number of floats of partial results: 64 MB.
inline constexpr index_t most_partials = index_t{1} << 24;

/// Number of slices for sums of `steps` steps: `wanted`, but no more than leave 16 steps for each slice, than
/// fit with their results of `elements` floats into 64 MB, and than most_slices; at least 1.
inline int slices_for(index_t wanted, index_t steps, index_t elements) {
  constexpr index_t shortest = 16;
  const index_t room = std::min(steps / shortest, most_partials / std::max<index_t>(elements, 1));
  return static_cast<int>(std::clamp<index_t>(std::min(wanted, room), 1, most_slices));
}

/// The plan of a product of `rows` pixels by `columns` channels. `channels`: channels of the gathered tensor;
/// `depth`: elements of a sum over all phases; `phases`: classes of pixels that a gradient of the input
/// computes separately; `vector`: elements in 16 bytes.
inline conv_plan correlation_plan(index_t rows, index_t columns, index_t channels, index_t phases,
                                  index_t depth, bool tensor, int vector) {
  conv_plan plan;
  plan.tensor = tensor;
  plan.tile = tile_for(rows, columns, channels, vector);
  const index_t blocks = blocks_of(plan.tile, cut(rows, phases), columns) * phases;
  // Slices cost a pass over their results, so they are used only if half of a device would be idle.
  const index_t wanted = blocks >= enough_blocks / 2 ? 1 : cut(enough_blocks, std::max<index_t>(blocks, 1));
  plan.slices = slices_for(wanted, cut(depth / phases, conv_step), rows * columns);
  plan.scratch = plan.slices > 1 ? plan.slices * rows * columns : 0;
  return plan;
}

}  // namespace plans

/// The plan of conv_forward. `vector`: number of elements in 16 bytes. The sums are cut into slices if there
/// are few pixels of many channels.
inline conv_plan plan_conv_forward(const conv_geometry& g, bool tensor, int vector = 4) {
  return plans::correlation_plan(g.out_pixels(), g.out_channels, g.in_channels, 1, g.patch(), tensor, vector);
}

/// The plan of conv_backward_input. `vector`: number of elements in 16 bytes. Pixels with different positions
/// modulo the stride have different taps, so each of these phases is a product of its own.
inline conv_plan plan_conv_backward_input(const conv_geometry& g, bool tensor, int vector = 4) {
  const index_t phases =
      static_cast<index_t>(std::min(g.stride_height, g.in_height)) * std::min(g.stride_width, g.in_width);
  const index_t depth = static_cast<index_t>(g.kernel_height) * g.kernel_width * g.out_channels;
  return plans::correlation_plan(g.in_pixels(), g.in_channels, g.out_channels, phases, depth, tensor, vector);
}

/// The convolution with its input and the gradient of its output swapped. For stride and dilation 1, the
/// gradient of this convolution's weights, turned as in slice_sum, is the gradient of g's weights.
inline conv_geometry turned(const conv_geometry& g) {
  conv_geometry result = g;
  std::swap(result.in_height, result.out_height);
  std::swap(result.in_width, result.out_width);
  std::swap(result.in_channels, result.out_channels);
  result.padding_height = g.kernel_height - 1 - g.padding_height;
  result.padding_width = g.kernel_width - 1 - g.padding_width;
  return result;
}

/// Whether turned(g) is better: it gathers patches of the tensor with fewer channels, as in the first factor
/// of a low-rank layer. The gathered channels must be whole vectors.
inline bool is_better_turned(const conv_geometry& g, int vector = 4) {
  return g.stride_height == 1 && g.stride_width == 1 && g.dilation_height == 1 && g.dilation_width == 1 &&
         g.padding_height < g.kernel_height && g.padding_width < g.kernel_width &&
         2 * g.out_channels <= g.in_channels && g.out_channels % vector == 0;
}

/// The plan of conv_backward_weight, which has long sums over pixels and a small result. `vector`: number of
/// elements in 16 bytes.
inline conv_plan plan_conv_backward_weight(const conv_geometry& g, bool tensor, int vector = 4) {
  const index_t rows = g.patch(), columns = g.out_channels, pixels = g.out_pixels();
  conv_plan plan;
  plan.tensor = tensor;
  plan.tile = plans::weight_tile_for(rows, columns, g.in_channels, vector);
  const index_t blocks = plans::blocks_of(plan.tile, rows, columns);
  // As many blocks as run at once, of 256 threads or of 128: more blocks would wait for these, and each slice
  // costs a pass over its result. Float sums of no more than 4096 rows, because of rounding.
  const index_t at_once = (plan.tile == conv_tile::t128x128 ? 1 : 2) * plans::enough_blocks;
  const index_t wanted =
      std::max({at_once / std::max<index_t>(blocks, 1), plans::cut(pixels, 4096), index_t{1}});
  plan.slices = plans::slices_for(wanted, plans::cut(pixels, conv_step), rows * columns);
  plan.scratch = plan.slices > 1 ? plan.slices * rows * columns : 0;
  return plan;
}

PUFFERFISH_KERNELS_END
