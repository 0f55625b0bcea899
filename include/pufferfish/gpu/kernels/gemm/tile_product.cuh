// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: products of tiles that are stored in shared memory, with the result in the registers of a group
/// of threads: by the float units, in blocks of each thread (simt_product), or by the
/// tensor cores, in blocks of each warp (tensor_product).
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
#include <pufferfish/gpu/kernels/gemm/tensor_product.cuh>

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

PUFFERFISH_KERNELS_END
