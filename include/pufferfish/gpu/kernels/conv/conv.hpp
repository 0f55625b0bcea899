// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of convolutions by implicit matrix products: no matrix of patches in memory. Activations are
/// NHWC and dense, weights [kernel height][kernel width][in][out]; any kernel, stride, padding and dilation.
///
///     const conv_plan plan = plan_conv_forward(geometry, tensor, 4);           // 4 floats are 16 bytes
///     ... partials: plan.scratch floats of device memory ...
///     conv_forward<float>(stream, geometry, plan, x, w, bias, y, partials);

#include <pufferfish/gpu/kernels/conv/conv_plan.hpp>
#include <pufferfish/gpu/kernels/conv/slice_sum.hpp>
#include <pufferfish/gpu/kernels/launchers.hpp>
#include <pufferfish/gpu/kernels/reduce/moment_parts.hpp>

PUFFERFISH_KERNELS_BEGIN

// For all launchers: pointers are to device memory, aligned to their elements, and no output overlaps an
// input or another output. The plan is the result of plan_conv_... for the geometry; any other plan is
// correct, too (tests use all of them). `partials`: plan.scratch floats. Element types: float, bfloat16 and
// half.

/// y = x * w + bias. x: images x in_height x in_width x in_channels; w: [kernel height][kernel
/// width][in][out]; bias: out_channels elements, or nullptr; y: out_pixels x out_channels. One launch, and a
/// second one that adds the slices if plan.slices > 1. All three launchers throw backend_error if a launch
/// fails, for example if the device has less shared memory than a block needs. `moments`, if plan.slices is
/// 1, may receive those of the columns of y as stored (moments_fit must be true for y).
template <class T>
void conv_forward(cudaStream_t stream, const conv_geometry& geometry, const conv_plan& plan, const T* x,
                  const T* w, const T* bias, T* y, float* partials, const moment_workspace& moments = {});

/// dx = the gradient with respect to x; with `add`, dx += the gradient. dx has the shape of x, dy that of y.
/// Every element of dx is written by one thread, without atomics. `sums`, if gradient_sums_fit, may receive
/// the sums for the batch norm `norm` whose output is x (moments_fit must be true for dx).
template <class T>
void conv_backward_input(cudaStream_t stream, const conv_geometry& geometry, const conv_plan& plan,
                         const T* dy, const T* w, T* dx, bool add, float* partials,
                         const moment_workspace& sums = {}, const gradient_sum_input<T>& norm = {});
/// Whether conv_backward_input for elements of T can collect sums for a batch norm. Its kernels for float
/// have no registers left for them.
template <class T>
inline constexpr bool collects_gradient_sums = sizeof(T) == 2;
/// Whether it can for this plan: neither slices nor phases.
template <class T>
bool gradient_sums_fit(const conv_geometry& geometry, const conv_plan& plan) {
  return collects_gradient_sums<T> && plan.slices == 1 && geometry.stride_height == 1 &&
         geometry.stride_width == 1;
}

/// dw = the gradient with respect to w; with `accumulate`, dw += the gradient. dw: patch x out_channels, the
/// layout of w. If plan.slices > 1 and `later` is not null, the sum of the slices is added to `later` instead
/// of being computed.
template <class T>
void conv_backward_weight(cudaStream_t stream, const conv_geometry& geometry, const conv_plan& plan,
                          const T* x, const T* dy, accumulate_t<T>* dw, bool accumulate, float* partials,
                          slice_sums* later = nullptr);

PUFFERFISH_KERNELS_END
