// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of few_rows.hpp: products with at most 32 rows, on tensor cores.

#include <type_traits>

#include <pufferfish/gpu/kernels/conv/conv_tiles.cuh>
#include <pufferfish/gpu/kernels/gemm/few_rows.hpp>
#include <pufferfish/gpu/kernels/gemm/tile_product.cuh>

PUFFERFISH_KERNELS_BEGIN

/// The type of a block, which computes all rows and `Columns` columns of the result. In every step the warps
/// share the depth, and each has sums of the whole tile. At the end the sums are added in the order of the
/// warps.
template <class T, int Columns, dense B>
struct few_rows_block {
  static constexpr int rows = static_cast<int>(few_rows), columns = Columns;
  static constexpr int warps = 8, threads = warps * warp_threads;
  static constexpr int depth = Columns == 16 ? 256 : 128, warp_depth = depth / warps, slots = 5;
  using product = tensor_product<T, rows, Columns, rows, Columns, dense::depth, B>;
  static_assert(product::threads == warp_threads);

  static constexpr int left_stride = tile_stride<T, dense::depth>(depth);
  static constexpr int right_stride = tile_stride<T, B>(B == dense::depth ? depth : Columns);
  static constexpr int left = rows * left_stride;
  static constexpr int right = (B == dense::depth ? Columns : depth) * right_stride;
  static constexpr int sum_stride = Columns + 2;  // rows begin in other banks
  static constexpr std::size_t tiles = slots * (left + right) * sizeof(T);
  static constexpr std::size_t sums = warps * rows * sum_stride * sizeof(float);
  static constexpr std::size_t bytes = tiles > sums ? tiles : sums;
  static_assert(bytes <= few_rows_shared_bytes);
};

/// Arguments of multiply_few_rows.
template <class T>
struct few_rows_work {
  row_array<const T> left, right;
  row_array<T> result;
  int rows, depth, columns;
  bool add;
};

/// Copies Rows x Length elements to shared memory, Run at a time. Elements outside of rows x length become
/// zeros.
template <int Rows, int Length, int Stride, int Threads, int Run, class T>
__device__ inline void copy_runs(T* tile, const T* matrix, int row_step, int rows, int length, int thread) {
  constexpr int runs = Length / Run;
  for_own<Rows * runs, Threads, true>(thread, [&](int at) {
    const int row = at / runs, column = at % runs * Run;
    copy_elements<Run>(tile + row * Stride + column, matrix + (static_cast<index_t>(row) * row_step + column),
                       row < rows && column < length);
  });
}

/// Block bx computes the columns from bx Columns on.
template <class T, class Block, dense B>
static __global__ void __launch_bounds__(Block::threads)
    multiply_few_rows(grid_dependency earlier, few_rows_work<T> work) {
  earlier.wait();
  constexpr int run = vector_width<T>;
  const int thread = block_thread(), warp = thread / warp_threads;
  const int first_column = static_cast<int>(blockIdx.x) * Block::columns;
  const int columns = remaining(work.columns, first_column, Block::columns);
  const int left_step = static_cast<int>(work.left.stride), right_step = static_cast<int>(work.right.stride);
  T* const tiles = dynamic_shared<T>();
  typename Block::product sums(thread % warp_threads);
  pipeline<Block::slots>(
      0, ceil_div(work.depth, Block::depth),
      [&](int slot, int step) {
        T* const left = tiles + slot * (Block::left + Block::right);
        T* const right = left + Block::left;
        const int k = step * Block::depth, depth = remaining(work.depth, k, Block::depth);
        copy_runs<Block::rows, Block::depth, Block::left_stride, Block::threads, run / 2>(
            left, work.left.data + k, left_step, work.rows, depth, thread);
        if constexpr (B == dense::depth) {
          copy_runs<Block::columns, Block::depth, Block::right_stride, Block::threads, run>(
              right, work.right.row(first_column) + k, right_step, columns, depth, thread);
        } else {
          copy_runs<Block::depth, Block::columns, Block::right_stride, Block::threads, run>(
              right, work.right.row(k) + first_column, right_step, depth, columns, thread);
        }
      },
      [&](int slot, int) {
        const T* const left = tiles + slot * (Block::left + Block::right);
        const T* const right = left + Block::left;
        const int k = warp * Block::warp_depth;
        sums.template multiply<Block::warp_depth, Block::left_stride, Block::right_stride>(
            left + k, right + (B == dense::depth ? k : k * Block::right_stride));
      });

  auto* const parts = dynamic_shared<float>();
  constexpr int part = Block::rows * Block::sum_stride;
  sums.for_each([&](int row, int column, const auto& pair) {
    float* const to = parts + warp * part + row * Block::sum_stride + column;
    to[0] = pair.values[0];
    to[1] = pair.values[1];
  });
  __syncthreads();
  for (int at = thread; at < work.rows * Block::columns; at += Block::threads) {
    const int row = at / Block::columns, column = at % Block::columns;
    if (column >= columns) continue;
    float sum = 0.0F;
#pragma unroll
    for (int w = 0; w < Block::warps; ++w) sum += parts[w * part + row * Block::sum_stride + column];
    T& to = work.result.row(row)[first_column + column];
    to = static_cast<T>(work.add ? static_cast<float>(to) + sum : sum);
  }
}

/// The grid counts tiles of the columns. Tiles have 16 columns where wider tiles would leave multiprocessors
/// idle.
template <class T>
void few_rows_product(cudaStream_t stream, row_array<const T> a, row_array<const T> b, bool turned,
                      row_array<T> c, index_t rows, index_t depth, index_t columns, bool add) {
  if constexpr (sizeof(T) == 2) {
    const launch_site site(stream);
    if (rows == 0) return;
    const few_rows_work<T> work{
        a, b, c, static_cast<int>(rows), static_cast<int>(depth), static_cast<int>(columns), add};
    const auto start = [&](auto width, auto direction) {
      constexpr dense dense_b = decltype(direction)::value;
      using block = few_rows_block<T, decltype(width)::value, dense_b>;
      launch(site, {static_cast<unsigned>(ceil_div(columns, block::columns)), block::threads, block::bytes},
             multiply_few_rows<T, block, dense_b>, work);
    };
    const auto with_direction = [&](auto width) {
      if (turned) return start(width, std::integral_constant<dense, dense::depth>());
      start(width, std::integral_constant<dense, dense::width>());
    };
    constexpr index_t few_columns = 2048;
    if (columns <= few_columns) return with_direction(std::integral_constant<int, 16>());
    with_direction(std::integral_constant<int, 48>());
  }
}

#define PUFFERFISH_INSTANTIATE(T)                                                               \
  template void few_rows_product<T>(cudaStream_t, row_array<const T>, row_array<const T>, bool, \
                                    row_array<T>, index_t, index_t, index_t, bool);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
