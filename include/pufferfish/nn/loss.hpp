// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `SoftmaxCrossEntropy`: the loss of a classifier.

#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/ops/loss/softmax_cross_entropy.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Cross entropy of the softmax of a network's output, with or without label smoothing. Keeps nothing between
/// calls: loss and gradient come from one call.
///
/// For a row of logits z, with p = softmax(z) and the smoothed one-hot target t (see label_smoothing):
///
///     loss = -sum over k of t(k) log p(k),   dlogits(k) = (p(k) - t(k)) / normalizer
///
/// \code
/// const SoftmaxCrossEntropy<float> loss({0.1});  // label smoothing of 0.1
/// const loss_result found = loss(ctx, logits, labels, normalizer, dlogits.view());
/// net.backward(ctx, dlogits.view());
/// std::printf("%f %f", found.mean_loss(), found.accuracy());
/// \endcode
template <class T>
class SoftmaxCrossEntropy {
 public:
  using value_type = T;

  /// `smoothing`: label smoothing; none by default.
  explicit SoftmaxCrossEntropy(const label_smoothing& smoothing = {}) : smoothing_(smoothing) {}

  /// The smoothing given to the constructor.
  const label_smoothing& smoothing() const { return smoothing_; }
  std::string describe() const { return "SoftmaxCrossEntropy"; }

  /// Returns loss, hits and rows of logits N x H x W x K (dense; a classifier's are N x 1 x 1 x K) for N H W
  /// labels in 0 .. K - 1. Writes the gradient divided by `normalizer` to dlogits. If that is the global
  /// batch size / number of ranks, the mean of all ranks' gradients is the gradient of the mean loss.
  /// dlogits: shaped as logits, and may be the same memory as logits; or a null view. Losses are summed in
  /// double, in row order.
  ///
  /// Throws shape_error for views that are not dense and for sizes that differ; value_error, before anything
  /// is written, for a label out of range, an epsilon outside [0, 1) or a normalizer that is not positive.
  loss_result operator()(context<device::cpu>& ctx, const tensor_view<const T, 4>& logits,
                         std::span<const std::int32_t> labels, double normalizer,
                         const tensor_view<T, 4>& dlogits) const {
    return ops::softmax_cross_entropy<T>(ctx, rows("logits", logits), labels, smoothing_, normalizer,
                                         rows("dlogits", dlogits));
  }

  /// Writes the sum of the losses to results[0] and the number of hits to results[1], both in memory of the
  /// context's device, as is `labels`. Otherwise as above, but on a device a label outside 0 .. K - 1 makes
  /// the sum NaN.
  template <class Device>
  void operator()(context<Device>& ctx, const tensor_view<const T, 4>& logits,
                  std::span<const std::int32_t> labels, double normalizer, const tensor_view<T, 4>& dlogits,
                  double* results) const {
    ops::softmax_cross_entropy<T>(ctx, rows("logits", logits), labels, smoothing_, normalizer,
                                  rows("dlogits", dlogits), results);
  }

  /// Computes the loss without its gradient. Throws the errors of the overload with a gradient.
  loss_result operator()(context<device::cpu>& ctx, const tensor_view<const T, 4>& logits,
                         std::span<const std::int32_t> labels) const {
    return (*this)(ctx, logits, labels, 1.0, {});
  }

 private:
  // Views N x H x W x classes as N H W rows. Throws shape_error, naming `what`, for a view that is not dense.
  template <class U>
  tensor_view<U, 2> rows(const char* what, const tensor_view<U, 4>& view) const {
    detail::check_dense_if_wanted(*this, what, view);
    return view.reshape(extents<2>{view.extent(0) * view.extent(1) * view.extent(2), view.extent(3)});
  }

  label_smoothing smoothing_;
};

PUFFERFISH_NAMESPACE_END
