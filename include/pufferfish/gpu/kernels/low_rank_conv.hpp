// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of the convolution of low rank in one pass: what lies between its two factors does not go
/// through device memory on its way from one to the other.

#include <pufferfish/gpu/kernels/low_rank_plan.hpp>

PUFFERFISH_KERNELS_BEGIN

// As conv.hpp: device memory, dense, outputs overlap nothing. `geometry` is that of `down`: its out_channels
// are the rank, at most 64. up: rank x out_channels. Element types: float.

/// t = x * down (where t is not null it is kept), y = t up + bias.
template <class T>
void low_rank_conv_forward(cudaStream_t stream, const conv_geometry& geometry, const low_rank_plan& plan,
                           const T* x, const T* down, const T* up, int out_channels, const T* bias, T* t,
                           T* y);

/// dt = dy up^T, and dup = t^T dy, or dup += that: one pass over dy. `partials`: plan.scratch floats.
template <class T>
void low_rank_conv_backward_up(cudaStream_t stream, const low_rank_plan& plan, index_t pixels, int rank,
                               int out_channels, const T* t, const T* dy, const T* up, accumulate_t<T>* dup,
                               bool accumulate, T* dt, float* partials);

PUFFERFISH_KERNELS_END
