// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Softmax with cross entropy on a device.

#include <pufferfish/gpu/context.hpp>
#include <pufferfish/gpu/kernels/loss.hpp>
#include <pufferfish/ops/softmax_cross_entropy.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

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
