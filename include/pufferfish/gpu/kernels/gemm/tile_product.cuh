// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: products of tiles that are stored in shared memory, with the result in the registers of a group
/// of threads: by the float units, in blocks of each thread, or by the tensor cores, in blocks of each warp.
///
/// Both kinds have one interface, so that a kernel is written once:
///   threads                       number of threads that share the result,
///   width                         number of columns in a run of for_each(),
///   multiply<Depth, A, B>(a, b)   result += a b over Depth elements, with rows A (B) elements apart,
///   for_each(f)                   f(row, column, run) for each run of `width` results of this thread,
///   change(f)                     the same; f may change the run, which changes the results,
///   own_rows, own_columns         number of rows and columns in which a thread has results,
///   row(i), column(j), value(i, j)  the thread's i-th row, its j-th column, and its result there; row(i) and
///                                 column(j) increase,
///   sharers, sharer()             number of threads that have results in a column, and the thread's number
///                                 among them; sharer 0 has row 0.
///
/// Use, with both tiles in shared memory and a barrier before:
///
///     Product sums(block_thread());
///     sums.multiply<Depth, left_stride, right_stride>(left, right);
///     sums.for_each([&](int row, int column, const auto& run) { ... run.values[0 .. width - 1] ... });

#include <pufferfish/gpu/kernels/gemm/async_copy.cuh>
#include <pufferfish/gpu/kernels/gemm/mma.cuh>
#include <pufferfish/gpu/kernels/gemm/tile_layout.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Product on the float units: each thread has ThreadRows x ThreadColumns results in registers. As it reads
/// far fewer numbers (16 for 8 x 8 results), reading keeps up with computing. Lanes that differ only in their
/// row read the same address of the right operand, and vice versa. Thread map: warps form a grid of
/// warp_columns columns; a warp's lanes are lane_rows x lane_columns. Result (i, j) of a thread has the row
/// i / row_run (row_threads row_run) + row_ row_run + i % row_run, and likewise the column.
template <int Rows, int Columns, int ThreadRows, int ThreadColumns, dense A, dense B>
class simt_product {
  static constexpr int row_threads = Rows / ThreadRows, column_threads = Columns / ThreadColumns;
  static constexpr int lane_columns = column_threads < 8 ? column_threads : 8;
  static constexpr int lane_rows = warp_threads / lane_columns;
  static constexpr int warp_columns = column_threads / lane_columns;
  static constexpr int row_run = A == dense::depth ? 1 : (ThreadRows < 4 ? ThreadRows : 4);
  static constexpr int column_run = B == dense::depth ? 1 : (ThreadColumns < 4 ? ThreadColumns : 4);
  static constexpr int step = 4;

 public:
  static constexpr int threads = row_threads * column_threads;
  static constexpr int width = column_run;
  static constexpr int columns = Columns, own_rows = ThreadRows, own_columns = ThreadColumns;
  static constexpr int sharers = row_threads;
  static_assert(Rows % ThreadRows == 0 && Columns % ThreadColumns == 0 && threads % warp_threads == 0);
  static_assert(row_threads % lane_rows == 0);

  /// All results are zero. `thread`: number of the calling thread.
  __device__ explicit simt_product(int thread) {
    const int lane = thread % warp_threads, warp = thread / warp_threads;
    row_ = warp / warp_columns * lane_rows + lane / lane_columns;
    column_ = warp % warp_columns * lane_columns + lane % lane_columns;
    clear();
  }

  /// Sets all results to zero, as the constructor does.
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < ThreadRows; ++i) {
#pragma unroll
      for (int j = 0; j < ThreadColumns; ++j) sum_[i][j] = 0.0F;
    }
  }

  /// Left element (row, k) is at row AStride + k if A is dense in depth, else at k AStride + row; right
  /// element (k, column) likewise with BStride. Both tiles are in shared memory, aligned to 16 bytes. Depth:
  /// a multiple of 4.
  template <int Depth, int AStride, int BStride>
  __device__ void multiply(const float* a, const float* b) {
    static_assert(Depth % step == 0);
#pragma unroll 4
    for (int k = 0; k < Depth; k += step) {
      array_of<array_of<float, ThreadColumns>, step> right;
      read_right<BStride>(b, k, right);
      if constexpr (A == dense::depth) {
#pragma unroll
        for (int i = 0; i < ThreadRows; ++i) {
          const vector<float> left = load_vector(a + row(i) * AStride + k);
#pragma unroll
          for (int d = 0; d < step; ++d) add(i, left[d], right[d]);
        }
      } else {
#pragma unroll
        for (int d = 0; d < step; ++d) {
          array_of<float, ThreadRows> left;
#pragma unroll
          for (int i = 0; i < ThreadRows; i += row_run)
            read_run<row_run>(a + (k + d) * AStride + row(i), left + i);
#pragma unroll
          for (int i = 0; i < ThreadRows; ++i) add(i, left[i], right[d]);
        }
      }
    }
  }

  /// Calls f(row, column, run) for each run of results of this thread. Changes of the run change the results.
  template <class F>
  __device__ void change(F f) {
#pragma unroll
    for (int i = 0; i < ThreadRows; ++i) {
#pragma unroll
      for (int j = 0; j < ThreadColumns; j += width) {
        element_run<float, width> run = run_of(i, j);
        f(row(i), column(j), run);
#pragma unroll
        for (int d = 0; d < width; ++d) sum_[i][j + d] = run.values[d];
      }
    }
  }
  /// Calls f(row, column, run) for each run of results of this thread.
  template <class F>
  __device__ void for_each(F f) const {
#pragma unroll
    for (int i = 0; i < ThreadRows; ++i) {
#pragma unroll
      for (int j = 0; j < ThreadColumns; j += width) f(row(i), column(j), run_of(i, j));
    }
  }

  // A thread has runs of elements in a dense direction; else neighbouring threads have neighbouring elements.
  __device__ int row(int i) const {
    return i / row_run * (row_threads * row_run) + row_ * row_run + i % row_run;
  }
  __device__ int column(int j) const {
    return j / column_run * (column_threads * column_run) + column_ * column_run + j % column_run;
  }
  __device__ float value(int i, int j) const { return sum_[i][j]; }
  __device__ int sharer() const { return row_; }

 private:
  // The results of the thread's i-th row from its j-th column on.
  __device__ element_run<float, width> run_of(int i, int j) const {
    element_run<float, width> run;
#pragma unroll
    for (int d = 0; d < width; ++d) run.values[d] = sum_[i][j + d];
    return run;
  }

  // Reads Count elements by one access.
  template <int Count>
  __device__ static void read_run(const float* from, float* to) {
    const auto values = *reinterpret_cast<const element_run<float, Count>*>(from);
#pragma unroll
    for (int i = 0; i < Count; ++i) to[i] = values.values[i];
  }

  // The right operand's elements k .. k + 3 for all of this thread's columns.
  template <int BStride>
  __device__ void read_right(const float* b, int k,
                             array_of<array_of<float, ThreadColumns>, step>& right) const {
    if constexpr (B == dense::depth) {
#pragma unroll
      for (int j = 0; j < ThreadColumns; ++j) {
        const vector<float> values = load_vector(b + column(j) * BStride + k);
#pragma unroll
        for (int d = 0; d < step; ++d) right[d][j] = values[d];
      }
    } else {
#pragma unroll
      for (int d = 0; d < step; ++d) {
#pragma unroll
        for (int j = 0; j < ThreadColumns; j += column_run) {
          read_run<column_run>(b + (k + d) * BStride + column(j), right[d] + j);
        }
      }
    }
  }

  // Adds the products of an element of the left operand and a row of the right one to the thread's i-th row.
  __device__ void add(int i, float left, const array_of<float, ThreadColumns>& right) {
#pragma unroll
    for (int j = 0; j < ThreadColumns; ++j) sum_[i][j] += left * right[j];
  }

  array_of<array_of<float, ThreadColumns>, ThreadRows> sum_;
  int row_, column_;
};

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
  __device__ int sharer() const { return row_ / WarpRows * 8 + lane_ / 4; }

 private:
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
