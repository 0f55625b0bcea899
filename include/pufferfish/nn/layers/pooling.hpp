// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Pooling layers: `MaxPool`, `AvgPool`, `GlobalAvgPool`.

#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/ops/pooling/global_average.hpp>
#include <pufferfish/ops/pooling/pooling.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The largest value of each window. Among equal values, the first in row order gets the gradient.
/// Padding never wins. Keeps views of x and y, no copies, for the backward pass.
/// A NaN in a window makes its output NaN, and the gradient of that output is dropped.
///
/// \code
/// Sequential<float> layers;
/// layers.add("pool", MaxPool<float>(2));             // 2x2 windows, stride 2
/// layers.add("stem_pool", MaxPool<float>(3, 2, 1));  // 3x3 windows, stride 2, padding 1
/// \endcode
template <class T>
class MaxPool {
 public:
  using value_type = T;

  /// Throws shape_error unless kernel and stride are positive and 0 <= padding <= kernel / 2.
  explicit MaxPool(const pool_shape& shape) : shape_(shape) { shape_.validate("MaxPool"); }
  /// Square windows with stride `kernel`.
  explicit MaxPool(index_t kernel) : MaxPool(kernel, kernel) {}
  /// Square windows with their own stride and padding.
  MaxPool(index_t kernel, index_t stride, index_t padding = 0)
      : MaxPool(pool_shape::square(kernel, stride, padding)) {}

  /// The windows given to the constructor.
  const pool_shape& shape() const { return shape_; }
  std::string describe() const { return "MaxPool, " + shape_.describe(); }
  /// Output shape N x H' x W' x C for `input`. Throws shape_error if the window does not fit.
  extents<4> output_shape(const extents<4>& input) const { return shape_.output(input, *this); }

  /// x, y: NHWC, dense; y does not overlap x. In training both must stay as they are until the backward pass.
  /// Throws shape_error.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    detail::check_forward(*this, x, y);
    ops::max_pool_forward<T>(ctx, shape_, x, y);
    if (ctx.training()) ctx.tape().push_value(*this, kept{x, y});
  }

  /// Computes dx from dy; dx may be a null view and overlaps nothing. Throws shape_error, and
  /// state_error without a forward pass in training mode.
  /// dx(first largest pixel of the window) += dy, over all windows; other elements of dx are 0.
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    const auto views = ctx.tape().template pop_value<kept>(*this);
    detail::check_backward(*this, views.x.shape(), dy, dx);
    if (dx.is_null()) return;
    ops::max_pool_backward<T>(ctx, shape_, views.x, views.y, dy, dx);
  }

 private:
  struct kept {
    tensor_view<const T, 4> x, y;
  };

  pool_shape shape_;
};

/// The average of each window. `count_padding`: padded zeros count as pixels (PyTorch's count_include_pad,
/// and its default); otherwise windows at the border are averages of their real pixels.
/// The backward pass needs only the shape of x, so neither x nor y is kept.
template <class T>
class AvgPool {
 public:
  using value_type = T;
  static constexpr bool reads_input = false;
  static constexpr bool reads_output = false;

  /// Throws shape_error unless kernel and stride are positive and 0 <= padding <= kernel / 2.
  explicit AvgPool(const pool_shape& shape, bool count_padding = true)
      : shape_(shape), count_padding_(count_padding) {
    shape_.validate("AvgPool");
  }
  /// Square windows with stride `kernel`.
  explicit AvgPool(index_t kernel) : AvgPool(kernel, kernel) {}
  /// Square windows with their own stride and padding.
  AvgPool(index_t kernel, index_t stride, index_t padding = 0, bool count_padding = true)
      : AvgPool(pool_shape::square(kernel, stride, padding), count_padding) {}

  const pool_shape& shape() const { return shape_; }
  bool counts_padding() const { return count_padding_; }
  std::string describe() const { return "AvgPool, " + shape_.describe(); }
  /// Output shape N x H' x W' x C for `input`. Throws shape_error if the window does not fit.
  extents<4> output_shape(const extents<4>& input) const { return shape_.output(input, *this); }

  /// x, y: NHWC, dense; y does not overlap x. Throws shape_error.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    detail::check_forward(*this, x, y);
    ops::average_pool_forward<T>(ctx, shape_, count_padding_, x, y);
    if (ctx.training()) ctx.tape().push_value(*this, x.shape());
  }

  /// Computes dx from dy; dx may be a null view and overlaps nothing. Throws shape_error, and
  /// state_error without a forward pass in training mode.
  /// Each dy, divided as in the forward pass, is added to all pixels of its window.
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    detail::check_backward(*this, ctx.tape().template pop_value<extents<4>>(*this), dy, dx);
    if (dx.is_null()) return;
    ops::average_pool_backward<T>(ctx, shape_, count_padding_, dy, dx);
  }

 private:
  pool_shape shape_;
  bool count_padding_;
};

/// The average over all pixels: N x H x W x C to N x 1 x 1 x C, for any image size of at least one pixel.
/// y(n, c) = sum over the pixels of x(n, h, w, c) / (H W). The backward pass needs only the shape of x.
template <class T>
class GlobalAvgPool {
 public:
  using value_type = T;
  static constexpr bool reads_input = false;
  static constexpr bool reads_output = false;

  std::string describe() const { return "GlobalAvgPool"; }
  /// Output shape N x 1 x 1 x C. Throws shape_error for images without pixels.
  extents<4> output_shape(const extents<4>& input) const {
    if (input[1] == 0 || input[2] == 0) {
      PUFFERFISH_THROW(shape_error(describe() + ": input " + to_string<4>(input) + " (NHWC) has no pixels"));
    }
    return {input[0], 1, 1, input[3]};
  }

  /// x, y: NHWC, dense; y does not overlap x. Throws shape_error.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    detail::check_forward(*this, x, y);
    ops::global_average_forward<T>(ctx, x, y);
    if (ctx.training()) ctx.tape().push_value(*this, x.shape());
  }

  /// Computes dx from dy; dx may be a null view and overlaps nothing. Throws shape_error, and
  /// state_error without a forward pass in training mode.
  /// dx = dy / (H W) for each pixel.
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    detail::check_backward(*this, ctx.tape().template pop_value<extents<4>>(*this), dy, dx);
    if (dx.is_null()) return;
    ops::global_average_backward<T>(ctx, dy, dx);
  }
};

PUFFERFISH_NAMESPACE_END
