// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Low-rank convolution of rank r (Wang et al., Pufferfish, MLSys 2021, section 2). The weight of a
/// convolution from in to out channels is replaced by two factors: `down`, a convolution of the same geometry
/// from in to r channels, and `up`, a 1x1 convolution from r to out channels. `shape` describes `down`.
///
/// Both factors are computed in one pass: a tile of the output of `down` is multiplied by `up` while the tile
/// is in the cache, and in the backward pass a tile of gradients is used for both products of `up`. With
/// groups, two grouped convolutions run one after the other. The reference is two convolutions of
/// ops::reference, one after the other. Forward and backward pass:
///
/// \code
/// ops::low_rank_conv_forward<float>(ctx, shape, x, down.data(), up, bias.data(), t, y);
/// ops::low_rank_conv_backward_up<float>(ctx, t, dy, up, dup, false, dt);
/// ops::conv_backward_weight<float>(ctx, shape, x, dt, ddown.data(), false);
/// ops::conv_backward_input<float>(ctx, shape, dt, down.data(), dx);
/// \endcode

#include <utility>

#include <pufferfish/ops/conv/conv.hpp>
#include <pufferfish/ops/linear/column_sums.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

/// Throws shape_error, with the name `what` of the operation and the shape in its text, if the shape has more
/// than one group.
inline void check_one_group(const char* what, const conv_shape& shape) {
  if (shape.groups == 1) return;
  pufferfish::detail::throw_error<shape_error>({what, ": for one group only, not for ", shape.describe()});
}

}  // namespace detail

/// Forward pass of a low-rank convolution with one group: t = x * down, y = t up + b. x: NHWC; down: HWIO
/// storage of `shape`, whose out_channels are the rank r; t: NHWC with r channels, or a null view if the
/// caller does not need t; up: r x out; bias: out elements, or nullptr for no bias; y: NHWC with the pixels
/// of t. All tensors are dense; t and y are overwritten and must not overlap other arguments. `epilogue`: as
/// in conv_forward. Throws shape_error if the extents do not fit or shape.groups is not 1; on a device also
/// for sizes above 2^31 - 1 as in conv_forward. If t is null, t may be kept in scratch memory.
template <class T, class Device>
void low_rank_conv_forward(context<Device>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                           const T* down, const tensor_view<const T, 2>& up, const T* bias,
                           const tensor_view<T, 4>& t, const tensor_view<T, 4>& y,
                           const output_epilogue<T>& epilogue = {}) {
  detail::check_one_group("low_rank_conv_forward", shape);
  extents<4> inner = y.shape();
  inner[3] = shape.out_channels;
  detail::check_conv("low_rank_conv_forward", shape, x.shape(), t.is_null() ? inner : t.shape());
  const tensor_view<T, 2> y_rows = detail::as_rows(y);
  const extents<2> t_extents{y_rows.extent(0), inner[3]};
  detail::check_linear("low_rank_conv_forward", t_extents, up.shape(), y_rows.shape());
  moment_parts<T>* const moments = epilogue.moments;
  if (y.empty()) return detail::start_no_moments(y, moments);
  if constexpr (!is_cpu<Device>) {
    conv_ops<Device>::low_rank_conv_forward(ctx, shape, x, down, up, bias, t, y, moments, epilogue.norm_of_x);
  } else if constexpr (detail::is_narrow<T>) {
    if (!t.is_null()) {
      conv_forward<T>(ctx, shape, x, down, static_cast<const T*>(nullptr), t);
      return linear_forward<T>(ctx, detail::as_rows<const T>(t), up, bias, y_rows, epilogue);
    }
    // Moments are started before the scratch frame, since they must outlive the frame.
    if (moments != nullptr) detail::start_row_moments(y_rows, *moments);
    scratch_frame frame(ctx.scratch());
    const tensor_view<T, 4> kept = frame.take<T>(inner);
    conv_forward<T>(ctx, shape, x, down, static_cast<const T*>(nullptr), kept);
    linear_forward<T>(ctx, detail::as_rows<const T>(kept), up, bias, y_rows);
    if (moments != nullptr) detail::add_row_moments(ctx, y_rows, *moments);
  } else {
    const detail::forward_plan plan = detail::plan_forward<T>(ctx, shape, x, down, inner);
    // Moments are started before the scratch frame, since they must outlive the frame.
    if (moments != nullptr) moments->start(plan.tasks.count(), y.extent(3));
    scratch_frame frame(ctx.scratch());
    const tensor_view<T, 4> kept = t.is_null() ? frame.take<T>(inner) : t;
    const tensor_view<const T, 2> t_rows = detail::as_rows(kept);
    const auto right =
        detail::packed_b<T>::prepare(ctx, frame, detail::panel_shape<T>(up.extent(1)), up, t_extents[0]);
    const detail::output_finish<T> finish(y_rows, bias, epilogue,
                                          up.extent(0) < pufferfish::detail::shallow_depth);
    return detail::run_forward<T>(
        ctx, shape, x, down, kept, plan, [&](index_t task, index_t first, index_t count) {
          finish.compute(task, first, count, [&](index_t row, index_t rows, const tensor_view<T, 2>& result) {
            pufferfish::detail::multiply_rows(right, t_rows.slice(0, row, rows), result, false);
          });
        });
  }
  detail::apply_epilogue(ctx, epilogue, y);
}
PUFFERFISH_SEPARATE_OPERATION(conv, low_rank_conv_forward);

/// Backward pass of `up` with one group: dt = dy up^T, and dup = t^T dy or, with `accumulate`, dup += t^T dy.
/// dy: NHWC with out channels; t, dt: NHWC with r channels; up, dup: r x out; all dense. dt and dup must not
/// overlap other arguments. The gradients of x and `down` follow from dt by conv_backward_input and
/// conv_backward_weight; the gradient of the bias is bias_gradient of dy. Throws shape_error if the extents
/// do not fit.
template <class T, class Device>
void low_rank_conv_backward_up(context<Device>& ctx, const tensor_view<const T, 4>& t,
                               const tensor_view<const T, 4>& dy, const tensor_view<const T, 2>& up,
                               const tensor_view<parameter_t<T>, 2>& dup, bool accumulate,
                               const tensor_view<T, 4>& dt) {
  const tensor_view<const T, 2> t_rows = detail::as_rows(t), dy_rows = detail::as_rows(dy);
  const tensor_view<T, 2> dt_rows = detail::as_rows(dt);
  detail::check_linear("low_rank_conv_backward_up", t_rows.shape(), up.shape(), dy_rows.shape());
  detail::check_linear("low_rank_conv_backward_up", dt_rows.shape(), dup.shape(), dy_rows.shape());
  if (dup.empty()) return fill(ctx, dt_rows.flat(), T{});  // if out is 0, dt is a sum of no terms
  if constexpr (!is_cpu<Device>) {
    conv_ops<Device>::low_rank_conv_backward_up(ctx, t_rows, dy_rows, up, dup, accumulate, dt_rows);
  } else if constexpr (detail::is_narrow<T>) {
    linear_backward_weight<T>(ctx, t_rows, dy_rows, dup, accumulate);
    linear_backward_input<T>(ctx, dy_rows, up, dt_rows);
  } else {
    scratch_frame frame(ctx.scratch());
    T* storage = frame.take<T>(gemm_operand<T>::storage_size(up.extent(1), up.extent(0)));
    const auto operand = gemm_operand<T>::prepare(transpose(up), storage, dy_rows.extent(0));
    detail::multiply_transposed<T>(
        ctx, t_rows, dy_rows, dup, accumulate, [&](index_t first, index_t count, int) {
          if (count == 0) return;
          operand.multiply(dy_rows.slice(0, first, count), dt_rows.slice(0, first, count), false);
        });
  }
}
PUFFERFISH_SEPARATE_OPERATION(conv, low_rank_conv_backward_up);

/// Both gradients of the weights, with one group: low_rank_conv_backward_up, then conv_backward_weight of
/// `down`, whose shape is `shape`, with x and dt. dup, ddown: where the gradients are stored or, with `add`,
/// added. As soon as dt is computed, `then` is called with a function that it must call once, which computes
/// the rest of both gradients: a device may share launches. Shapes, aliasing and errors are those of the two
/// operations.
template <class T, class Device, class Then>
void low_rank_conv_backward_weights(context<Device>& ctx, const conv_shape& shape,
                                    const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& t,
                                    const tensor_view<const T, 4>& dy, const tensor_view<const T, 2>& up,
                                    const sum_target<parameter_t<T>>& dup, const tensor_view<T, 4>& dt,
                                    const sum_target<parameter_t<T>>& ddown, Then&& then) {
  if constexpr (!is_cpu<Device>) {
    const extents<2> inner = detail::as_rows(t).shape(), outer = detail::as_rows(dy).shape();
    detail::check_linear("low_rank_conv_backward_up", inner, up.shape(), outer);
    detail::check_linear("low_rank_conv_backward_up", detail::as_rows(dt).shape(), up.shape(), outer);
    detail::check_conv("conv_backward_weight", shape, x.shape(), dt.shape());
    if (!up.empty()) {
      return conv_ops<Device>::low_rank_conv_backward_weights(ctx, shape, x, t, dy, up, dup, dt, ddown, then);
    }
  }
  const tensor_view<parameter_t<T>, 2> up_gradient(dup.data, up.shape());
  low_rank_conv_backward_up<T>(ctx, t, dy, up, up_gradient, dup.add, dt);
  then([&] { conv_backward_weight<T>(ctx, shape, x, dt, ddown.data, ddown.add); });
}

namespace detail {

/// The shape of `up` in a low-rank convolution with groups: a grouped 1x1 convolution from `inner` = groups *
/// r channels to `out` channels.
inline conv_shape grouped_up_shape(index_t groups, index_t inner, index_t out) {
  conv_shape up;
  up.in_channels = inner;
  up.out_channels = out;
  up.groups = groups;
  return up;
}

}  // namespace detail

/// Forward pass of a low-rank convolution with any number of groups: t = x * down, y = t * up + b, computed
/// as two convolutions. down: HWIO storage of `shape`, whose out_channels are groups * r; t: NHWC with groups
/// * r channels, or a null view if the caller does not need t; up: r x out, of which out / groups consecutive
/// columns belong to each group. Other arguments, aliasing and errors as in low_rank_conv_forward.
template <class T, class Device>
void grouped_low_rank_conv_forward(context<Device>& ctx, const conv_shape& shape,
                                   const tensor_view<const T, 4>& x, const T* down, const T* up,
                                   const T* bias, const tensor_view<T, 4>& t, const tensor_view<T, 4>& y,
                                   const output_epilogue<T>& epilogue = {}) {
  const conv_shape up_shape = detail::grouped_up_shape(shape.groups, shape.out_channels, y.extent(3));
  output_epilogue<T> first, second = epilogue;
  std::swap(first.norm_of_x, second.norm_of_x);
  if (!t.is_null()) {
    conv_forward<T>(ctx, shape, x, down, static_cast<const T*>(nullptr), t, first);
    return conv_forward<T>(ctx, up_shape, t, up, bias, y, second);
  }
  // Moments are started before the scratch frame, since they must outlive the frame.
  if constexpr (is_cpu<Device>) detail::start_moments(y, epilogue.moments);
  scratch_frame frame(ctx.scratch());
  extents<4> inner = y.shape();
  inner[3] = shape.out_channels;
  const tensor_view<T, 4> kept = frame.take<T>(inner);
  conv_forward<T>(ctx, shape, x, down, static_cast<const T*>(nullptr), kept, first);
  conv_forward<T>(ctx, up_shape, kept, up, bias, y, {epilogue.addend, epilogue.relu});
  if constexpr (is_cpu<Device>) detail::add_moments(ctx, y, epilogue.moments);
}

/// Backward pass of `up` with any number of groups. t, dt: NHWC with groups * r channels; up, dup: r x out,
/// of which out / groups consecutive columns belong to each group. Other arguments and aliasing as in
/// low_rank_conv_backward_up; errors as in conv_backward_weight.
template <class T, class Device>
void grouped_low_rank_conv_backward_up(context<Device>& ctx, index_t groups, const tensor_view<const T, 4>& t,
                                       const tensor_view<const T, 4>& dy, const T* up, parameter_t<T>* dup,
                                       bool accumulate, const tensor_view<T, 4>& dt) {
  const conv_shape up_shape = detail::grouped_up_shape(groups, t.extent(3), dy.extent(3));
  conv_backward_weight<T>(ctx, up_shape, t, dy, dup, accumulate);
  conv_backward_input<T>(ctx, up_shape, dy, up, dt);
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
