// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Output layer of a language model fused with its loss: cross entropy of the logits, and all gradients.
/// Logits are computed once, by blocks of the vocabulary, with the tokens innermost. The softmax reads a
/// block while the block is in the cache, and each pass reads the weight from memory once.
///
/// \code
/// const ops::output_layer<float> layer{x, table};
/// aligned_buffer<float> kept(ops::output_loss_kept(ctx, layer));
/// const token_loss_result loss = ops::output_loss_forward<float>(ctx, layer, targets, options, kept.data());
/// ops::output_loss_backward<float>(ctx, layer, targets, options,
///                                  ops::loss_normalizer(options, loss.tokens), kept.data(), {dx, dtable});
/// \endcode

#include <span>

#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/loss/output_layer.hpp>
#include <pufferfish/ops/loss/output_passes.hpp>
#include <pufferfish/ops/loss/token_loss.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

/// Throws shape_error unless dx has the shape of x and dweight that of the weight.
template <class T>
void check_output_gradient(const output_layer<T>& layer, const output_gradient<T>& to) {
  if (to.dx.shape() != layer.x.shape() || to.dweight.shape() != layer.weight.shape()) {
    pufferfish::detail::throw_error<shape_error>({"output_loss: gradients ", to.dx.shape(), " and ",
                                                  to.dweight.shape(), " do not fit ", layer.x.shape(),
                                                  " and ", layer.weight.shape()});
  }
}

}  // namespace detail

/// Number of elements that output_loss_forward keeps for output_loss_backward. On the CPU: exponentials of
/// the logits (tokens rounded up to a multiple of 16), and one number of parameter_t<T> for each token and
/// block; all of float if a 16-bit layer is computed in float (detail::computes_output). On a device:
/// the logits, with rows aligned to 16 bytes, and two numbers for each token.
template <class T, class Device>
index_t output_loss_kept(context<Device>&, const output_layer<T>& layer) {
  if constexpr (!is_cpu<Device>) {
    return loss_ops<Device>::output_loss_kept(layer);
  } else {
    const detail::output_cut cut(layer.vocabulary(), layer.tokens());
    // A layer that is computed in float keeps floats.
    if (!detail::computes_output(layer)) {
      return detail::output_element_size<T> * detail::kept_elements<parameter_t<T>>(cut);
    }
    return detail::kept_elements<T>(cut);
  }
}
/// Deprecated form for the CPU.
template <class T>
[[deprecated("pass the context: output_loss_kept(ctx, layer)")]] index_t output_loss_kept(
    const output_layer<T>& layer) {
  cpu_context ctx({.threads = 1});
  return output_loss_kept(ctx, layer);
}

/// The loss of the layer's logits (formula: reference::token_loss of reference::output_logits) against one
/// target for each token (in 0 .. V - 1, or the padding). results[0] = the sum over the targets that count,
/// not divided; results[1] = their number. `kept`: output_loss_kept() elements, aligned to 64 bytes, or
/// nullptr if there is no backward pass; then scratch for one block of logits for each thread is used, on a
/// device for up to 2^26 logits. All operands, and results, are in memory of the context's device. On the
/// CPU, sums over a block of the vocabulary are in parameter_t<T>, others in double; kept exponentials of a
/// 16-bit T are rounded. Finite logits of any size are safe; a
/// NaN or +infinity gives a NaN. Throws shape_error if the sizes differ, value_error for a bad epsilon and on
/// the CPU for a target out of range (with its position). On a device such a target makes the loss NaN.
template <class T, class Device>
void output_loss_forward(context<Device>& ctx, const output_layer<T>& layer,
                         std::span<const std::int32_t> targets, const token_loss_options& options, T* kept,
                         double* results) {
  detail::check_output("output_loss", layer);
  detail::check_loss_options("output_loss", targets, {layer.tokens(), layer.vocabulary()}, options, 1.0);
  check_tokens(ctx, "output_loss", targets, layer.vocabulary(), options.padding);
  if constexpr (!is_cpu<Device>) {
    loss_ops<Device>::output_loss_forward(ctx, layer, targets, options, kept, results);
  } else {
    if constexpr (detail::is_narrow<T>) {
      if (!detail::computes_output(layer)) {
        scratch_frame frame(ctx.scratch());
        return output_loss_forward<float>(ctx, detail::widened_output(ctx, frame, layer), targets, options,
                                          reinterpret_cast<float*>(kept), results);
      }
    }
    results[0] = layer.tokens() == 0 ? 0.0 : detail::sum_output_losses<T>(ctx, layer, targets, options, kept);
    results[1] = static_cast<double>(counted_tokens(targets, options.padding));
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, output_loss_forward);
/// Computes the loss on the CPU and returns it: the sum over the targets that count, and their number.
/// Arguments, `kept` and errors are those of the form above, which writes the result to an array.
template <class T>
token_loss_result output_loss_forward(context<device::cpu>& ctx, const output_layer<T>& layer,
                                      std::span<const std::int32_t> targets,
                                      const token_loss_options& options, T* kept) {
  double results[2];
  output_loss_forward<T>(ctx, layer, targets, options, kept, results);
  return {results[0], static_cast<index_t>(results[1])};
}

/// The gradients of the loss, divided by `normalizer` (formulas: reference::token_loss, then
/// reference::output_backward): dx overwritten, dweight and dbias overwritten or added to. `kept`, as written
/// by the forward pass, is overwritten: one backward pass for each forward pass. Layer, targets and options
/// as there; gradients overlap nothing. On the CPU every sum has one order, whatever the number of threads;
/// scratch: up to 7 matrices of the size of dx, and packed blocks. On a device the gradients are multiplied
/// by the context's loss_scale() if one is set. Throws the errors of output_loss_forward, shape_error for
/// gradients of other sizes, and value_error for a normalizer that is not positive (on a device only if it is
/// given by value).
template <class T, class Device>
void output_loss_backward(context<Device>& ctx, const output_layer<T>& layer,
                          std::span<const std::int32_t> targets, const token_loss_options& options,
                          const gradient_divisor& normalizer, T* kept, const output_gradient<T>& to) {
  const double divisor = is_cpu<Device> ? normalizer.read() : normalizer.value;
  detail::check_output("output_loss", layer);
  detail::check_loss_options("output_loss", targets, {layer.tokens(), layer.vocabulary()}, options, divisor);
  check_tokens(ctx, "output_loss", targets, layer.vocabulary(), options.padding);
  detail::check_output_gradient(layer, to);
  if constexpr (!is_cpu<Device>) {
    loss_ops<Device>::output_loss_backward(ctx, layer, targets, options, normalizer, kept, to);
  } else {
    if (layer.tokens() == 0) return detail::clear_gradient(to);
    scratch_frame frame(ctx.scratch());
    if constexpr (detail::is_narrow<T>) {
      if (!detail::computes_output(layer)) {
        const tensor_view<float, 2> dx = frame.take<float>(to.dx.shape());
        output_loss_backward<float>(ctx, detail::widened_output(ctx, frame, layer), targets, options, divisor,
                                    reinterpret_cast<float*>(kept),
                                    {dx, to.dweight, to.add_weight, to.dbias, to.add_bias});
        return detail::convert_rows(ctx, dx, to.dx);
      }
    }
    detail::output_backward<T>(ctx, frame, layer, targets, options, divisor, kept, to).run(ctx);
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, output_loss_backward);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
