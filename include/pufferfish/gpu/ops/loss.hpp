// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Softmax with cross entropy on a device.

#include <pufferfish/gpu/kernels/loss/loss.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/ops/loss/softmax_cross_entropy.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// With p = softmax(logits) row by row and the smoothed target t: results[0] = sum of -sum_k t_k log p_k, in
/// double, in an order that depends on M alone; results[1] = number of rows whose largest logit (the first of
/// equal ones) is the label's; dlogits = (p - t) / normalizer, times the context's loss_scale() if it is set.
/// logits: M x K dense; labels: M; dlogits: M x K dense (it may be logits) or a null view; results: 2
/// doubles; all in memory of the context's device. A label out of range makes the loss and the row's gradient
/// NaN. Puts its work into the context's stream. Throws shape_error if sizes differ, value_error for an
/// epsilon outside [0, 1) or a normalizer that is not positive, backend_error.
template <class T>
void softmax_cross_entropy(context<device::gpu>& ctx, const tensor_view<const T, 2>& logits,
                           std::span<const std::int32_t> labels, const label_smoothing& smoothing,
                           double normalizer, const tensor_view<T, 2>& dlogits, double* results) {
  const index_t rows = logits.extent(0), classes = logits.extent(1);
  detail::check_label_count(labels, logits.shape());
  detail::check_loss<T>(logits, smoothing, normalizer, dlogits);
  const detail::smoothed_target target(smoothing, classes);
  scratch_frame frame(ctx.scratch());
  double* scratch = frame.take<double>(2 * rows);
  gpu::kernels::softmax_cross_entropy<T>(ctx.stream(), logits.flat().data(), labels.data(), rows, classes,
                                         {target.right, target.wrong, 1.0 / normalizer, ctx.loss_scale()},
                                         dlogits.is_null() ? nullptr : dlogits.flat().data(), scratch,
                                         results);
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
