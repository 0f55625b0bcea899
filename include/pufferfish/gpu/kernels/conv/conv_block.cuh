// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the blocks of threads that compute the tiles of convolutions.

#include <type_traits>

#include <pufferfish/gpu/kernels/conv/conv.hpp>
#include <pufferfish/gpu/kernels/conv/conv_plan.hpp>
#include <pufferfish/gpu/kernels/gemm/tile_product.cuh>
#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// The type of a thread block: its tile, and the product that computes the tile. The more rows and columns a
/// thread or a warp has, the less is read from shared memory, and the fewer other instructions are needed.
/// The registers are the limit: two large blocks, or three or four of 128 threads, must fit on each
/// multiprocessor. Dynamic shared memory: `slots` pairs of tiles, left (patches) then right (weight or
/// gradient); correlation_memory and weight_gradient_memory have the sizes.
template <bool Tensor, class T, int Rows, int Columns, int Run>
struct conv_block {
  static constexpr int rows = Rows, columns = Columns;
  /// Number of elements of a patch in one copy.
  static constexpr int run = Run;
  /// Elements of the sum in a tile; number of tile buffers: one in use, the others being filled.
  static constexpr int depth = static_cast<int>(conv_step * sizeof(float) / sizeof(T)), slots = 3;

  static constexpr int thread_rows = Rows * Columns == 2048 ? 4 : 8;
  static constexpr int thread_columns = Rows == 128 && Columns >= 64 ? 8 : 4;
  static constexpr int warp_rows = Columns == 16 && Rows == 256 ? 64 : Rows == 128 && Columns >= 64 ? 64 : 32;
  static constexpr int warp_columns = Columns == 16 ? 16 : Rows == 128 && Columns == 128 ? 64 : 32;

  template <dense A, dense B>
  using product = std::conditional_t<Tensor, tensor_product<T, Rows, Columns, warp_rows, warp_columns, A, B>,
                                     simt_product<Rows, Columns, thread_rows, thread_columns, A, B>>;
  static constexpr int threads = product<dense::depth, dense::width>::threads;
  static constexpr int blocks_at_once = Rows * Columns == 128 * 128 ? 2
                                        : Rows == 256 || (!Tensor && Rows * Columns == 128 * 64)
                                            ? 3
                                            : 512 / threads;
};

/// Calls f(block) with an object of the conv_block type for a plan. Blocks of 16 columns have RowsOf16 rows:
/// 256 for pixels, 128 for gradients of weights. Tensors whose channels cannot be copied in vectors
/// (`in_vectors` false) usually have few channels, such as the three of an image, so two kinds of blocks
/// suffice for them. 16-bit types always compute on tensor cores.
template <class T, int RowsOf16, class F>
inline void with_block(const conv_plan& plan, bool in_vectors, F f) {
  const auto kind = [&](auto tensor) {
    constexpr bool on = decltype(tensor)::value;
    constexpr int run = vector_width<T>;
    const bool narrow = plan.tile == conv_tile::t256x16 || plan.tile == conv_tile::t128x16;
    if (!in_vectors && narrow) return f(conv_block<on, T, RowsOf16, 16, 1>());
    if (!in_vectors) return f(conv_block<on, T, 64, 64, 1>());
    switch (plan.tile) {
      case conv_tile::t128x128:
        return f(conv_block<on, T, 128, 128, run>());
      case conv_tile::t128x64:
        return f(conv_block<on, T, 128, 64, run>());
      case conv_tile::t64x64:
        return f(conv_block<on, T, 64, 64, run>());
      case conv_tile::t128x32:
        return f(conv_block<on, T, 128, 32, run>());
      case conv_tile::t256x16:
      case conv_tile::t128x16:
        return f(conv_block<on, T, RowsOf16, 16, run>());
    }
  };
  if constexpr (sizeof(T) == 4) {
    if (!plan.tensor) return kind(std::false_type());
  }
  kind(std::true_type());
}

PUFFERFISH_KERNELS_END
