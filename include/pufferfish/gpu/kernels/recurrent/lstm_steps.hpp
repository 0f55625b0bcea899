// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers that compute all time steps of an LSTM layer in one cooperative launch, for elements of 16 bits.
/// Each block keeps the recurrent weights of its columns of the state in shared memory.

#include <initializer_list>

#include <pufferfish/gpu/kernels/copy/rows.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// How the state is distributed over the blocks of a launch: block i has the columns i columns .. (i + 1)
/// columns - 1 of the state, in all four gates.
struct lstm_steps_plan {
  int columns = 0;           ///< 4, 8 or 12; 0: the device has no room for the layer
  int row_tiles = 0;         ///< tiles of 16 sequences that a block computes: 2 or 4
  int blocks = 0;            ///< at most one for each multiprocessor
  index_t shared_bytes = 0;  ///< of a block
  index_t exchange = 0;      ///< elements of T in device memory by which the blocks exchange their results
};

/// Operands of a pass over `steps` time steps of `batch` sequences. Rows of a sequence of matrices are
/// ordered by step, then by sequence. A null pointer as data stands for zeros where it is read, and is
/// skipped where it is written.
template <class T>
struct lstm_steps_forward {
  index_t steps, batch, hidden;
  row_array<const T> weight;              ///< hidden x 4 hidden
  row_array<const T> h_before, c_before;  ///< the initial state, batch x hidden
  row_array<T> gates;                     ///< preactivations without h weight, replaced by activations
  row_array<T> cells;                     ///< the cell state after each step
  bool one_cell;                          ///< `cells` has `batch` rows, which each step overwrites
  row_array<T> output;                    ///< steps batch x hidden
};
template <class T>
struct lstm_steps_backward {
  index_t steps, batch, hidden;
  row_array<const T> weight;              ///< hidden x 4 hidden
  row_array<T> gates;                     ///< activations, replaced by gradients of the preactivations
  row_array<const T> c_before, cells;     ///< as in the forward pass, with the cells of all steps
  row_array<const T> dy;                  ///< gradient of the output, steps batch x hidden
  row_array<const T> dh_after, dc_after;  ///< gradient of the state after the last step
  row_array<T> dh_before, dc_before;      ///< gradient of the initial state; may be dh_after and dc_after
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Elements of the depth that a warp multiplies at once, warps of a block, places for their sums, and floats
/// between the rows of sums.
inline constexpr int resident_chunk = 32, resident_warps = 8, resident_slots = 4, resident_gap = 2;

/// Plans the forward or backward pass of a layer on a device with this number of multiprocessors and
/// `shared_bytes` bytes of shared memory for a block. The block of the forward pass has its columns of four
/// gates, `hidden` deep; that of the backward pass has its rows of the weight, 4 hidden deep. The narrowest
/// columns that fit are taken: then most multiprocessors have work. hidden 1500 on an H100: 125 blocks of 12
/// columns, 169,984 bytes forward and 201,728 backward for up to 32 sequences.
inline lstm_steps_plan plan_lstm_steps(index_t batch, index_t hidden, bool backward, int multiprocessors,
                                       index_t shared_bytes) {
  if (batch < 1 || batch > 64 || hidden < 1) return {};
  const index_t depth = backward ? 4 * hidden : hidden;
  const index_t chunks = (depth + resident_chunk - 1) / resident_chunk;
  for (const int columns : {4, 8, 12}) {
    const index_t blocks = (hidden + columns - 1) / columns;
    if (blocks > multiprocessors) continue;
    const int row_tiles = batch <= 32 ? 2 : 4;
    const index_t width = backward ? (columns + 7) / 8 * 8 : 4 * columns;
    const index_t matrix = chunks * resident_chunk * width * 2;
    const index_t sums = resident_slots * 16 * row_tiles * (width + resident_gap) * 4;
    if (matrix + sums > shared_bytes) continue;
    return {columns, row_tiles, static_cast<int>(blocks), matrix + sums,
            2 * 16 * row_tiles * chunks * resident_chunk};
  }
  return {};
}

/// Computes ops::lstm_forward for all steps, each after gates += h weight, where h is the output of the step
/// before. Sums are in float and are not rounded before the activation. `exchange`: plan.exchange elements;
/// `counters`: two, which are zero before and after. The plan must be that of plan_lstm_steps for a forward
/// pass and have columns. Throws backend_error if the launch fails.
template <class T>
void lstm_forward_steps(cudaStream_t stream, const lstm_steps_plan& plan, const lstm_steps_forward<T>& work,
                        T* exchange, unsigned* counters);
/// Computes ops::lstm_backward for all steps, from the last one on; between two steps, dh = dz weight^T. dh
/// and dc are not rounded between the steps. Otherwise the contract of lstm_forward_steps.
template <class T>
void lstm_backward_steps(cudaStream_t stream, const lstm_steps_plan& plan, const lstm_steps_backward<T>& work,
                         T* exchange, unsigned* counters);

PUFFERFISH_KERNELS_END
