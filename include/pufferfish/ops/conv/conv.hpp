// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Two-dimensional convolution with its gradients. The plain form is reference_conv.hpp.
///
/// Activations are NHWC and dense. Weights are stored [kernel height][kernel width][in / groups][out]: the
/// matrix of conv_shape::patch() rows and out_channels columns that multiplies the patches of the input. With
/// groups, each group has out / groups consecutive columns, which multiply patches of its own input channels.
///
/// The shape must be valid (conv_shape::validate); the operations check only that the extents fit.
/// Algorithms on the CPU: 1x1 kernels of stride 1 without padding are matrix products
/// (ops/linear/linear.hpp). Float convolutions with 3x3 kernels and stride 1 use Winograd's algorithm where
/// it is less work, unless context_options::winograd is false; its rounding error is about twice as large.
/// Others are direct sums without a matrix of patches.
///
/// Convolutions of bfloat16 (bf16_conv.hpp, narrow_conv.hpp) sum in float and round each result once.
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

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

/// Throws shape_error, naming the operation `what`, unless `shape` maps an input of extents x to an output of
/// extents y.
inline void check_conv(const char* what, const conv_shape& shape, const extents<4>& x, const extents<4>& y) {
  const extents<4> expected = shape.output(x, what);
  if (expected != y) {
    pufferfish::detail::throw_error<shape_error>(
        {what, ": input ", x, " gives output ", expected, ", not ", y});
  }
}

template <class T>
tensor_view<const T, 2> as_matrix(const conv_shape& shape, const T* w) {
  return {w, {shape.patch(), shape.out_channels}};
}

/// The moments of a result without rows.
template <class T>
void start_no_moments(const tensor_view<T, 4>& y, moment_parts<T>* moments) {
  if (moments != nullptr) moments->start(0, y.extent(3));
}

}  // namespace detail

/// y = x * w + b (formula: reference::conv_forward), for any number of groups. x, y: NHWC, dense; w: HWIO
/// storage, patch() * out_channels elements; bias: out_channels elements or nullptr. y is overwritten and
/// overlaps no input. `moments`, unless nullptr, receives the mean and variance of each channel of y; see
/// moment_parts. A device does not collect moments and ignores the argument. Throws shape_error, before
/// anything is written, if x does not fit the shape or y is not its output; on a device, unless the shape is
/// pointwise, also if an image, a patch or kernel height * kernel width * out_channels has more elements than
/// a 31-bit number can count.
template <class T, class Device>
void conv_forward(context<Device>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x, const T* w,
                  const T* bias, const tensor_view<T, 4>& y, moment_parts<T>* moments = nullptr) {
  detail::check_conv("conv_forward", shape, x.shape(), y.shape());
  if (y.empty()) return detail::start_no_moments(y, moments);
  if constexpr (!is_cpu<Device>) {
    conv_ops<Device>::conv_forward(ctx, shape, x, w, bias, y);
  } else if (shape.is_pointwise()) {
    linear_forward<T>(ctx, detail::as_rows(x), detail::as_matrix(shape, w), bias, detail::as_rows(y),
                      moments);
  } else if constexpr (detail::is_narrow<T>) {
    if (bias == nullptr && detail::winograd_pays<T>(ctx, shape, x.shape(), y.shape())) {
      return detail::tiled_conv_forward<T>(ctx, shape, x, w, y, moments);
    }
    if (detail::multiplies_pairs<T>(shape, shape.in_channels)) {
      return detail::pair_conv_forward(ctx, shape, x, w, bias, y, moments);
    }
    detail::report_conv<T>("conv_forward", shape, x.shape(), "widened to float");
    detail::narrow_conv_forward(ctx, shape, x, w, bias, y, moments,
                                [&](const auto& from, const float* weight, const float* add, const auto& to) {
                                  conv_forward<float>(ctx, shape, from, weight, add, to);
                                });
  } else if (shape.groups > 1) {
    detail::report_conv<T>("conv_forward", shape, x.shape(),
                           shape.group_inputs() == 1 ? "depthwise sums" : "blocks of groups");
    detail::grouped_forward<T>(
        ctx, shape, x, w, bias, y, moments,
        [&](const conv_shape& one, const tensor_view<const T, 4>& from, const T* weight, const T* add,
            const tensor_view<T, 4>& to) { conv_forward<T>(ctx, one, from, weight, add, to); });
  } else {
    const detail::image_tasks tasks = detail::forward_tasks<T>(ctx, shape, x.shape(), y.shape());
    if (moments != nullptr) moments->start(tasks.count(), y.extent(3));
    const detail::output_finish<T> finish{detail::as_rows(y), bias, moments};
    detail::run_forward<T>(ctx, shape, x, w, y, tasks, finish);
  }
}
PUFFERFISH_SEPARATE_OPERATION(conv, conv_forward);

/// dx from dy (formula: reference::conv_backward_input), overwritten or with `add` added to. dy: NHWC of the
/// extents of y, dx: NHWC of the extents of x, both dense; w: HWIO storage; dx overlaps no input. Throws
/// shape_error as conv_forward.
template <class T, class Device>
void conv_backward_input(context<Device>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& dy,
                         const T* w, const tensor_view<T, 4>& dx, bool add = false) {
  detail::check_conv("conv_backward_input", shape, dx.shape(), dy.shape());
  if (dx.empty()) return;
  if constexpr (!is_cpu<Device>) {
    conv_ops<Device>::conv_backward_input(ctx, shape, dy, w, dx, add);
  } else if (shape.is_pointwise()) {
    linear_backward_input<T>(ctx, detail::as_rows(dy), detail::as_matrix(shape, w), detail::as_rows(dx), add);
  } else if constexpr (detail::is_narrow<T>) {
    if (detail::winograd_pays<T>(ctx, detail::turned(shape), dy.shape(), dx.shape())) {
      return detail::tiled_backward_input<T>(ctx, shape, dy, w, dx, add);
    }
    if (detail::multiplies_pairs<T>(shape, shape.out_channels)) {
      return detail::pair_conv_backward_input(ctx, shape, dy, w, dx, add);
    }
    detail::report_conv<T>("conv_backward_input", shape, dx.shape(), "widened to float");
    detail::narrow_conv_backward_input(ctx, shape, dy, w, dx, add,
                                       [&](const auto& from, const float* weight, const auto& to) {
                                         conv_backward_input<float>(ctx, shape, from, weight, to, add);
                                       });
  } else if (shape.groups > 1) {
    detail::report_conv<T>("conv_backward_input", shape, dx.shape(),
                           shape.group_inputs() == 1 ? "depthwise sums" : "blocks of groups");
    detail::grouped_backward_input<T>(
        ctx, shape, dy, w, dx, add,
        [&](const conv_shape& one, const tensor_view<const T, 4>& from, const T* weight,
            const tensor_view<T, 4>& to) { conv_backward_input<T>(ctx, one, from, weight, to, add); });
  } else {
    detail::run_backward_input<T>(ctx, shape, dy, w, dx, add);
  }
}
PUFFERFISH_SEPARATE_OPERATION(conv, conv_backward_input);

/// dw (HWIO storage) from x and dy, overwritten or with `accumulate` added to (formula:
/// reference::conv_backward_weight). x, dy: NHWC, dense; dw overlaps no input. For a batch without images dw
/// becomes 0 (with `accumulate`: unchanged). Parts of the batch have sums of their own in scratch, which are
/// added in order; sums of 16-bit elements are in float. Throws shape_error as conv_forward.
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
    if (detail::winograd_pays<T>(ctx, shape, x.shape(), dy.shape())) {
      detail::report_conv<T>("conv_backward_weight", shape, x.shape(), "Winograd tiles");
      return detail::winograd_backward_weight<T>(ctx, shape, x, dy, dw, accumulate);
    }
    if (detail::pairs_pixels<T>(shape, dy.shape())) {
      return detail::pair_conv_backward_weight<T>(ctx, shape, x, dy, dw, accumulate);
    }
    detail::report_conv<T>("conv_backward_weight", shape, x.shape(), "widened to float");
    detail::narrow_conv_backward_weight(ctx, x, dy, [&](const auto& from, const auto& gradient, bool first) {
      conv_backward_weight<float>(ctx, shape, from, gradient, dw, accumulate || !first);
    });
  } else if (shape.groups > 1) {
    detail::report_conv<T>("conv_backward_weight", shape, x.shape(),
                           shape.group_inputs() == 1 ? "depthwise sums" : "blocks of groups");
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
