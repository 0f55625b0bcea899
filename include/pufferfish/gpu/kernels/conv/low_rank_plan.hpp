// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Decides which low-rank convolutions are computed in one pass, and how the pass is cut into blocks. Plans
/// depend on shapes alone, as in conv_plan.hpp.

#include <pufferfish/gpu/kernels/conv/conv_plan.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// How a low-rank convolution is computed, and how one pass is cut into blocks.
struct low_rank_plan {
  /// Whether both factors are computed in one pass. False: two products, one after the other.
  bool fused = false;
  /// Whether products are computed on tensor cores.
  bool tensor = false;
  /// Number of pixels of a block: 64 or 128.
  int rows = 64;
  /// Number of slices into which the backward pass cuts the pixels.
  int slices = 1;
  /// Number of floats of `partials` in the backward pass.
  index_t scratch = 0;
  /// Shared memory of a block of the backward pass, in bytes. Devices of compute capability 8.0 and 9.0 have
  /// enough for every fused plan; other devices may have less.
  index_t shared_bytes = 0;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// The largest rank that is computed in one pass.
inline constexpr int most_fused_rank = 64;

namespace plans {

/// Returns the rank to which kernels pad a rank of at most 64 with zeros: 16, 32 or 64. Larger ranks are not
/// computed by these kernels (most_fused_rank).
constexpr int padded_rank(index_t rank) { return rank <= 16 ? 16 : rank <= 32 ? 32 : 64; }

/// Number of pixels that a thread block of the backward kernel processes.
inline constexpr int backward_rows = 64;
/// Number of output channels that a thread block of the backward kernel processes at a time.
constexpr int backward_chunk(int padded_rank) { return padded_rank == 64 ? 32 : 64; }

/// Number of elements of the shared memory of a thread block of the backward kernel. It holds three tiles,
/// whose rows are padded by 16 bytes: output gradients [backward_rows][chunk], the factor `up`
/// [padded][chunk], and their product [backward_rows][padded].
constexpr index_t backward_tiles(int padded, int element_bytes) {
  const index_t pad = 16 / element_bytes, chunk = backward_chunk(padded) + pad;
  return backward_rows * chunk + padded * chunk + backward_rows * (padded + pad);
}

/// Rounds a number of output channels up to a multiple of backward_chunk(padded).
constexpr index_t padded_columns(int padded, index_t columns) {
  return cut(columns, backward_chunk(padded)) * backward_chunk(padded);
}

}  // namespace plans

/// The plan of low_rank_conv_forward. `g` is the geometry of `down`, so g.out_channels is the rank. `tensor`:
/// products on tensor cores.
inline low_rank_plan plan_low_rank_forward(const conv_geometry& g, bool tensor) {
  low_rank_plan plan;
  plan.tensor = tensor;
  const index_t pixels = g.out_pixels();
  plan.rows = plans::cut(pixels, 128) >= plans::enough_blocks ? 128 : 64;
  // With fewer blocks, cutting the first product's sums into slices gains more than a second pass costs.
  plan.fused = g.out_channels <= most_fused_rank && plans::cut(pixels, plan.rows) >= plans::enough_blocks / 4;
  return plan;
}

/// The plan of low_rank_conv_backward_up for elements of element_bytes bytes. The caller compares
/// shared_bytes with the device's limit.
inline low_rank_plan plan_low_rank_backward(index_t pixels, index_t rank, index_t out_channels, bool tensor,
                                            int element_bytes) {
  low_rank_plan plan;
  plan.tensor = tensor;
  const int padded = plans::padded_rank(rank);
  const index_t tiles = plans::cut(pixels, plans::backward_rows);
  plan.slices =
      static_cast<int>(tiles <= plans::enough_blocks
                           ? std::max<index_t>(tiles, 1)
                           : std::clamp<index_t>(tiles / 8, plans::enough_blocks, 2 * plans::enough_blocks));
  plan.scratch = plan.slices * rank * out_channels;
  plan.shared_bytes =
      2 * plans::backward_tiles(padded, element_bytes) * element_bytes +
      padded * plans::padded_columns(padded, out_channels) * static_cast<index_t>(sizeof(float));
  // The float units take longer to compute ranks above 32 than a second pass takes to read dy.
  plan.fused = rank <= (tensor ? most_fused_rank : 32) && plan.shared_bytes <= index_t{160} * 1024;
  return plan;
}

PUFFERFISH_KERNELS_END
