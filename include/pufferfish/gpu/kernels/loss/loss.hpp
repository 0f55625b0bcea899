// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of softmax and cross entropy. Formulas: ops/loss/softmax_cross_entropy.hpp.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// The smoothed target of a row: one value for the label, one for every other
/// class. `scale`: a factor of the gradient.
struct softmax_target {
  double right, wrong, scale;
  const float* loss_scale;  ///< a factor of the gradient, on the device; nullptr: 1
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// rows x classes dense logits, a label each; dlogits (null: not computed) may be the logits. results[0] =
/// the sum of the losses in double, in an order that depends on `rows` alone. results[1] = number of rows
/// whose largest logit, the first of equals, is at the label. A label outside 0 .. classes - 1 makes the loss
/// and the row's gradient NaN. `scratch`: 2 x rows doubles. All arrays are in device memory.
template <class T>
void softmax_cross_entropy(cudaStream_t stream, const T* logits, const std::int32_t* labels, index_t rows,
                           index_t classes, const softmax_target& target, T* dlogits, double* scratch,
                           double* results);

PUFFERFISH_KERNELS_END
