// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of convolutions with 3 x 3 taps, or one tap and stride 2, for devices with warp groups (compute
/// capability 9.0). Each block of pixels is copied to shared memory once for all taps.
///
/// \code
/// const halo_plan plan = plan_halo_forward(geometry);
/// if (plan.fits && halo_available()) halo_forward<T>(stream, geometry, plan, x, w, bias, y);
/// \endcode

#include <pufferfish/gpu/kernels/conv/halo_plan.hpp>
#include <pufferfish/gpu/kernels/conv/slice_sum.hpp>
#include <pufferfish/gpu/kernels/launchers.hpp>
#include <pufferfish/gpu/kernels/norm/batch_norm.hpp>
#include <pufferfish/gpu/kernels/reduce/moment_parts.hpp>

PUFFERFISH_KERNELS_BEGIN

// For all launchers: pointers are to device memory; those of 16-bit arrays, except the bias, are multiples
// of 16. Tensors are dense, activations NHWC. No output overlaps an input or another output. `plan` is the
// result of the launcher's function in halo_plan.hpp for the geometry, with plan.fits true. Element types:
// bfloat16 and half; sums are in float. A launcher throws backend_error if a launch fails.

/// Whether the current device and the code of the kernels have warp groups. The code has them if it was
/// compiled for sm_90a.
bool halo_available();

/// y = x * w + bias. x: images x in_height x in_width x in_channels; w:
/// [kernel][kernel][in_channels][out_channels]; bias: out_channels elements, or nullptr; y: images x
/// out_height x out_width x out_channels. Each element of y is rounded once. `plan`: plan_halo_forward.
/// `moments` may receive those of the columns of y as stored; halo_moments_fit and moments_fit must then be
/// true. `norm`, if wanted, is a normalization of norm.m.x whose result is x; halo_norm_fits must then be
/// true. The launch then also does what norm_apply does, with the same bits: it writes x. Neither x nor the
/// addend may overlap anything else.
template <class T>
void halo_forward(cudaStream_t stream, const conv_geometry& geometry, const halo_plan& plan, const T* x,
                  const T* w, const T* bias, T* y, const moment_workspace& moments = {},
                  const norm_request<T>& norm = {});

/// dx = the gradient with respect to x; with `add`, dx += the gradient. dy has the shape of y, dx that of x,
/// w that of halo_forward. Each element of dx is rounded once. `plan`: plan_halo_backward_input. `sums` may
/// receive the sums for the batch norm `norm` whose output is x; halo_gradient_sums_fit and moments_fit must
/// then be true.
template <class T>
void halo_backward_input(cudaStream_t stream, const conv_geometry& geometry, const halo_plan& plan,
                         const T* dy, const T* w, T* dx, bool add, const moment_workspace& sums = {},
                         const gradient_sum_input<T>& norm = {});

/// Forward pass of a low-rank convolution in one launch: t = x * down, which is stored unless t is null, and
/// y = t up + bias, where t is rounded to T. geometry: that of `down`, whose out_channels are the rank; down:
/// [3][3][in_channels][rank]; up: rank x out_channels; bias: out_channels elements, or nullptr; t:
/// pixels x rank; y: pixels x out_channels. `plan`: plan_halo_low_rank. `moments`, `norm`: as in
/// halo_forward.
template <class T>
void halo_low_rank_forward(cudaStream_t stream, const conv_geometry& geometry, const halo_plan& plan,
                           const T* x, const T* down, const T* up, int out_channels, const T* bias, T* t,
                           T* y, const moment_workspace& moments = {}, const norm_request<T>& norm = {});

/// dw = the gradient with respect to w; with `accumulate`, dw += the gradient. dw has the shape of w, in
/// float. `partials`: plan.scratch floats of device memory, which are overwritten; may be null if
/// plan.scratch is 0. If plan.slices > 1, a second launch adds the sums of the slices, in double and in a
/// fixed order; if `later` is not null, this sum is added to `later` instead. `plan`:
/// plan_halo_backward_weight.
///
/// Images that do not fill their blocks of 8 x 8 pixels are filled up with gradients of 0. So an infinite or
/// NaN pixel of x at the lower or right edge of an image may make more elements of dw NaN than in the
/// formula.
template <class T>
void halo_backward_weight(cudaStream_t stream, const conv_geometry& geometry, const halo_plan& plan,
                          const T* x, const T* dy, float* dw, bool accumulate, float* partials,
                          slice_sums* later = nullptr);

PUFFERFISH_KERNELS_END
