// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of convolutions of 3 x 3 taps for devices with warp groups (compute capability 9.0): each block
/// of pixels is copied to shared memory once for all taps.

#include <pufferfish/gpu/kernels/conv/halo_plan.hpp>
#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNELS_BEGIN

// Pointers are to device memory; those of 16-bit arrays, except the bias, are multiples of 16. Layouts and
// aliasing are those of conv.hpp. `plan`: the result of plan_halo_... for the geometry, with plan.fits true.
// Element types: bfloat16 and half. The launchers throw backend_error if a launch fails.

/// Whether the current device and the compiled kernels have warp groups. The kernels must have been compiled
/// for sm_90a.
bool halo_available();

/// y = x * w + bias, as conv_forward.
template <class T>
void halo_forward(cudaStream_t stream, const conv_geometry& geometry, const halo_plan& plan, const T* x,
                  const T* w, const T* bias, T* y);

/// dx = the gradient with respect to x, or with `add` dx += the gradient, as conv_backward_input.
template <class T>
void halo_backward_input(cudaStream_t stream, const conv_geometry& geometry, const halo_plan& plan,
                         const T* dy, const T* w, T* dx, bool add);

/// t = x * down, which is stored unless t is null; y = t up + bias, as low_rank_conv_forward.
template <class T>
void halo_low_rank_forward(cudaStream_t stream, const conv_geometry& geometry, const halo_plan& plan,
                           const T* x, const T* down, const T* up, int out_channels, const T* bias, T* t,
                           T* y);

/// dw = the gradient with respect to w; with `accumulate`, dw += the gradient, as conv_backward_weight.
/// `partials`: plan.scratch floats. Images that do not fill their blocks of 8 x 8 pixels are filled up with
/// gradients of 0, so an infinite or NaN pixel of x at their lower or right edge may make more elements of dw
/// NaN than in the formula.
template <class T>
void halo_backward_weight(cudaStream_t stream, const conv_geometry& geometry, const halo_plan& plan,
                          const T* x, const T* dy, float* dw, bool accumulate, float* partials);

PUFFERFISH_KERNELS_END
