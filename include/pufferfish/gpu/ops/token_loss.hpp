// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Losses over tokens on a device: device versions of ops/loss/token_loss.hpp, ops/loss/log_sum_exp.hpp,
/// ops/loss/output_layer.hpp and ops/loss/output_loss.hpp.
///
/// Logits have dense rows with any distance between them. They, the targets, the normalizers and the results
/// are in memory of the context's device, which the host does not read. Work is put into the context's
/// stream; the functions may be captured. Arithmetic is in float, sums over rows in double in a fixed order.
/// Losses multiply their gradients by the context's loss_scale(), if it is set. A target that is neither a
/// class nor the padding makes the loss and its row's gradient NaN. All functions throw shape_error if sizes
/// differ; those with options also value_error for an epsilon outside [0, 1) or a normalizer (given by value)
/// that is not positive; backend_error if a launch fails.

#include <pufferfish/gpu/kernels/loss/token_loss.hpp>
#include <pufferfish/gpu/ops/arguments.hpp>
#include <pufferfish/gpu/ops/products.hpp>
#include <pufferfish/ops/loss/log_sum_exp.hpp>
#include <pufferfish/ops/loss/output_loss.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Rows of logits with their targets.
template <class T>
kernels::token_logits<T> logits_of(const tensor_view<const T, 2>& logits,
                                   std::span<const std::int32_t> targets, const token_loss_options& options) {
  const ops::detail::smoothed_target target(options.smoothing, logits.extent(1));
  return {logits.extent(0), logits.extent(1), rows_of(logits), 1.0F,        nullptr,
          targets.data(),   options.padding,  target.right,    target.wrong};
}

/// The common part of the two forms of ops::token_loss: `divisor` is a number, or an address on the device.
template <class T>
void token_loss(context<device::gpu>& ctx, const tensor_view<const T, 2>& logits,
                std::span<const std::int32_t> targets, const token_loss_options& options,
                const kernels::loss_divisor& divisor, const tensor_view<T, 2>& dlogits, double* results) {
  ops::detail::check_loss_options("token_loss", targets, logits.shape(), options,
                                  divisor.place == nullptr ? divisor.value : 1.0);
  if (!dlogits.is_null() && dlogits.shape() != logits.shape()) {
    pufferfish::detail::throw_error<shape_error>(
        {"token_loss: logits ", logits.shape(), ", gradient ", dlogits.shape()});
  }
  scratch_frame frame(ctx.scratch());
  double* const losses = frame.take<double>(logits.extent(0));
  kernels::token_losses<T>(ctx.stream(), logits_of(logits, targets, options), divisor, rows_of(dlogits),
                           losses, nullptr, nullptr);
  kernels::sum_token_losses(ctx.stream(), losses, targets.data(), options.padding, logits.extent(0), results);
}

/// The memory that output_loss_forward keeps, in this order: the logits without scale
/// and bias, and two numbers of each token.
template <class T>
struct kept_logits {
  tensor_view<T, 2> logits;
  parameter_t<T>*maxima, *shares;

  /// `shape`: tokens x vocabulary. Rows of logits are kept_logit_step elements apart.
  kept_logits(T* kept, const extents<2>& shape)
      : logits(kept, shape, {ops::detail::kept_logit_step<T>(shape[1]), 1}),
        maxima(reinterpret_cast<parameter_t<T>*>(kept + shape[0] * logits.stride(0))),
        shares(maxima + shape[0]) {}
};

/// Writes the layer's logits, without scale and bias, to `logits`, and the losses of the tokens.
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

/// The common part of the two forms of ops::output_loss_backward. The gradient of the logits replaces the
/// logits in `kept`.
template <class T>
void output_loss_backward(context<device::gpu>& ctx, const ops::output_layer<T>& layer,
                          std::span<const std::int32_t> targets, const token_loss_options& options,
                          const kernels::loss_divisor& divisor, T* kept, const ops::output_gradient<T>& to) {
  const extents<2> shape{layer.tokens(), layer.vocabulary()};
  ops::detail::check_output("output_loss", layer);
  ops::detail::check_loss_options("output_loss", targets, shape, options,
                                  divisor.place == nullptr ? divisor.value : 1.0);
  ops::detail::check_output_gradient(layer, to);
  const kept_logits<T> all(kept, shape);
  kernels::token_logits<T> z = logits_of<T>(all.logits, targets, options);
  z.scale = static_cast<float>(layer.scale);
  z.bias = layer.bias;
  {
    scratch_frame frame(ctx.scratch());
    double* const sums = frame.take<double>(kernels::column_scratch(shape[0], shape[1], 1));
    kernels::token_gradients<T>(ctx.stream(), z, divisor, all.maxima, all.shares, all.logits.data(), to.dbias,
                                to.add_bias, sums);
  }
  const tensor_view<const T, 2> dz = all.logits;
  multiply<T>(ctx, dz, layer.weight, to.dx);
  multiply_wide<T>(ctx, transpose(dz), layer.x, to.dweight, to.add_weight);
}

}  // namespace gpu::detail

namespace ops {

/// With p = softmax(z) row by row and the smoothed target t: results[0] = sum of -sum_k t_k log p_k over the
/// rows that count, results[1] = their number, dlogits = (p - t) / normalizer. Rows whose target is the
/// padding have loss and gradient 0. logits: tokens x vocabulary; targets: one for each row; dlogits: shape
/// of logits (it may be logits), or a null view if not wanted.
template <class T>
void token_loss(context<device::gpu>& ctx, const tensor_view<const T, 2>& logits,
                std::span<const std::int32_t> targets, const token_loss_options& options, double normalizer,
                const tensor_view<T, 2>& dlogits, double* results) {
  gpu::detail::token_loss<T>(ctx, logits, targets, options, {normalizer, nullptr, ctx.loss_scale()}, dlogits,
                             results);
}
/// The same with *normalizer, which the kernel reads: a captured step reads it at every replay.
template <class T>
void token_loss(context<device::gpu>& ctx, const tensor_view<const T, 2>& logits,
                std::span<const std::int32_t> targets, const token_loss_options& options,
                const double* normalizer, const tensor_view<T, 2>& dlogits, double* results) {
  gpu::detail::token_loss<T>(ctx, logits, targets, options, {1.0, normalizer, ctx.loss_scale()}, dlogits,
                             results);
}

/// result[m] = log sum_k exp(z(m, k)). logits: M x K; result: M doubles in device memory.
template <class T>
void log_sum_exp(context<device::gpu>& ctx, const tensor_view<const T, 2>& logits, std::span<double> result) {
  detail::check_log_sum_exp(logits.shape(), result.size());
  gpu::kernels::log_sum_exp<T>(ctx.stream(), gpu::detail::rows_of(logits), logits.extent(0), logits.extent(1),
                               result.data());
}

/// z_nv = scale sum_d x_nd w_vd + b_v for x: tokens x D, w: V x D, b: V elements or nullptr; logits: tokens x
/// V, overlaps nothing.
template <class T>
void output_logits(context<device::gpu>& ctx, const output_layer<T>& layer, const tensor_view<T, 2>& logits) {
  detail::check_logits(layer, logits.shape());
  if (logits.empty()) return;
  scratch_frame frame(ctx.scratch());
  tensor_view<const T, 2> x = layer.x;
  if (layer.scale != 1) {  // applied to the narrow operand
    const tensor_view<T, 2> scaled = frame.take<T>(x.shape());
    gpu::kernels::scale_rows<T>(ctx.stream(), layer.scale, gpu::detail::rows_of(x), x.extent(0), x.extent(1),
                                gpu::detail::rows_of(scaled));
    x = scaled;
  }
  gpu::multiply<T>(ctx, x, transpose(layer.weight), logits, false, layer.bias);
}

/// In training, where the logits are kept, they are one product; else products of up to 2^26 logits each.
/// results[0] = the sum of the losses of the layer's logits (as token_loss), results[1] = number of targets
/// that count. `kept`: output_loss_kept() elements, aligned to 16 bytes, for the backward pass; nullptr:
/// there is none.
template <class T>
void output_loss_forward(context<device::gpu>& ctx, const output_layer<T>& layer,
                         std::span<const std::int32_t> targets, const token_loss_options& options, T* kept,
                         double* results) {
  const extents<2> shape{layer.tokens(), layer.vocabulary()};
  detail::check_output("output_loss", layer);
  detail::check_loss_options("output_loss", targets, shape, options, 1.0);
  scratch_frame frame(ctx.scratch());
  double* const losses = frame.take<double>(shape[0]);
  if (kept != nullptr) {
    const gpu::detail::kept_logits<T> all(kept, shape);
    gpu::detail::output_losses<T>(ctx, layer, targets, options, all.logits, losses, all.maxima, all.shares);
  } else {
    const index_t step = detail::kept_logit_step<T>(shape[1]);
    const index_t most = std::clamp<index_t>((index_t{1} << 26) / std::max<index_t>(1, step), 1,
                                             std::max<index_t>(1, shape[0]));
    T* const memory = frame.take<T>(most * step);
    for (index_t first = 0; first < shape[0]; first += most) {
      const index_t rows = std::min(most, shape[0] - first);
      output_layer<T> part = layer;
      part.x = layer.x.slice(0, first, rows);
      gpu::detail::output_losses<T>(
          ctx, part, targets.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(rows)),
          options, tensor_view<T, 2>(memory, {rows, shape[1]}, {step, 1}), losses + first, nullptr, nullptr);
    }
  }
  gpu::kernels::sum_token_losses(ctx.stream(), losses, targets.data(), options.padding, shape[0], results);
}

/// The gradients of the loss, divided by `normalizer`: to.dx is overwritten, to.dweight and to.dbias are
/// overwritten or added to. `kept`, as the forward pass has written it, is overwritten. Layer, targets and
/// options as in the forward pass; gradients overlap nothing.
template <class T>
void output_loss_backward(context<device::gpu>& ctx, const output_layer<T>& layer,
                          std::span<const std::int32_t> targets, const token_loss_options& options,
                          double normalizer, T* kept, const output_gradient<T>& to) {
  gpu::detail::output_loss_backward<T>(ctx, layer, targets, options, {normalizer, nullptr, ctx.loss_scale()},
                                       kept, to);
}
/// The same with *normalizer, which the kernel reads.
template <class T>
void output_loss_backward(context<device::gpu>& ctx, const output_layer<T>& layer,
                          std::span<const std::int32_t> targets, const token_loss_options& options,
                          const double* normalizer, T* kept, const output_gradient<T>& to) {
  gpu::detail::output_loss_backward<T>(ctx, layer, targets, options, {1.0, normalizer, ctx.loss_scale()},
                                       kept, to);
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
