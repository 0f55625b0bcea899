// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launcher of the sums that complete gradients of weights whose sums over pixels were cut into slices.
///
/// \code
/// slice_sums sums;
/// conv_backward_weight<T>(stream, geometry, plan, x, dy, dw, false, partials, &sums);  // slices only
/// ...                                                                       // another gradient, likewise
/// add_weight_slices(stream, sums);                                          // completes both
/// \endcode

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// out_i = the sum over s of partials[s size + i], or with `add` out_i += that sum. Both arrays are in device
/// memory. The result is a matrix of `columns` columns, or, if turned_rows > 0, the gradient of a filter that
/// was computed with input and output swapped (gpu/kernels/conv/conv_plan.hpp): its taps are matrices of
/// turned_rows x columns, which are stored transposed and in reverse order.
struct slice_sum {
  float* out;
  float* partials;
  index_t size;
  int slices;
  bool add;
  int columns;
  int turned_rows = 0;
};

/// Up to two sums that one launch computes. The partial results must stay in memory until that launch.
struct slice_sums {
  slice_sum sums[2];
  int count = 0;

  /// Adds a sum; at most two.
  void push(const slice_sum& sum) { sums[count++] = sum; }
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Computes the sums, in double and in a fixed order, in one launch; without sums, does nothing. Throws
/// backend_error if the launch fails.
void add_weight_slices(cudaStream_t stream, const slice_sums& sums);

PUFFERFISH_KERNELS_END
