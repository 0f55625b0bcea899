// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of the elementwise part of one time step of an LSTM.

#include <pufferfish/gpu/kernels/copy/rows.hpp>

PUFFERFISH_KERNELS_BEGIN

/// As ops::lstm_forward: gates [batch x 4 hidden] hold preactivations, which are replaced by activations.
/// before.data nullptr: zeros. Gates i, f, g, o are `hidden` columns each. cell may be `before`.
template <class T>
void lstm_forward(cudaStream_t stream, index_t batch, index_t hidden, row_array<T> gates,
                  row_array<const T> before, row_array<T> cell, row_array<T> output);

/// As ops::lstm_backward: replaces activations in gates by gradients of preactivations; data nullptr: zeros.
/// Data may be nullptr for before, cell, dy, dh_after and dc_after. dc_before may be dc_after.
template <class T>
void lstm_backward(cudaStream_t stream, index_t batch, index_t hidden, row_array<T> gates,
                   row_array<const T> before, row_array<const T> cell, row_array<const T> dy,
                   row_array<const T> dh_after, row_array<const T> dc_after, row_array<T> dc_before);

PUFFERFISH_KERNELS_END
