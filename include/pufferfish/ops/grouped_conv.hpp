// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: convolutions of more than one group (conv_shape::groups), forward and both gradients. Depthwise
/// shapes have kernels of their own (depthwise_conv.hpp). Of other shapes the channels of each group are
/// copied next to each other, and each group is one ordinary convolution; 1x1 convolutions need no copies.
///
/// Weights are stored [kernel height][kernel width][in / groups][out]: a group has out / groups consecutive
/// columns.

#include <algorithm>

#include <pufferfish/ops/depthwise_conv.hpp>
#include <pufferfish/ops/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// rows x (groups * width) elements to groups x rows x width, or back: the channels of each group together.
template <class T>
void split_groups(context<device::cpu>& ctx, const T* from, index_t rows, index_t groups, index_t width,
                  T* to) {
  for_row_chunks(ctx, rows, groups * width, [&](index_t begin, index_t end) {
    for (index_t group = 0; group < groups; ++group) {
      for (index_t row = begin; row < end; ++row) {
        const T* const source = from + (row * groups + group) * width;
        T* const target = to + (group * rows + row) * width;
        for (index_t i = 0; i < width; ++i) target[i] = source[i];
      }
    }
  });
}
template <class T>
void join_groups(context<device::cpu>& ctx, const T* from, index_t rows, index_t groups, index_t width,
                 T* to) {
  for_row_chunks(ctx, rows, groups * width, [&](index_t begin, index_t end) {
    for (index_t group = 0; group < groups; ++group) {
      for (index_t row = begin; row < end; ++row) {
        const T* const source = from + (group * rows + row) * width;
        T* const target = to + (row * groups + group) * width;
        for (index_t i = 0; i < width; ++i) target[i] = source[i];
      }
    }
  });
}

/// An image tensor or a weight cut into groups: tensors of `rows` x `width` elements, one behind the other.
template <class T>
struct group_copy {
  index_t rows, groups, width;
  T* data;

  group_copy(scratch_frame& frame, index_t row_count, index_t group_count, index_t columns)
      : rows(row_count),
        groups(group_count),
        width(columns / group_count),
        data(frame.take<T>(row_count * columns)) {}

  void split(context<device::cpu>& ctx, const T* from) const {
    split_groups<T>(ctx, from, rows, groups, width, data);
  }
  void join(context<device::cpu>& ctx, T* to) const { join_groups<T>(ctx, data, rows, groups, width, to); }
  T* operator[](index_t group) const { return data + group * rows * width; }
  tensor_view<T, 4> images(index_t group, extents<4> shape) const {
    shape[3] = width;
    return {(*this)[group], shape};
  }
};

inline index_t pixel_count(const extents<4>& shape) { return shape[0] * shape[1] * shape[2]; }

/// The depthwise convolution with one input channel for each output channel of a shape with one input channel
/// per group.
inline conv_shape repeated_channels(conv_shape shape) {
  shape.groups = shape.in_channels = shape.out_channels;
  return shape;
}

/// to = x with each channel `times` times in a row.
template <class T>
void repeat_channels(context<device::cpu>& ctx, const tensor_view<const T, 4>& x, index_t times, T* to) {
  const index_t channels = x.extent(3);
  for_row_chunks(ctx, pixel_count(x.shape()), channels * times, [&](index_t begin, index_t end) {
    T* target = to + begin * channels * times;
    for (index_t i = begin * channels; i < end * channels; ++i, target += times) {
      std::fill_n(target, times, x.data()[i]);
    }
  });
}

/// A convolution of one pixel to one pixel, whose groups are products of matrices.
inline bool pointwise_in_groups(const conv_shape& shape) { return shape.of_one_group().is_pointwise(); }

/// The channels of one group, as columns of the matrix of pixels.
template <class T>
tensor_view<T, 2> group_columns(const tensor_view<T, 4>& view, index_t groups, index_t group) {
  const index_t width = view.extent(3) / groups;
  const tensor_view<T, 2> rows = view.reshape(extents<2>{pixel_count(view.shape()), view.extent(3)});
  return rows.slice(1, group * width, width);
}

/// Starts moments that add_moments() fills from rows of y in the cache's or in memory.
template <class T>
index_t moment_rows(const tensor_view<T, 4>& y) {
  return std::max<index_t>(1, 16384 / y.extent(3));
}
template <class T>
void start_moments(const tensor_view<T, 4>& y, moment_parts<T>* moments) {
  if (moments == nullptr) return;
  const index_t rows = moment_rows(y);
  moments->start((pixel_count(y.shape()) + rows - 1) / rows, y.extent(3));
}
template <class T>
void add_moments(context<device::cpu>& ctx, const tensor_view<T, 4>& y, moment_parts<T>* moments) {
  if (moments == nullptr) return;
  const index_t rows = moment_rows(y), channels = y.extent(3), pixels = pixel_count(y.shape());
  ctx.parallel_for(moments->parts(), [&](index_t part, int) {
    const index_t first = part * rows;
    moments->add(part, y.data() + first * channels, std::min(rows, pixels - first), channels);
  });
}

/// conv_forward for more than one group; y is not empty. one_group(shape, x, w, bias, y) computes an ordinary
/// convolution.
template <class T, class OneGroup>
void grouped_forward(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                     const T* w, const T* bias, const tensor_view<T, 4>& y, moment_parts<T>* moments,
                     OneGroup&& one_group) {
  if (is_depthwise(shape)) return depthwise_forward<T>(ctx, shape, x, w, bias, y, moments);
  start_moments(y, moments);
  const index_t groups = shape.groups, out = shape.group_outputs();
  scratch_frame frame(ctx.scratch());
  if (shape.group_inputs() == 1) {
    const tensor_view<T, 4> repeated =
        frame.take<T>(extents<4>{x.extent(0), x.extent(1), x.extent(2), shape.out_channels});
    repeat_channels<T>(ctx, x, out, repeated.data());
    depthwise_forward<T>(ctx, repeated_channels(shape), repeated, w, bias, y, nullptr);
  } else if (pointwise_in_groups(shape)) {
    const tensor_view<const T, 2> weight(w, {shape.patch(), shape.out_channels});
    for (index_t group = 0; group < groups; ++group) {
      multiply_rows<T>(ctx, group_columns(x, groups, group), weight.slice(1, group * out, out),
                       bias == nullptr ? nullptr : bias + group * out, group_columns(y, groups, group));
    }
  } else {
    const group_copy<T> weights(frame, shape.patch(), groups, shape.out_channels);
    const group_copy<T> inputs(frame, pixel_count(x.shape()), groups, shape.in_channels);
    const group_copy<T> outputs(frame, pixel_count(y.shape()), groups, shape.out_channels);
    weights.split(ctx, w);
    inputs.split(ctx, x.data());
    for (index_t group = 0; group < groups; ++group) {
      one_group(shape.of_one_group(), tensor_view<const T, 4>(inputs.images(group, x.shape())),
                weights[group], bias == nullptr ? nullptr : bias + group * out,
                outputs.images(group, y.shape()));
    }
    outputs.join(ctx, y.data());
  }
  add_moments(ctx, y, moments);
}

/// conv_backward_input for more than one group; dx is not empty. one_group(shape, dy, w, dx) computes the
/// input gradient of an ordinary convolution, or adds it if `add`.
template <class T, class OneGroup>
void grouped_backward_input(context<device::cpu>& ctx, const conv_shape& shape,
                            const tensor_view<const T, 4>& dy, const T* w, const tensor_view<T, 4>& dx,
                            bool add, OneGroup&& one_group) {
  if (is_depthwise(shape)) return depthwise_backward_input<T>(ctx, shape, dy, w, dx, add);
  const index_t groups = shape.groups, out = shape.group_outputs();
  scratch_frame frame(ctx.scratch());
  if (shape.group_inputs() == 1) {
    const tensor_view<T, 4> repeated =
        frame.take<T>(extents<4>{dx.extent(0), dx.extent(1), dx.extent(2), shape.out_channels});
    depthwise_backward_input<T>(ctx, repeated_channels(shape), dy, w, repeated, false);
    for_chunks(ctx, dx.size(), [&](index_t begin, index_t end) {
      for (index_t i = begin; i < end; ++i) {
        T sum = add ? dx.data()[i] : T{};
        for (index_t o = 0; o < out; ++o) sum += repeated.data()[i * out + o];
        dx.data()[i] = sum;
      }
    });
  } else if (pointwise_in_groups(shape)) {
    const tensor_view<const T, 2> weight(w, {shape.patch(), shape.out_channels});
    for (index_t group = 0; group < groups; ++group) {
      multiply_rows<T>(ctx, group_columns(dy, groups, group), transpose(weight.slice(1, group * out, out)),
                       static_cast<const T*>(nullptr), group_columns(dx, groups, group), nullptr, add);
    }
  } else {
    const group_copy<T> weights(frame, shape.patch(), groups, shape.out_channels);
    const group_copy<T> gradients(frame, pixel_count(dy.shape()), groups, shape.out_channels);
    const group_copy<T> results(frame, pixel_count(dx.shape()), groups, shape.in_channels);
    weights.split(ctx, w);
    gradients.split(ctx, dy.data());
    if (add) results.split(ctx, dx.data());
    for (index_t group = 0; group < groups; ++group) {
      one_group(shape.of_one_group(), tensor_view<const T, 4>(gradients.images(group, dy.shape())),
                weights[group], results.images(group, dx.shape()));
    }
    results.join(ctx, dx.data());
  }
}

/// conv_backward_weight for more than one group. one_group(shape, x, dy, dw) computes the weight gradient of
/// an ordinary convolution, or adds it if `accumulate`.
template <class T, class OneGroup>
void grouped_backward_weight(context<device::cpu>& ctx, const conv_shape& shape,
                             const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& dy, T* dw,
                             bool accumulate, OneGroup&& one_group) {
  if (is_depthwise(shape)) return depthwise_backward_weight<T>(ctx, shape, x, dy, dw, accumulate);
  const index_t groups = shape.groups;
  scratch_frame frame(ctx.scratch());
  if (shape.group_inputs() == 1) {
    const tensor_view<T, 4> repeated =
        frame.take<T>(extents<4>{x.extent(0), x.extent(1), x.extent(2), shape.out_channels});
    repeat_channels<T>(ctx, x, shape.group_outputs(), repeated.data());
    return depthwise_backward_weight<T>(ctx, repeated_channels(shape), repeated, dy, dw, accumulate);
  }
  const group_copy<T> weights(frame, shape.patch(), groups, shape.out_channels);
  if (accumulate) weights.split(ctx, dw);
  if (pointwise_in_groups(shape)) {
    for (index_t group = 0; group < groups; ++group) {
      linear_backward_weight<T>(ctx, group_columns(x, groups, group), group_columns(dy, groups, group),
                                tensor_view<T, 2>(weights[group], {shape.patch(), shape.group_outputs()}),
                                accumulate);
    }
  } else {
    const group_copy<T> inputs(frame, pixel_count(x.shape()), groups, shape.in_channels);
    const group_copy<T> gradients(frame, pixel_count(dy.shape()), groups, shape.out_channels);
    inputs.split(ctx, x.data());
    gradients.split(ctx, dy.data());
    for (index_t group = 0; group < groups; ++group) {
      one_group(shape.of_one_group(), tensor_view<const T, 4>(inputs.images(group, x.shape())),
                tensor_view<const T, 4>(gradients.images(group, dy.shape())), weights[group]);
    }
  }
  weights.join(ctx, dw);
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
