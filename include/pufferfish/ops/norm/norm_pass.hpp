// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the passes of batch normalization over a matrix on the CPU, compiled for each instruction set.

#include <algorithm>

#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/relu_mask.hpp>
#include <pufferfish/ops/linear/column_sums.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// Number of tasks into which a sum over the matrix is split: one for each 32768 elements, at most 64, and no
/// more than the matrix has units (wide_rows). The number depends on the shape alone, so that results do not
/// depend on the number of threads.
template <class T>
index_t norm_splits(const wide_rows<T>& rows) {
  return std::clamp<index_t>(rows.size / 32768, 1, std::clamp<index_t>(rows.units(), 1, 64));
}

/// Arguments of one pass over a matrix whose rows are viewed as wide_rows. Unused pointers are nullptr.
///
/// The forward pass computes y = (x - mean) scale + shift, adds `other` if it is given, and applies a ReLU if
/// `relu` is true; `mask` then receives the bits of the elements whose gradient passes. In the backward pass,
/// `other` is dy, g is dy with zeros where `mask` has no bit, and y is dx = scale g + (x - mean) slope +
/// shift.
template <class T>
struct norm_pass {
  const T *x = nullptr, *other = nullptr;
  T* y = nullptr;
  typename relu_mask<T>::word* mask = nullptr;
  bool relu = false;
  bool stream = false;  ///< use non-temporal stores for y; see streams_past_cache
  /// Coefficients of each channel in these formulas, repeated until there are `width` elements (wide_rows).
  const parameter_t<T>*mean = nullptr, *scale = nullptr, *slope = nullptr, *shift = nullptr;
  index_t width = 0;  ///< wide_rows::width
};

#define PUFFERFISH_KERNELS norms
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/norm/batch_norm.inc>
#include <pufferfish/linalg/for_each_target.inc>

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
