// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the products of attention on tensor cores, for numbers of 16 bits in runs of about 128 rows and
/// more. attention_floats.cuh describes the interface, and attention.hpp the rounding.
///
/// Operands are in dynamic shared memory, in panels of 64 rows x 64 columns: the left matrices, then one or
/// two stages of the right matrices. With two stages, the next rows are copied during the products of the
/// present ones. Columns are zero from the matrix's last one up to a multiple of 16.

#include <pufferfish/gpu/kernels/attention/attention_head.cuh>
#include <pufferfish/gpu/kernels/gemm/async_copy.cuh>
#include <pufferfish/gpu/kernels/gemm/tensor_product.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Each of a block's four warps has 16 rows of scores and of the result, so that the weights of a row are in
/// four lanes, and become an operand of the second product without leaving their lanes.
template <class T>
class tensor_block {
  static constexpr int stride = tile_stride<T, dense::depth>(attention_plans::panel);
  static constexpr int panel_size = attention_plans::tensor_edge * stride;

 public:
  static constexpr int edge = attention_plans::tensor_edge, row_lanes = 4;
  static constexpr int forward_blocks = 4, query_blocks = 3, key_blocks = 2;

  struct scores : tensor_product<T, edge, edge, 16, edge, dense::depth, dense::depth> {
    __device__ scores() : scores::tensor_product(block_thread()) {}
  };
  struct result : tensor_product<T, edge, result_columns, 16, result_columns, dense::depth, dense::width> {
    __device__ result() : result::tensor_product(block_thread()) {}
  };
  struct memory {
    kept_memory<edge> kept;
  };

  static constexpr std::size_t shared_bytes(int left, int right) {
    const int panels = left + (attention_plans::runs_ahead(left, right) ? 2 : 1) * right;
    return static_cast<std::size_t>(panels * panel_size) * sizeof(T);
  }

  __device__ tensor_block(memory&, const attention_operands<T>& operands, int row, int first, int end)
      : operands_(operands),
        next_{row_copy(operands.right[0], first), row_copy(operands.right[1], first)},
        end_(end),
        left_(dynamic_shared<T>()) {
    const int left_panels = panels(operands.left[0]) + panels(operands.left[1]);
    const int right_panels = panels(operands.right[0]) + panels(operands.right[1]);
    right_ = left_ + left_panels * panel_size;
    stage_size_ = attention_plans::runs_ahead(left_panels, right_panels) ? right_panels * panel_size : 0;
    row_copy(operands.left[0], row).start(operands.left[0], row, left_);
    row_copy(operands.left[1], row)
        .start(operands.left[1], row, left_ + panels(operands.left[0]) * panel_size);
    if (stage_size_ != 0) copy_right(first, right_);
    right_ += stage_size_;  // fetch() changes to the other stage
    commit_copies();
  }

  __device__ void fetch(int row) {
    if (stage_size_ != 0) {
      T* const other = right_;
      right_ -= stage_size_;
      stage_size_ = -stage_size_;
      if (row + edge < end_) copy_right(row + edge, other);
      commit_copies();
      wait_for_copies<1>();
    } else {
      copy_right(row, right_);
      commit_copies();
      wait_for_copies<0>();
    }
    __syncthreads();
  }
  __device__ void release() { __syncthreads(); }

  __device__ void add_scores(int i, scores& sums) const {
    const T *const left = left_ + (i == 0 ? 0 : panels(operands_.left[0]) * panel_size), *right = panel(i, 0);
#pragma unroll 2
    for (int k = 0; k < operands_.left[i].columns; k += 16) {
      const int at = k / attention_plans::panel * panel_size + k % attention_plans::panel;
      sums.template multiply<16, stride, stride>(left + at, right + at);
    }
  }

  __device__ void add_weighted(const scores& weights, int i, int column, result& sums) const {
    sums.template multiply_result<stride>(weights, panel(i, column), operands_.right[i].columns - column);
  }

 private:
  static __device__ int panels(const head_rows<T>& of) { return attention_plans::panels(of.columns); }
  // The panel of the fetched rows of right matrix i that contains a column.
  __device__ const T* panel(int i, int column) const {
    return right_ +
           ((i == 0 ? 0 : panels(operands_.right[0])) + column / attention_plans::panel) * panel_size;
  }

  // Copies a matrix to panels, 64 rows after another. A thread has 8 columns of every 16th row. Rows that are
  // not aligned to 16 bytes are copied element by element; the thread waits for these copies.
  struct row_copy {
    static constexpr int vectors = attention_plans::panel / vector_width<T>;
    static constexpr int rows_at_once = attention_threads / vectors;

    __device__ row_copy(const head_rows<T>& of, int row)
        : from(of.data + (row + own_row()) * of.stride + own_column()),
          whole(of.columns % vector_width<T> == 0 && whole_vectors<T>(of.stride, of.data)) {}
    static __device__ int own_row() { return block_thread() / vectors; }
    static __device__ int own_column() { return block_thread() % vectors * vector_width<T>; }

    // Starts to copy the rows from `row` on, at which the copies have arrived, to the panels from `to` on.
    // Rows outside of the matrix become zeros.
    __device__ void start(const head_rows<T>& of, int row, T* to) {
      const int rows = of.rows - row - own_row();  // of the matrix, from the thread's first one on
      const T* panel_from = from;
      to += own_row() * tensor_block::stride + own_column();
      for (int column = own_column(); column < ceil_div(of.columns, 16) * 16;
           column += attention_plans::panel) {
        const int inside = column < of.columns ? rows : 0;
        if (whole) {
#pragma unroll
          for (int i = 0; i < edge; i += rows_at_once) {
            copy_async<16>(to + i * tensor_block::stride, panel_from + i * of.stride, i < inside);
          }
        } else {
#pragma unroll 1
          for (int i = 0; i < edge; i += rows_at_once) {
            vector<T> values{};
            for (int d = 0; d < vector_width<T>; ++d) {
              if (i < inside && column + d < of.columns) values[d] = panel_from[i * of.stride + d];
            }
            store_vector(to + i * tensor_block::stride, values);
          }
        }
        to += panel_size;
        panel_from += attention_plans::panel;
      }
      from += edge * of.stride;
    }

    const T* from;  // the thread's first element
    bool whole;
  };

  __device__ void copy_right(int row, T* to) {
    next_[0].start(operands_.right[0], row, to);
    next_[1].start(operands_.right[1], row, to + panels(operands_.right[0]) * panel_size);
  }

  const attention_operands<T>& operands_;
  row_copy next_[2];  // of the right matrices
  int end_;
  T *left_, *right_;
  int stage_size_;  // elements from the present stage to the other one; 0: there is one stage
};

PUFFERFISH_KERNELS_END
