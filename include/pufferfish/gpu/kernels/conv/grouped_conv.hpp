// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of convolutions with several groups, depthwise ones included, by simple kernels without tiles
/// and tensor cores. Formula: ops/conv/conv.hpp. Activations are NHWC and dense, weights [kernel
/// height][kernel width][in / groups][out]; any kernel, stride, padding and dilation.

#include <pufferfish/gpu/kernels/conv/conv_plan.hpp>
#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// How the work of the gradient of a weight is cut into slices.
struct grouped_weight_plan {
  /// Number of slices into which the sums over pixels are cut. Each slice has a result of its own in
  /// `partials`; these results are added in order.
  int slices = 1;
  /// Number of floats of `partials`.
  index_t scratch = 0;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Shape of a block of the gradient of the weight: the block computes `grouped_elements` elements, and
/// `grouped_rows` threads share the pixels of an element.
inline constexpr int grouped_elements = 32, grouped_rows = 8;

/// Number of elements of the weight.
inline index_t grouped_weight_elements(const conv_geometry& g, int groups) {
  return static_cast<index_t>(g.kernel_height) * g.kernel_width * (g.in_channels / groups) * g.out_channels;
}

/// The plan of grouped_conv_backward_weight. The plan depends on shapes alone, as in conv_plan.hpp.
inline grouped_weight_plan plan_grouped_backward_weight(const conv_geometry& g, int groups) {
  const index_t elements = grouped_weight_elements(g, groups);
  const index_t pixels = g.out_pixels(), blocks = plans::cut(elements, grouped_elements);
  // No thread adds more than 4096 numbers in float, because of rounding.
  const index_t wanted = std::max(2 * plans::enough_blocks / std::max<index_t>(blocks, 1),
                                  plans::cut(pixels, index_t{4096} * grouped_rows));
  grouped_weight_plan plan;
  plan.slices = plans::slices_for(wanted, plans::cut(pixels, grouped_rows), elements);
  plan.scratch = plan.slices > 1 ? plan.slices * elements : 0;
  return plan;
}

// For all launchers: `geometry` has the channels of all groups together, and `groups` divides both numbers of
// channels. Pointers are to device memory, aligned to their elements, and no output overlaps an input. Sums
// are in float. Element types: float, bfloat16 and half. Each launcher throws backend_error if its launch
// fails.

/// y = x * w + bias. bias: out_channels elements, or nullptr.
template <class T>
void grouped_conv_forward(cudaStream_t stream, const conv_geometry& geometry, int groups, const T* x,
                          const T* w, const T* bias, T* y);

/// dx = the gradient of x; with `add`, dx += the gradient. dx has the shape of x, dy that of y.
template <class T>
void grouped_conv_backward_input(cudaStream_t stream, const conv_geometry& geometry, int groups, const T* dy,
                                 const T* w, T* dx, bool add);

/// dw = the gradient of w; with `accumulate`, dw += the gradient. Equal arguments give equal bits. `plan`:
/// the result of plan_grouped_backward_weight; any other plan is correct, too. `partials`: plan.scratch
/// floats.
template <class T>
void grouped_conv_backward_weight(cudaStream_t stream, const conv_geometry& geometry, int groups,
                                  const grouped_weight_plan& plan, const T* x, const T* dy,
                                  accumulate_t<T>* dw, bool accumulate, float* partials);

PUFFERFISH_KERNELS_END
