// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the products of attention on the float units, for short runs and for float. Operands are stored
/// in shared memory as floats, whatever the element type in device memory, and read 16 bytes at a time.
///
/// This kind of block and tensor_block (attention_tensor.cuh) have one interface, so that each kernel is
/// written once. A block has a tile of `edge` rows of the left matrices, and walks over the rows of the right
/// matrices, `edge` rows at a time:
///   edge                        rows and columns of a tile of scores
///   row_lanes                   number of neighbouring lanes of a warp that have elements of a row
///   forward_blocks, query_blocks, key_blocks  blocks that a multiprocessor should hold at once, in the
///                               forward pass and of both gradients; they limit the registers of a thread
///   scores, result              a thread's part of a tile of scores, and of 64 columns of the result
///   memory                      the static shared memory, with the bits of dropout
///   shared_bytes(left, right)   the dynamic shared memory for matrices of `left` and `right` panels in all
///   float_block(memory, operands, row, first, end)  the left tile begins at `row`; right rows first .. end -
///                               1 will be fetched
///   fetch(row)                  selects the right rows from `row` on. A barrier of fetch() or at the
///   beginning
///                               of add_scores() makes earlier writes to shared memory visible
///   add_scores(i, scores)       scores(r, c) += dot product of rows r and c of the left and right matrix i
///   add_weighted(weights, i, column, result)  result += weights times 64 columns of the right matrix i
///   release()                   ends the use of the fetched rows and of other shared memory

#include <pufferfish/gpu/kernels/attention/attention_head.cuh>
#include <pufferfish/gpu/kernels/gemm/tile_layout.cuh>

PUFFERFISH_KERNELS_BEGIN

/// A block works on a square tile of scores, with 8 rows of threads by 16 columns. Thread (y, x) has rows y,
/// y + 8, .. of the tile; of scores it has columns x, x + 16, .., and of the result columns 4 x .. 4 x + 3.
template <class T, int Edge>
class float_block {
  static constexpr int thread_columns = 16, thread_rows = attention_threads / thread_columns;
  static constexpr int depth_step = 32;  // columns of both operands of scores in shared memory at a time
  static constexpr int value_step = 32;  // rows of an operand of a result in shared memory at a time
  // Row strides in shared memory, in floats. They are whole vectors, such that the 8 threads of one 16-byte
  // access read 8 rows from different banks.
  static constexpr int operand_pitch = depth_step + 4, weight_pitch = Edge + 4;

  template <int Columns>
  struct tile {
    static constexpr int own_rows = Edge / thread_rows, own_columns = Columns;
    __device__ static int row(int r) { return block_thread() / thread_columns + thread_rows * r; }
    __device__ float& at(int r, int c) { return values[r][c]; }
    __device__ float at(int r, int c) const { return values[r][c]; }
    array_of<array_of<float, own_columns>, own_rows> values = {};
  };

 public:
  static constexpr int edge = Edge, row_lanes = thread_columns;
  static constexpr int forward_blocks = Edge == 32 ? 4 : 3;
  static constexpr int query_blocks = forward_blocks - 1, key_blocks = query_blocks;

  struct scores : tile<Edge / thread_columns> {
    __device__ static int column(int c) { return block_thread() % thread_columns + thread_columns * c; }
  };
  struct result : tile<result_columns / thread_columns> {
    static constexpr int width = result_columns / thread_columns;
    __device__ static int column(int c) { return block_thread() % thread_columns * width + c; }
  };
  struct alignas(16) memory {
    array_of<float, 2 * Edge * operand_pitch> operands;  ///< two operand tiles, or a tile of values
    array_of<float, Edge * weight_pitch> weights;
    kept_memory<Edge> kept;
  };
  static_assert(2 * Edge * operand_pitch >= value_step * result_columns);
  static constexpr std::size_t shared_bytes(int, int) { return 0; }

  __device__ float_block(memory& shared, const attention_operands<T>& operands, int row, int, int end)
      : shared_(shared), operands_(operands), left_row_(row), right_row_(0), end_(end) {}

  __device__ void fetch(int row) { right_row_ = row; }
  __device__ void release() {}

  __device__ void add_scores(int i, scores& sums) const {
    const head_rows<T>&left = operands_.left[i], &right = operands_.right[i];
    float* const rights = shared_.operands + Edge * operand_pitch;
    int depth = 0;
    do {
      __syncthreads();
      load<Edge, depth_step, operand_pitch>(left, left_row_, depth, shared_.operands);
      load<Edge, depth_step, operand_pitch>(right, right_row_, depth, rights);
      __syncthreads();
      for (int k = 0; k < depth_step; k += 4) {
        array_of<vector<float>, scores::own_rows> a;
        array_of<vector<float>, scores::own_columns> b;
#pragma unroll
        for (int r = 0; r < scores::own_rows; ++r) {
          a[r] = load_vector<float>(shared_.operands + scores::row(r) * operand_pitch + k);
        }
#pragma unroll
        for (int c = 0; c < scores::own_columns; ++c) {
          b[c] = load_vector<float>(rights + scores::column(c) * operand_pitch + k);
        }
#pragma unroll
        for (int r = 0; r < scores::own_rows; ++r) {
#pragma unroll
          for (int c = 0; c < scores::own_columns; ++c) {
#pragma unroll
            for (int d = 0; d < 4; ++d) sums.at(r, c) += a[r][d] * b[c][d];
          }
        }
      }
      depth += depth_step;
    } while (depth < left.columns);
  }

  // Rows of the right matrix from end on have no weight.
  __device__ void add_weighted(const scores& weights, int i, int column, result& sums) const {
    __syncthreads();
#pragma unroll
    for (int r = 0; r < scores::own_rows; ++r) {
#pragma unroll
      for (int c = 0; c < scores::own_columns; ++c) {
        shared_.weights[scores::row(r) * weight_pitch + scores::column(c)] = weights.at(r, c);
      }
    }
    for (int first = 0; first < Edge && right_row_ + first < end_; first += value_step) {
      __syncthreads();
      load<value_step, result_columns, result_columns>(operands_.right[i], right_row_ + first, column,
                                                       shared_.operands);
      __syncthreads();
      for (int k = 0; k < value_step; k += 4) {
        array_of<vector<float>, result::own_rows> a;
        vector<float> b[4];
#pragma unroll
        for (int r = 0; r < result::own_rows; ++r) {
          a[r] = load_vector<float>(shared_.weights + result::row(r) * weight_pitch + first + k);
        }
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          b[d] = load_vector<float>(shared_.operands + (k + d) * result_columns + result::column(0));
        }
#pragma unroll
        for (int r = 0; r < result::own_rows; ++r) {
#pragma unroll
          for (int d = 0; d < 4; ++d) {
#pragma unroll
            for (int c = 0; c < result::width; ++c) sums.at(r, c) += a[r][d] * b[d][c];
          }
        }
      }
    }
  }

 private:
  // Copies Rows x Columns elements of a head to shared memory, from (row, column) on. Element (r, c) is
  // stored at r Pitch + c; elements outside of the head become zeros. No barrier.
  template <int Rows, int Columns, int Pitch>
  static __device__ void load(const head_rows<T>& from, int row, int column, float* to) {
    constexpr int groups = Columns / 4;
    static_assert(Rows * groups % attention_threads == 0);
#pragma unroll
    for (int step = 0; step < Rows * groups / attention_threads; ++step) {
      const int at = step * attention_threads + block_thread();
      const int r = at / groups, c = at % groups * 4;
      store_vector(to + r * Pitch + c, from.four(row + r, column + c));
    }
  }

  memory& shared_;
  const attention_operands<T>& operands_;
  int left_row_, right_row_, end_;
};

PUFFERFISH_KERNELS_END
