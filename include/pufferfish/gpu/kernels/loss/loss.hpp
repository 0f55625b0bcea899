// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launcher of softmax and cross entropy over classes. Formulas: ops/loss/softmax_cross_entropy.hpp.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// The smoothed target of a row: the value `right` for the label and `wrong` for every other class. The
/// gradient is multiplied by `scale`.
struct softmax_target {
  double right, wrong, scale;
  const float* loss_scale;  ///< further factor of the gradient, in device memory; nullptr: 1
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Loss and gradient of rows x classes dense logits with one label per row. dlogits (rows x classes) may be
/// the logits, or null if the gradient is not needed. results[0] = the sum of the rows' losses in double, in
/// an order that depends on the shape alone. results[1] = number of rows whose largest logit, the first of
/// equals, is at the label. A label outside 0 .. classes - 1 makes the loss and the row's gradient NaN.
/// `scratch`: 2 x rows doubles; `counter`: a number that is 0 before and after the launch. All arrays are in
/// device memory. Throws backend_error if the launch fails.
template <class T>
void softmax_cross_entropy(cudaStream_t stream, const T* logits, const std::int32_t* labels, index_t rows,
                           index_t classes, const softmax_target& target, T* dlogits, double* scratch,
                           unsigned* counter, double* results);

PUFFERFISH_KERNELS_END
