// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of the low-rank convolution in one pass: the result of the first factor is passed to the second
/// factor in shared memory, not through device memory.

#include <pufferfish/gpu/kernels/conv/low_rank_plan.hpp>
#include <pufferfish/gpu/kernels/conv/slice_sum.hpp>
#include <pufferfish/gpu/kernels/reduce/moment_parts.hpp>

PUFFERFISH_KERNELS_BEGIN

// Pointers are to device memory, matrices are dense, and no output overlaps another array. `geometry` is that
// of `down`: its out_channels are the rank, at most 64. up: rank x out_channels. Element types: float,
// bfloat16 and half. Each launcher throws backend_error if its launch fails.

/// t = x * down, which is stored unless t is null; y = t up + bias. x: NHWC; down: patch x rank; t: pixels x
/// rank; y: pixels x out_channels; bias: out_channels elements or nullptr. plan: the result of
/// plan_low_rank_forward, with plan.fused true. `moments` may receive those of the columns of y as stored
/// (moments_fit must be true for y).
template <class T>
void low_rank_conv_forward(cudaStream_t stream, const conv_geometry& geometry, const low_rank_plan& plan,
                           const T* x, const T* down, const T* up, int out_channels, const T* bias, T* t,
                           T* y, const moment_workspace& moments = {});

/// dt = dy up^T, and dup = t^T dy or dup += t^T dy, in one pass over dy. `partials`: plan.scratch floats. t,
/// dt: pixels x rank, dy: pixels x out_channels, up, dup: rank x out_channels. Needs plan.shared_bytes of
/// dynamic shared memory, else throws backend_error. If `later` is not null, the sum of the slices of dup is
/// added to `later` instead of being computed.
template <class T>
void low_rank_conv_backward_up(cudaStream_t stream, const low_rank_plan& plan, index_t pixels, int rank,
                               int out_channels, const T* t, const T* dy, const T* up, accumulate_t<T>* dup,
                               bool accumulate, T* dt, float* partials, slice_sums* later = nullptr);

PUFFERFISH_KERNELS_END
