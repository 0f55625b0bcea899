// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Losses on a device. Operands and results are in memory of the context's device; the functions launch
/// kernels in the context's stream, do not copy anything to the host and do not wait, so they may be
/// captured. A failed launch throws backend_error.

#include <algorithm>
#include <cstddef>

#include <pufferfish/gpu/kernels/loss/loss.hpp>
#include <pufferfish/gpu/kernels/loss/token_loss.hpp>
#include <pufferfish/gpu/ops/arguments.hpp>
#include <pufferfish/gpu/ops/products.hpp>
#include <pufferfish/ops/loss/log_sum_exp.hpp>
#include <pufferfish/ops/loss/output_loss.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Kernel arguments for rows of logits with one target each.
template <class T>
kernels::token_logits<T> logits_of(const tensor_view<const T, 2>& logits,
                                   std::span<const std::int32_t> targets, const token_loss_options& options) {
  const ops::detail::smoothed_target target(options.smoothing, logits.extent(1));
  return {logits.extent(0), logits.extent(1), rows_of(logits), 1.0F,        nullptr,
          targets.data(),   options.padding,  target.right,    target.wrong};
}

/// Kernel argument for the divisor of a gradient, which includes the context's loss scale.
inline kernels::loss_divisor divisor_of(const context<device::gpu>& ctx,
                                        const ops::gradient_divisor& divisor) {
  return {divisor.value, divisor.place, ctx.loss_scale()};
}

/// Row stride, in elements, of the logits that output_loss_forward keeps for the backward pass.
template <class T>
index_t kept_logit_step(index_t vocabulary) {
  constexpr index_t line = 16 / static_cast<index_t>(sizeof(T));
  return (vocabulary + line - 1) / line * line;
}

/// The memory that output_loss_forward keeps for the backward pass: first the logits without scale and bias,
/// then two numbers of each token (the largest logit, and 1 / sum of the exponentials).
template <class T>
struct kept_logits {
  tensor_view<T, 2> logits;
  parameter_t<T>*maxima, *shares;

  /// Divides the memory `kept` for logits of the shape tokens x vocabulary. The row stride is
  /// kept_logit_step().
  kept_logits(T* kept, const extents<2>& shape)
      : logits(kept, shape, {kept_logit_step<T>(shape[1]), 1}),
        maxima(reinterpret_cast<parameter_t<T>*>(kept + shape[0] * logits.stride(0))),
        shares(maxima + shape[0]) {}
};

/// Writes the layer's logits, without scale and bias, to `logits`, and the loss of each token to `losses`.
/// `maxima` and `shares`: see kernels::token_losses.
template <class T>
void output_losses(context<device::gpu>& ctx, const ops::output_layer<T>& layer,
                   std::span<const std::int32_t> targets, const token_loss_options& options,
                   const tensor_view<T, 2>& logits, double* losses, parameter_t<T>* maxima,
                   parameter_t<T>* shares) {
  multiply<T>(ctx, layer.x, transpose(layer.weight), logits);
  kernels::token_logits<T> z = logits_of<T>(logits, targets, options);
  z.scale = static_cast<float>(layer.scale);
  z.bias = layer.bias;
  kernels::token_losses<T>(ctx.stream(), z, {1.0, nullptr, nullptr}, {}, losses, maxima, shares);
}

}  // namespace gpu::detail

namespace ops {

/// Device implementation of the functions of ops/loss/, where shapes and errors are described. Arithmetic is
/// in float, sums over rows in double.
template <>
struct loss_ops<device::gpu> {
  /// Sum of the losses, number of correct rows, and gradient of the logits. Scratch: two doubles per row.
  template <class T>
  static void softmax_cross_entropy(context<device::gpu>& ctx, const tensor_view<const T, 2>& logits,
                                    std::span<const std::int32_t> labels, const label_smoothing& smoothing,
                                    double normalizer, const tensor_view<T, 2>& dlogits, double* results) {
    const index_t rows = logits.extent(0), classes = logits.extent(1);
    const detail::smoothed_target target(smoothing, classes);
    scratch_frame frame(ctx.scratch());
    double* scratch = frame.take<double>(2 * rows);
    gpu::kernels::softmax_cross_entropy<T>(ctx.stream(), logits.flat().data(), labels.data(), rows, classes,
                                           {target.right, target.wrong, 1.0 / normalizer, ctx.loss_scale()},
                                           dlogits.is_null() ? nullptr : dlogits.flat().data(), scratch,
                                           ctx.counters(), results);
  }

  /// Sum of the losses of the tokens, number of tokens that count, and gradient of the logits. Scratch: one
  /// double per row.
  template <class T>
  static void token_loss(context<device::gpu>& ctx, const tensor_view<const T, 2>& logits,
                         std::span<const std::int32_t> targets, const token_loss_options& options,
                         const gradient_divisor& normalizer, const tensor_view<T, 2>& dlogits,
                         double* results) {
    scratch_frame frame(ctx.scratch());
    double* const losses = frame.take<double>(logits.extent(0));
    gpu::kernels::token_losses<T>(ctx.stream(), gpu::detail::logits_of(logits, targets, options),
                                  gpu::detail::divisor_of(ctx, normalizer), gpu::detail::rows_of(dlogits),
                                  losses, nullptr, nullptr);
    gpu::kernels::sum_token_losses(ctx.stream(), losses, targets.data(), options.padding, logits.extent(0),
                                   results);
  }

  /// Logarithm of the sum of the exponentials of each row.
  template <class T>
  static void log_sum_exp(context<device::gpu>& ctx, const tensor_view<const T, 2>& logits,
                          std::span<double> result) {
    gpu::kernels::log_sum_exp<T>(ctx.stream(), gpu::detail::rows_of(logits), logits.extent(0),
                                 logits.extent(1), result.data());
  }

  /// The layer's logits. Scratch: a scaled copy of x if the scale is not 1.
  template <class T>
  static void output_logits(context<device::gpu>& ctx, const output_layer<T>& layer,
                            const tensor_view<T, 2>& logits) {
    scratch_frame frame(ctx.scratch());
    tensor_view<const T, 2> x = layer.x;
    if (layer.scale != 1) {  // the scale is applied to x, which is smaller than the logits
      const tensor_view<T, 2> scaled = frame.take<T>(x.shape());
      gpu::kernels::scale_rows<T>(ctx.stream(), layer.scale, gpu::detail::rows_of(x), x.extent(0),
                                  x.extent(1), gpu::detail::rows_of(scaled));
      x = scaled;
    }
    gpu::multiply<T>(ctx, x, transpose(layer.weight), logits, false, layer.bias);
  }

  /// Number of elements of T that output_loss_forward keeps for output_loss_backward.
  template <class T>
  static index_t output_loss_kept(const output_layer<T>& layer) {
    return layer.tokens() * (gpu::detail::kept_logit_step<T>(layer.vocabulary()) +
                             2 * static_cast<index_t>(sizeof(parameter_t<T>) / sizeof(T)));
  }

  /// Sum of the losses of the layer's logits, and number of tokens that count. In training (`kept` is not
  /// nullptr), one product computes all logits, because they are kept for the backward pass. In inference,
  /// each product computes at most 2^26 logits.
  template <class T>
  static void output_loss_forward(context<device::gpu>& ctx, const output_layer<T>& layer,
                                  std::span<const std::int32_t> targets, const token_loss_options& options,
                                  T* kept, double* results) {
    const extents<2> shape{layer.tokens(), layer.vocabulary()};
    scratch_frame frame(ctx.scratch());
    double* const losses = frame.take<double>(shape[0]);
    if (kept != nullptr) {
      const gpu::detail::kept_logits<T> all(kept, shape);
      gpu::detail::output_losses<T>(ctx, layer, targets, options, all.logits, losses, all.maxima, all.shares);
    } else {
      const index_t step = gpu::detail::kept_logit_step<T>(shape[1]);
      const index_t most = std::clamp<index_t>((index_t{1} << 26) / std::max<index_t>(1, step), 1,
                                               std::max<index_t>(1, shape[0]));
      T* const memory = frame.take<T>(most * step);
      for (index_t first = 0; first < shape[0]; first += most) {
        const index_t rows = std::min(most, shape[0] - first);
        output_layer<T> part = layer;
        part.x = layer.x.slice(0, first, rows);
        gpu::detail::output_losses<T>(
            ctx, part, targets.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(rows)),
            options, tensor_view<T, 2>(memory, {rows, shape[1]}, {step, 1}), losses + first, nullptr,
            nullptr);
      }
    }
    gpu::kernels::sum_token_losses(ctx.stream(), losses, targets.data(), options.padding, shape[0], results);
  }

  /// Computes the gradients of the output layer. The gradient of the logits overwrites the logits in `kept`.
  template <class T>
  static void output_loss_backward(context<device::gpu>& ctx, const output_layer<T>& layer,
                                   std::span<const std::int32_t> targets, const token_loss_options& options,
                                   const gradient_divisor& normalizer, T* kept,
                                   const output_gradient<T>& to) {
    const extents<2> shape{layer.tokens(), layer.vocabulary()};
    const gpu::detail::kept_logits<T> all(kept, shape);
    gpu::kernels::token_logits<T> z = gpu::detail::logits_of<T>(all.logits, targets, options);
    z.scale = static_cast<float>(layer.scale);
    z.bias = layer.bias;
    {
      scratch_frame frame(ctx.scratch());
      const auto work = gpu::detail::column_workspace_of(ctx, frame, shape[0], shape[1], 1);
      gpu::kernels::token_gradients<T>(ctx.stream(), z, gpu::detail::divisor_of(ctx, normalizer), all.maxima,
                                       all.shares, all.logits.data(), to.dbias, to.add_bias, work);
    }
    const tensor_view<const T, 2> dz = all.logits;
    gpu::multiply<T>(ctx, dz, layer.weight, to.dx);
    gpu::multiply_wide<T>(ctx, transpose(dz), layer.x, to.dweight, to.add_weight);
  }
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END
