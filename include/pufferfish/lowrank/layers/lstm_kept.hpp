// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the shapes of an LSTM's sequences, and the values that its forward pass keeps for the backward
/// pass.

#include <algorithm>
#include <type_traits>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/ops/recurrent/lstm.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Sizes of a batch of sequences, and views of such sequences as rows. Rows are ordered by step, then by
/// sequence.
struct lstm_shapes {
  index_t steps, batch, hidden;

  index_t rows() const { return steps * batch; }
  /// Views a sequence steps x batch x n as steps batch rows of n elements.
  template <class U>
  tensor_view<U, 2> rows_of(const tensor_view<U, 3>& sequence) const {
    return sequence.reshape(extents<2>{rows(), sequence.extent(2)});
  }
  /// The `batch` rows of one step.
  template <class U>
  tensor_view<U, 2> at(const tensor_view<U, 2>& all, index_t step) const {
    return all.slice(0, step * batch, batch);
  }
  /// The `batch` rows of one step of a sequence steps x batch x n.
  template <class U>
  tensor_view<U, 2> step_of(const tensor_view<U, 3>& sequence, index_t step) const {
    return at(rows_of(sequence), step);
  }
};

/// Allocates a matrix in memory that take(count) returns. On a device, its rows of 16-bit elements begin at
/// multiples of 16 bytes, which the fast kernels for products need.
template <class T, class Device, class Take>
tensor_view<T, 2> take_rows(index_t rows, index_t columns, Take take) {
  constexpr index_t run = !std::is_same_v<Device, device::cpu> && sizeof(T) == 2 ? 8 : 1;
  const index_t stride = (columns + run - 1) / run * run;
  return {take(rows * stride), {rows, columns}, {stride, 1}};
}

/// Values that a forward pass keeps for its backward pass; rows are ordered by step, then by sequence.
template <class T>
struct lstm_kept {
  tensor_view<T, 2> h_before, c_before;  ///< batch x hidden, the initial state; null: zeros
  tensor_view<T, 2> input, hidden;       ///< values that the input and the hidden side keep for each row
  tensor_view<T, 2> gates, cells;  ///< gate activations, 4 hidden wide; cells after each step, hidden wide
  tensor_view<T, 2> merged;        ///< hidden x 4 hidden, if the hidden side merges factors; else null

  /// Widths of `input` and `hidden`, and the number of rows of `merged` (0: null).
  struct widths {
    index_t input, hidden, merged;
  };

  /// Allocates all blocks: on the tape in training, else in scratch memory, with cells for one step only.
  /// `state`: whether there is an initial state.
  template <class Device>
  static lstm_kept take(context<Device>& ctx, scratch_frame& frame, const lstm_shapes& size, bool state,
                        const widths& width) {
    const bool training = ctx.training();
    const auto block = [&](index_t rows, index_t columns) {
      return take_rows<T, Device>(rows, columns, [&](index_t count) {
        return training ? ctx.tape().template push<T>(count) : frame.take<T>(count);
      });
    };
    lstm_kept kept;
    if (state) {
      kept.h_before = block(size.batch, size.hidden);
      kept.c_before = block(size.batch, size.hidden);
    }
    kept.input = block(size.rows(), width.input);
    kept.hidden = block(size.rows(), width.hidden);
    kept.cells = block(training ? size.rows() : size.batch, size.hidden);
    kept.gates = block(size.rows(), lstm_gates * size.hidden);
    if (width.merged > 0) kept.merged = block(width.merged, lstm_gates * size.hidden);
    return kept;
  }
  /// Pops the blocks from the tape. They stay readable until something is pushed.
  template <class Device>
  void give_back(context<Device>& ctx) const {
    for (const tensor_view<T, 2>& block : {merged, gates, cells, hidden, input, c_before, h_before}) {
      if (!block.is_null()) ctx.tape().template pop<T>(block.extent(0) * block.stride(0));
    }
  }

  /// The operands of all time steps; `weight`: matrix of the hidden side, hidden x 4 hidden, or null.
  ops::lstm_sequence<T> sequence(const lstm_shapes& size, const tensor_view<const T, 2>& weight) const {
    return {std::max<index_t>(size.batch, 1), weight, h_before, c_before, gates, cells};
  }

  /// Rows of `cells` after step `step`. If the cells of one step only are kept, those rows, for any `step`.
  tensor_view<T, 2> cell(const lstm_shapes& size, index_t step) const {
    return cells.extent(0) == size.rows() ? size.at(cells, step) : cells;
  }
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
