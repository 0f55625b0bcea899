// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of the elementwise part of one time step of an LSTM. All matrices are in device memory. Each
/// launcher throws backend_error if its launch fails.

#include <pufferfish/gpu/kernels/copy/rows.hpp>

PUFFERFISH_KERNELS_BEGIN

/// Computes ops::lstm_forward. gates [batch x 4 hidden] holds the preactivations of the gates i, f, g, o,
/// `hidden` columns each, which are replaced by activations. before, cell and output: batch x hidden.
/// before.data nullptr: zeros. cell may be `before`.
template <class T>
void lstm_forward(cudaStream_t stream, index_t batch, index_t hidden, row_array<T> gates,
                  row_array<const T> before, row_array<T> cell, row_array<T> output);

/// Computes ops::lstm_backward: replaces the activations in gates [batch x 4 hidden] by the gradients of the
/// preactivations. The other matrices are batch x hidden. A null pointer as data of before, cell, dy,
/// dh_after or dc_after stands for zeros. dc_before may be dc_after.
template <class T>
void lstm_backward(cudaStream_t stream, index_t batch, index_t hidden, row_array<T> gates,
                   row_array<const T> before, row_array<const T> cell, row_array<const T> dy,
                   row_array<const T> dh_after, row_array<const T> dc_after, row_array<T> dc_before);

PUFFERFISH_KERNELS_END
