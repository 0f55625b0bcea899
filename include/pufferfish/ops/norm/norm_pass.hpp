// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the passes of batch normalization over a matrix on the CPU, for each instruction set.

#include <algorithm>

#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/relu_mask.hpp>
#include <pufferfish/ops/linear/column_sums.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// Number of tasks that a sum over units of rows is split into; depends on the shape alone.
template <class T>
index_t norm_splits(const wide_rows<T>& rows) {
  return std::clamp<index_t>(rows.size / 32768, 1, std::clamp<index_t>(rows.units(), 1, 64));
}

/// Arguments of one pass over a matrix. Per-channel arrays have wide_rows::width elements;
/// nullptr: not used. `other` is the addend in the forward pass, dy in the backward pass.
template <class T>
struct norm_pass {
  const T *x = nullptr, *other = nullptr;
  T* y = nullptr;
  typename relu_mask<T>::word* mask = nullptr;
  bool relu = false;
  bool stream = false;  ///< write y with non-temporal stores; see streams_past_cache
  const parameter_t<T>*mean = nullptr, *scale = nullptr, *slope = nullptr, *shift = nullptr;
  index_t width = 0;
};

#define PUFFERFISH_KERNELS norms
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/norm/batch_norm.inc>
#include <pufferfish/linalg/for_each_target.inc>

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
