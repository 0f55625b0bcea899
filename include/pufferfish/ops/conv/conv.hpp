// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Two-dimensional convolution and its gradients with respect to the input and the weight. reference_conv.hpp
/// states the same operations as plain loops.
///
/// Activations are NHWC and dense. A weight is stored HWIO, [kernel height][kernel width][in / groups][out],
/// as a matrix of conv_shape::patch() rows and out_channels columns. The forward pass multiplies the patches
/// of the input (im2col: one row for each output pixel) by this matrix. With groups, each group has out /
/// groups consecutive columns, which multiply the patches of that group's input channels only.
///
/// The caller must have validated the shape (conv_shape::validate). The operations check only that the
/// extents of the tensors fit the shape.
///
/// Algorithms on the CPU: a 1x1 convolution with stride 1, one group and no padding is a matrix product
/// (ops/linear/linear.hpp). A 3x3 convolution with stride 1 and one group of float or 16-bit elements uses
/// Winograd's minimal filtering (winograd.hpp) where the algorithm is less work, unless
/// context_options::winograd is false. conv_choice.hpp has the rules of the choice, which a table may replace
/// (linalg/kernel_choice.hpp). The rounding error of Winograd's algorithm is about twice that of
/// direct sums. Other convolutions are direct sums, most of them without an im2col matrix (few_pixels.hpp and
/// pixel_subset.hpp copy the patches of special cases).
///
/// Convolutions of 16-bit elements (bf16_conv.hpp, narrow_conv.hpp) sum in float and round each result once.
/// Gradients of their weights are float (parameter_t) and are not rounded.
///
/// \code
/// const conv_shape shape = conv_shape::square(24, 40, 3, 1, 1);
/// const extents<4> input{9, 6, 33, 24}, output = shape.output(input, "conv1");
/// tensor<float, 4> x(input), y(output), dx(input), w({3, 3, 24, 40}), dw(w.shape());
/// ops::conv_forward<float>(ctx, shape, x, w.data(), nullptr, y);
/// ops::conv_backward_input<float>(ctx, shape, dy, w.data(), dx);
/// ops::conv_backward_weight<float>(ctx, shape, x, dy, dw.data(), false);
/// // OIHW, as in PyTorch, is a view of the same memory: w.view().permute({3, 2, 0, 1}).
/// // Depthwise: in_channels = out_channels = groups; the weight is {3, 3, 1, groups}.
/// \endcode

#include <pufferfish/ops/conv/bf16_conv.hpp>
#include <pufferfish/ops/conv/grouped_conv.hpp>
#include <pufferfish/ops/conv/input_gradient.hpp>
#include <pufferfish/ops/conv/narrow_conv.hpp>
#include <pufferfish/ops/conv/reference_conv.hpp>
#include <pufferfish/ops/conv/run_conv.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/norm/gradient_sums.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

/// Throws shape_error, with the name `what` of the operation in its text, unless a convolution of the given
/// shape maps an input of extents x to an output of extents y (both NHWC).
inline void check_conv(const char* what, const conv_shape& shape, const extents<4>& x, const extents<4>& y) {
  const extents<4> expected = shape.output(x, what);
  if (expected != y) {
    pufferfish::detail::throw_error<shape_error>(
        {what, ": input ", x, " gives output ", expected, ", not ", y});
  }
}

/// The weight `w` (HWIO storage) as a matrix of patch() rows and out_channels columns.
template <class T>
tensor_view<const T, 2> as_matrix(const conv_shape& shape, const T* w) {
  return {w, {shape.patch(), shape.out_channels}};
}

/// Sets `moments`, unless nullptr, to those of an empty result y: no parts, and the channels of y.
template <class T>
void start_no_moments(const tensor_view<T, 4>& y, moment_parts<T>* moments) {
  if (moments != nullptr) moments->start(0, y.extent(3));
}

}  // namespace detail

/// Forward pass y = x * w + b (formula: reference::conv_forward), for any number of groups. x, y: NHWC,
/// dense; w: HWIO storage, patch() * out_channels elements; bias: out_channels elements, or nullptr for no
/// bias. y is overwritten and must not overlap an input. `epilogue`: a summand, a ReLU, or moments of the
/// channels, as in linear_forward; with groups, summand and ReLU are a pass of their own.
/// Throws shape_error, before anything is written, if x does not fit the shape or the extents of y are not
/// shape.output(x). On a device, unless the shape is pointwise, shape_error is also thrown if an image, a
/// patch or kernel height * kernel width * out_channels has more than 2^31 - 1 elements.
template <class T, class Device>
void conv_forward(context<Device>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x, const T* w,
                  const T* bias, const tensor_view<T, 4>& y, const output_epilogue<T>& epilogue = {}) {
  detail::check_conv("conv_forward", shape, x.shape(), y.shape());
  if (y.empty()) return detail::start_no_moments(y, epilogue.moments);
  if constexpr (!is_cpu<Device>) {
    conv_ops<Device>::conv_forward(ctx, shape, x, w, bias, y, epilogue.moments, epilogue.norm_of_x);
  } else if (shape.is_pointwise()) {
    return linear_forward<T>(ctx, detail::as_rows(x), detail::as_matrix(shape, w), bias, detail::as_rows(y),
                             epilogue);
  } else if constexpr (detail::is_narrow<T>) {
    detail::bf16_conv_forward<T>(
        ctx, shape, x, w, bias, y, epilogue.moments,
        [&](const tensor_view<T, 4>& result, moment_parts<T>* parts) {
          detail::narrow_conv_forward(
              ctx, shape, x, w, bias, result, parts,
              [&](const auto& from, const float* weight, const float* add, const auto& to) {
                conv_forward<float>(ctx, shape, from, weight, add, to);
              });
        });
  } else if (shape.groups > 1) {
    detail::report_conv<T>("conv_forward", shape, x.shape(),
                           shape.group_inputs() == 1 ? detail::kernel_algorithm::depthwise
                                                     : detail::kernel_algorithm::group_blocks);
    detail::grouped_forward<T>(
        ctx, shape, x, w, bias, y, epilogue.moments,
        [&](const conv_shape& one, const tensor_view<const T, 4>& from, const T* weight, const T* add,
            const tensor_view<T, 4>& to) { conv_forward<T>(ctx, one, from, weight, add, to); });
  } else {
    const detail::forward_plan plan = detail::plan_forward<T>(ctx, shape, x, w, y.shape());
    if (epilogue.moments != nullptr) epilogue.moments->start(plan.tasks.count(), y.extent(3));
    const detail::output_finish<T> finish(detail::as_rows(y), bias, epilogue);
    return detail::run_forward<T>(ctx, shape, x, w, y, plan, finish);
  }
  detail::apply_epilogue(ctx, epilogue, y);
}
PUFFERFISH_SEPARATE_OPERATION(conv, conv_forward);

/// Gradient of the input: computes dx from dy (formula: reference::conv_backward_input). dx is overwritten
/// or, with `add`, added to. dy: NHWC with the extents of y; dx: NHWC with the extents of x; both dense; w:
/// HWIO storage as in conv_forward. dx must not overlap dy or w. A device may collect `sums` over dx for the
/// batch norm whose output is x. Throws shape_error under the conditions of conv_forward.
template <class T, class Device>
void conv_backward_input(context<Device>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& dy,
                         const T* w, const tensor_view<T, 4>& dx, bool add = false,
                         gradient_sums<T>* sums = nullptr) {
  detail::check_conv("conv_backward_input", shape, dx.shape(), dy.shape());
  if (dx.empty()) return;
  if constexpr (!is_cpu<Device>) {
    conv_ops<Device>::conv_backward_input(ctx, shape, dy, w, dx, add, sums);
  } else if (shape.is_pointwise()) {
    linear_backward_input<T>(ctx, detail::as_rows(dy), detail::as_matrix(shape, w), detail::as_rows(dx), add);
  } else if constexpr (detail::is_narrow<T>) {
    detail::bf16_conv_backward_input<T>(
        ctx, shape, dy, w, dx, add, [&](const tensor_view<T, 4>& result, bool adds) {
          detail::narrow_conv_backward_input(ctx, shape, dy, w, result, adds,
                                             [&](const auto& from, const float* weight, const auto& to) {
                                               conv_backward_input<float>(ctx, shape, from, weight, to, adds);
                                             });
        });
  } else if (shape.groups > 1) {
    detail::report_conv<T>("conv_backward_input", shape, dx.shape(),
                           shape.group_inputs() == 1 ? detail::kernel_algorithm::depthwise
                                                     : detail::kernel_algorithm::group_blocks);
    detail::grouped_backward_input<T>(
        ctx, shape, dy, w, dx, add,
        [&](const conv_shape& one, const tensor_view<const T, 4>& from, const T* weight,
            const tensor_view<T, 4>& to) { conv_backward_input<T>(ctx, one, from, weight, to, add); });
  } else {
    detail::run_backward_input<T>(ctx, shape, dy, w, dx, add);
  }
}
PUFFERFISH_SEPARATE_OPERATION(conv, conv_backward_input);

/// Gradient of the weight: computes dw from x and dy (formula: reference::conv_backward_weight). dw (HWIO
/// storage, patch() * out_channels elements) is overwritten or, with `accumulate`, added to. x, dy: NHWC,
/// dense; dw must not overlap them. For a batch without images dw becomes 0 (with `accumulate`: unchanged).
/// The CPU sums parts of the batch separately in scratch memory and adds these sums in a fixed order, so the
/// result does not depend on the number of threads. 16-bit elements are summed in float. Throws shape_error
/// under the conditions of conv_forward.
template <class T, class Device>
void conv_backward_weight(context<Device>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                          const tensor_view<const T, 4>& dy, parameter_t<T>* dw, bool accumulate) {
  detail::check_conv("conv_backward_weight", shape, x.shape(), dy.shape());
  if constexpr (!is_cpu<Device>) {
    conv_ops<Device>::conv_backward_weight(ctx, shape, x, dy, dw, accumulate);
  } else if (shape.is_pointwise()) {
    const tensor_view<parameter_t<T>, 2> gradient(dw, {shape.patch(), shape.out_channels});
    linear_backward_weight<T>(ctx, detail::as_rows(x), detail::as_rows(dy), gradient, accumulate);
  } else if constexpr (detail::is_narrow<T>) {
    detail::bf16_conv_backward_weight<T>(ctx, shape, x, dy, dw, accumulate, [&](float* result, bool adds) {
      detail::narrow_conv_backward_weight(
          ctx, x, dy, [&](const auto& from, const auto& gradient, bool first) {
            conv_backward_weight<float>(ctx, shape, from, gradient, result, adds || !first);
          });
    });
  } else if (shape.groups > 1) {
    detail::report_conv<T>("conv_backward_weight", shape, x.shape(),
                           shape.group_inputs() == 1 ? detail::kernel_algorithm::depthwise
                                                     : detail::kernel_algorithm::group_blocks);
    detail::grouped_backward_weight<T>(ctx, shape, x, dy, dw, accumulate,
                                       [&](const conv_shape& one, const tensor_view<const T, 4>& from,
                                           const tensor_view<const T, 4>& gradient, T* to) {
                                         conv_backward_weight<T>(ctx, one, from, gradient, to, false);
                                       });
  } else {
    detail::run_backward_weight<T>(ctx, shape, x, dy, dw, accumulate);
  }
}
PUFFERFISH_SEPARATE_OPERATION(conv, conv_backward_weight);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
