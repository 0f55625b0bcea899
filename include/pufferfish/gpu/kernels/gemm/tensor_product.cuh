// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: products of tiles on the tensor cores, with the result in registers. tile_product.cuh describes
/// the interface.

#include <pufferfish/gpu/kernels/gemm/mma.cuh>
#include <pufferfish/gpu/kernels/gemm/tile_layout.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Product on the tensor cores: each warp has WarpRows x WarpColumns results, in blocks of 16 x 8, whose sums
/// advance by 32 bytes of the depth. float operands are rounded to TF32 after they are loaded. Thread map:
/// warp w has the rows w / warp_columns WarpRows .. and the columns w % warp_columns WarpColumns ..; within a
/// block of 16 x 8 the lane has the places of c in mma.cuh. The kernel needs whole warps, and all 32 lanes
/// take part.
template <class T, int Rows, int Columns, int WarpRows, int WarpColumns, dense A, dense B>
class tensor_product {
  static constexpr int row_blocks = WarpRows / 16, column_blocks = WarpColumns / 8;
  static constexpr int warp_columns = Columns / WarpColumns;
  static constexpr int step = static_cast<int>(32 / sizeof(T));
  static constexpr bool single = sizeof(T) == 4;

 public:
  static constexpr int threads = Rows / WarpRows * warp_columns * warp_threads;
  static constexpr int width = 2;
  static constexpr int columns = Columns, own_rows = 2 * row_blocks, own_columns = 2 * column_blocks;
  static constexpr int sharers = Rows / WarpRows * 8;
  static_assert(Rows % WarpRows == 0 && Columns % WarpColumns == 0);
  static_assert(WarpRows % 16 == 0 && WarpColumns % 16 == 0, "operands are read in blocks of 16");

  __device__ explicit tensor_product(int thread) : lane_(thread % warp_threads) {
    const int warp = thread / warp_threads;
    row_ = warp / warp_columns * WarpRows;
    column_ = warp % warp_columns * WarpColumns;
    clear();
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < row_blocks; ++i) {
#pragma unroll
      for (int j = 0; j < column_blocks; ++j) {
#pragma unroll
        for (int d = 0; d < 4; ++d) sum_[i][j][d] = 0.0F;
      }
    }
  }

  /// Layouts as simt_product::multiply. Depth: a multiple of 32 bytes of elements.
  template <int Depth, int AStride, int BStride>
  __device__ void multiply(const T* a, const T* b) {
    static_assert(Depth % step == 0);
    static_assert(!single || A == dense::depth || B == dense::depth || AStride % 8 == BStride % 8,
                  "both operands take the depth in one order");
    const T* const own_a = a + own<A, AStride, true>(row_);
    const T* const own_b = b + own<B, BStride, false>(column_);
#pragma unroll 2
    for (int k = 0; k < Depth; k += step) {
      array_of<std::uint32_t[4], row_blocks> left;
      array_of<std::uint32_t[4], column_blocks / 2> right;
#pragma unroll
      for (int i = 0; i < row_blocks; ++i) read<A, AStride, true>(own_a, i * 16, k, left[i]);
#pragma unroll
      for (int j = 0; j < column_blocks / 2; ++j) read<B, BStride, false>(own_b, j * 16, k, right[j]);
#pragma unroll
      for (int i = 0; i < row_blocks; ++i) {
#pragma unroll
        for (int j = 0; j < column_blocks; ++j) {
          const std::uint32_t pair[2] = {right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]};
          mma<T>(sum_[i][j], left[i], pair);
        }
      }
    }
  }

  /// result += left b, for an operand that is itself a result: `left` is another product of the same threads
  /// and rows, whose warps have all of its columns, the depth of this product. Its numbers are rounded to T,
  /// of 16 bits. b is laid out as in multiply. `needed`: number of columns that are needed; blocks of 16
  /// columns beyond them are neither read nor changed.
  template <int BStride, class Left>
  __device__ void multiply_result(const Left& left, const T* b, int needed) {
    constexpr int steps = Left::columns / step, blocks = column_blocks / 2;
    static_assert(!single && Left::own_rows == own_rows && Left::own_columns == 4 * steps);
    array_of<array_of<std::uint32_t[4], steps>, row_blocks> words;
#pragma unroll
    for (int i = 0; i < row_blocks; ++i) {
#pragma unroll
      for (int k = 0; k < steps; ++k) {
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          const int row = 2 * i + d % 2, column = 4 * k + d / 2 * 2;
          words[i][k][d] = packed<T>(left.value(row, column), left.value(row, column + 1));
        }
      }
    }
    const T* const own_b = b + own<B, BStride, false>(column_);
    if (needed > 16 * (blocks - 1)) return add_blocks<BStride, blocks, steps>(words, own_b, 0);
#pragma unroll
    for (int j = 0; j < blocks - 1; ++j) {
      if (16 * j < needed) add_blocks<BStride, 1, steps>(words, own_b, j);
    }
  }

  template <class F>
  __device__ void change(F f) {
    for_places([&](int i, int j, int part, int row, int column) {
      element_run<float, width> run = run_of(i, j, part);
      f(row, column, run);
      sum_[i][j][part * 2] = run.values[0];
      sum_[i][j][part * 2 + 1] = run.values[1];
    });
  }
  template <class F>
  __device__ void for_each(F f) const {
    for_places([&](int i, int j, int part, int row, int column) { f(row, column, run_of(i, j, part)); });
  }

  __device__ int row(int i) const { return row_ + lane_ / 4 + i / 2 * 16 + i % 2 * 8; }
  __device__ int column(int j) const { return column_ + lane_ % 4 * 2 + j / 2 * 8 + j % 2; }
  __device__ float value(int i, int j) const { return sum_[i / 2][j / 2][i % 2 * 2 + j % 2]; }
  /// value(i, j), which the caller may change.
  __device__ float& at(int i, int j) { return sum_[i / 2][j / 2][i % 2 * 2 + j % 2]; }
  __device__ int sharer() const { return row_ / WarpRows * 8 + lane_ / 4; }

 private:
  // Adds the products of `left` with the Count blocks of 16 columns of the right operand from block `first`
  // on. own_b: the element from which this lane reads block 0.
  template <int BStride, int Count, int Steps>
  __device__ void add_blocks(const array_of<array_of<std::uint32_t[4], Steps>, row_blocks>& left,
                             const T* own_b, int first) {
#pragma unroll
    for (int k = 0; k < Steps; ++k) {
#pragma unroll
      for (int j = first; j < first + Count; ++j) {
        std::uint32_t right[4];
        read<B, BStride, false>(own_b, j * 16, k * step, right);
#pragma unroll
        for (int i = 0; i < row_blocks; ++i) {
          mma<T>(sum_[i][2 * j], left[i][k], {right[0], right[1]});
          mma<T>(sum_[i][2 * j + 1], left[i][k], {right[2], right[3]});
        }
      }
    }
  }

  // Calls f(i, j, part, row, column) for each run of two results of this lane.
  template <class F>
  __device__ void for_places(F f) const {
#pragma unroll
    for (int i = 0; i < row_blocks; ++i) {
#pragma unroll
      for (int j = 0; j < column_blocks; ++j) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          f(i, j, part, row(2 * i + part), column(2 * j));
        }
      }
    }
  }
  __device__ element_run<float, width> run_of(int i, int j, int part) const {
    return {{sum_[i][j][part * 2], sum_[i][j][part * 2 + 1]}};
  }

  // The element from which this lane reads, in a tile's block of 16 rows (columns) from `first` on: a block
  // is four 8 x 8 blocks of words of 4 bytes, in the order of the tensor cores. The second block is 8 rows
  // further in the left operand, and the second half of the depth in the right operand.
  template <dense D, int Stride, bool Left>
  __device__ int own(int first) const {
    const int inner = lane_ % 8, second = lane_ / 8 % 2, third = lane_ / 16;
    const int across = (Left ? second : third) * 8, along = (Left ? third : second) * (step / 2);
    if constexpr (D == dense::depth) {
      return (first + across + inner) * Stride + along;
    } else if constexpr (!single) {
      return (along + inner) * Stride + first + across;
    } else {
      return first + lane_ / 4;
    }
  }

  // Reads a block of 16 rows of the left operand (or columns of the right one), `first` rows further, by
  // `step` of the depth from k on.
  template <dense D, int Stride, bool Left>
  __device__ void read(const T* own, int first, int k, std::uint32_t (&words)[4]) const {
    if constexpr (D == dense::depth) {
      load_matrices(words, own + (first * Stride + k));
    } else if constexpr (!single) {
      load_matrices<true>(words, own + (k * Stride + first));
    } else {
      read_words<Stride, Left>(own + first, k, words);
    }
    if constexpr (single) {
#pragma unroll
      for (int d = 0; d < 4; ++d) words[d] = to_tf32(words[d]);
    }
  }

  // Words of 4 bytes that are dense across the depth cannot be transposed while they are loaded. The order of
  // the depth is free if it is the same for both operands. If rows are 16 bytes apart in the banks,
  // neighbouring lanes read every second row, so that they use different banks.
  template <int Stride, bool Left>
  __device__ void read_words(const T* tile, int k, std::uint32_t (&words)[4]) const {
    constexpr bool apart = Stride % 8 == 4;
    static_assert(!apart || (A == dense::width && B == dense::width));
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      const int across = (Left ? d % 2 : d / 2) * 8, half = Left ? d / 2 : d % 2;
      const int along = apart ? lane_ % 4 * 2 + half : lane_ % 4 + half * 4;
      words[d] = __float_as_uint(tile[(k + along) * Stride + across]);
    }
  }

  array_of<array_of<float[4], column_blocks>, row_blocks> sum_;
  int lane_, row_, column_;
};

PUFFERFISH_KERNELS_END
