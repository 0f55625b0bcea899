// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Maximum and average over windows of NHWC images, with gradients: the plain reference and the fast form.
///
/// The operations check no shapes: y must have the extents that a valid pool_shape computes with output(). A
/// view that is not dense throws shape_error.
///
/// \code
/// const pool_shape shape = pool_shape::square(3, 2, 1);
/// tensor<float, 4> x({8, 112, 112, 64}), y({8, 56, 56, 64}), dx(x.shape());
/// ops::max_pool_forward<float>(ctx, shape, x, y);
/// ops::max_pool_backward<float>(ctx, shape, x, y, dy, dx);
/// \endcode

#include <algorithm>
#include <limits>
#include <string>

#include <pufferfish/ops/conv/conv_shape.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The windows of a pooling operation. Lengths in pixels. Window (oy, ox) covers rows oy stride.height -
/// padding.height + 0 .. kernel.height - 1 of the image, and columns likewise. An aggregate: nothing is
/// checked until validate() is called.
struct pool_shape {
  size2 kernel{1, 1};
  size2 stride{1, 1};
  size2 padding{0, 0};
  friend bool operator==(const pool_shape&, const pool_shape&) = default;

  /// A square window with equal stride and padding in both directions. The result is not validated.
  static pool_shape square(index_t kernel, index_t stride, index_t padding = 0) {
    return {{kernel, kernel}, {stride, stride}, {padding, padding}};
  }

  /// Throws shape_error, naming `layer`, unless
  /// - kernel and stride are positive and 0 <= padding <= kernel / 2: every window holds a real pixel,
  /// - kernel height * kernel width fits in index_t, and each is at most a quarter of the largest index_t.
  void validate(const std::string& layer) const {
    // A quarter of the largest index, since output_length adds a length and two paddings.
    constexpr index_t most = std::numeric_limits<index_t>::max() / 4;
    const auto fits = [](index_t k, index_t s, index_t p) {
      return k > 0 && k <= most && s > 0 && p >= 0 && p <= k / 2;
    };
    const extents<2> window{kernel.height, kernel.width};
    if (!fits(kernel.height, stride.height, padding.height) ||
        !fits(kernel.width, stride.width, padding.width) || detail::checked_volume(window.data(), 2) < 0) {
      PUFFERFISH_THROW(shape_error(layer + ": not a pooling window: " + describe() +
                                   " (padding may be at most half the kernel)"));
    }
  }

  /// NHWC extents of the output: floor((in + 2 padding - kernel) / stride) + 1 in each direction; images and
  /// channels are unchanged. Requires a valid shape. Throws shape_error, naming `layer.describe()`, if the
  /// window is larger than the padded image, or the image has no pixels.
  template <class Layer>
  extents<4> output(const extents<4>& input, const Layer& layer) const {
    const index_t height =
        conv_shape::output_length(input[1], kernel.height, stride.height, padding.height, 1);
    const index_t width = conv_shape::output_length(input[2], kernel.width, stride.width, padding.width, 1);
    if (height <= 0 || width <= 0 || input[1] == 0 || input[2] == 0) {
      PUFFERFISH_THROW(shape_error(layer.describe() + ": input " + to_string<4>(input) +
                                   " (NHWC) is smaller than the window"));
    }
    return {input[0], height, width, input[3]};
  }

  /// Text for messages: "kernel 3x3, stride 2x2, padding 1x1".
  std::string describe() const {
    const auto pair = [](size2 s) { return std::to_string(s.height) + "x" + std::to_string(s.width); };
    return "kernel " + pair(kernel) + ", stride " + pair(stride) + ", padding " + pair(padding);
  }
};

namespace ops {
namespace detail {

/// The pixels of one window that are inside of the image: rows y0 .. y1 - 1 and columns x0 .. x1 - 1.
struct pool_window {
  index_t y0, y1, x0, x1;
  /// Number of pixels of the window inside of the image.
  index_t pixels() const { return (y1 - y0) * (x1 - x0); }
};

/// Window (oy, ox) of an input, without its padding. Not empty for a valid shape.
inline pool_window window_at(const pool_shape& shape, const extents<4>& input, index_t oy, index_t ox) {
  const index_t top = oy * shape.stride.height - shape.padding.height;
  const index_t left = ox * shape.stride.width - shape.padding.width;
  return {std::max<index_t>(top, 0), std::min(top + shape.kernel.height, input[1]),
          std::max<index_t>(left, 0), std::min(left + shape.kernel.width, input[2])};
}

/// Divisor of an average: the number of pixels of the window inside of the image, or with count_padding the
/// number of all its pixels.
inline index_t average_over(const pool_shape& shape, const pool_window& window, bool count_padding) {
  return count_padding ? shape.kernel.height * shape.kernel.width : window.pixels();
}

/// Whether `a` replaces `best` as a maximum. A NaN replaces everything, so that it stays visible.
template <class T>
bool beats(T a, T best) {
  return a > best || a != a;
}

/// Calls f(oy, ox, window) for the windows of one image.
template <class F>
void for_each_window(const pool_shape& shape, const extents<4>& input, const extents<4>& output, F&& f) {
  for (index_t oy = 0; oy < output[1]; ++oy) {
    for (index_t ox = 0; ox < output[2]; ++ox) f(oy, ox, window_at(shape, input, oy, ox));
  }
}

}  // namespace detail

namespace reference {

/// y[n,oy,ox,c] = the largest of x[n,:,:,c] in the window; padding is ignored.
template <class T>
void max_pool_forward(const pool_shape& shape, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) {
  for (index_t n = 0; n < y.extent(0); ++n) {
    ops::detail::for_each_window(shape, x.shape(), y.shape(), [&](index_t oy, index_t ox, const auto& w) {
      for (index_t c = 0; c < y.extent(3); ++c) {
        T best = x(n, w.y0, w.x0, c);
        for (index_t iy = w.y0; iy < w.y1; ++iy) {
          for (index_t ix = w.x0; ix < w.x1; ++ix) {
            if (ops::detail::beats(x(n, iy, ix, c), best)) best = x(n, iy, ix, c);
          }
        }
        y(n, oy, ox, c) = best;
      }
    });
  }
}

/// dx: each dy is added at the first pixel of its window, row by row, that equals the largest. dx is
/// overwritten. Unlike the fast form, a window with a NaN passes its gradient to some pixel.
template <class T>
void max_pool_backward(const pool_shape& shape, const tensor_view<const T, 4>& x,
                       const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) {
  for (T& value : dx.flat()) value = T{};
  for (index_t n = 0; n < dy.extent(0); ++n) {
    ops::detail::for_each_window(shape, x.shape(), dy.shape(), [&](index_t oy, index_t ox, const auto& w) {
      for (index_t c = 0; c < dy.extent(3); ++c) {
        index_t best_y = w.y0, best_x = w.x0;
        for (index_t iy = w.y0; iy < w.y1; ++iy) {
          for (index_t ix = w.x0; ix < w.x1; ++ix) {
            if (x(n, iy, ix, c) > x(n, best_y, best_x, c)) best_y = iy, best_x = ix;
          }
        }
        dx(n, best_y, best_x, c) += dy(n, oy, ox, c);
      }
    });
  }
}

/// y[n,oy,ox,c] = sum of x[n,:,:,c] in the window / average_over().
template <class T>
void average_pool_forward(const pool_shape& shape, bool count_padding, const tensor_view<const T, 4>& x,
                          const tensor_view<T, 4>& y) {
  for (index_t n = 0; n < y.extent(0); ++n) {
    ops::detail::for_each_window(shape, x.shape(), y.shape(), [&](index_t oy, index_t ox, const auto& w) {
      for (index_t c = 0; c < y.extent(3); ++c) {
        T sum{};
        for (index_t iy = w.y0; iy < w.y1; ++iy) {
          for (index_t ix = w.x0; ix < w.x1; ++ix) sum += x(n, iy, ix, c);
        }
        y(n, oy, ox, c) = sum / static_cast<T>(ops::detail::average_over(shape, w, count_padding));
      }
    });
  }
}

/// dx, overwritten: each dy, divided as in the forward pass, is added to all pixels of its window.
template <class T>
void average_pool_backward(const pool_shape& shape, bool count_padding, const tensor_view<const T, 4>& dy,
                           const tensor_view<T, 4>& dx) {
  for (T& value : dx.flat()) value = T{};
  for (index_t n = 0; n < dy.extent(0); ++n) {
    ops::detail::for_each_window(shape, dx.shape(), dy.shape(), [&](index_t oy, index_t ox, const auto& w) {
      for (index_t c = 0; c < dy.extent(3); ++c) {
        const T share = dy(n, oy, ox, c) / static_cast<T>(ops::detail::average_over(shape, w, count_padding));
        for (index_t iy = w.y0; iy < w.y1; ++iy) {
          for (index_t ix = w.x0; ix < w.x1; ++ix) dx(n, iy, ix, c) += share;
        }
      }
    });
  }
}

}  // namespace reference

namespace detail {

/// Calls f(n, oy, ox, window) for all windows; a row of windows is a task. `input` and `output`: NHWC
/// extents.
template <class F>
void for_each_output(context<device::cpu>& ctx, const pool_shape& shape, const extents<4>& input,
                     const extents<4>& output, F&& f) {
  ctx.parallel_for(output[0] * output[1], [&](index_t task, int) {
    const index_t n = task / output[1], oy = task % output[1];
    for (index_t ox = 0; ox < output[2]; ++ox) f(n, oy, ox, window_at(shape, input, oy, ox));
  });
}

/// The weight of a pixel in the average over a window: 1 / divisor (see average_over).
template <class T>
parameter_t<T> share_of(const pool_shape& shape, const pool_window& w, bool count_padding) {
  return parameter_t<T>{1} / static_cast<parameter_t<T>>(average_over(shape, w, count_padding));
}

/// Calls f(n, image) for every image n of `images`, in tasks; `image` starts as zeros, to which f adds the
/// gradient. It is a part of `result`, or, for 16-bit elements, scratch that is rounded once at the end.
template <class T, class F>
void for_each_gradient(context<device::cpu>& ctx, const extents<4>& images, T* result, F&& f) {
  using P = parameter_t<T>;
  const index_t size = images[1] * images[2] * images[3];
  scratch_frame frame(ctx.scratch());
  P* const sums = frame.take<P>(std::is_same_v<T, P> ? 0 : size * ctx.threads());
  ctx.parallel_for(images[0], [&](index_t n, int worker) {
    if constexpr (std::is_same_v<T, P>) {
      std::fill_n(result + n * size, size, P{});
      f(n, result + n * size);
    } else {
      P* const image = sums + worker * size;
      std::fill_n(image, size, P{});
      f(n, image);
      PUFFERFISH_KERNEL(widest_isa(), passes, convert<P, T>)(image, result + n * size, size);
    }
  });
}

/// Index of the first pixel of a window in image n.
inline index_t offset_of(const pool_window& w, const extents<4>& images, index_t n) {
  return ((n * images[1] + w.y0) * images[2] + w.x0) * images[3];
}
/// The size and row stride of a window, for the kernels of passes.inc.
inline window_pixels pixels_of(const pool_window& w, const extents<4>& images) {
  return {w.y1 - w.y0, w.x1 - w.x0, images[2] * images[3], images[3]};
}

}  // namespace detail

/// y = the largest value of each window (formula: reference::max_pool_forward). Padding is ignored; a NaN in
/// a window makes the result NaN. x, y: NHWC, dense, y shaped shape.output(x); y does not overlap x. On the
/// CPU a row of windows is one task.
template <class T, class Device>
void max_pool_forward(context<Device>& ctx, const pool_shape& shape, const tensor_view<const T, 4>& x,
                      const tensor_view<T, 4>& y) {
  const T* input = x.flat().data();
  T* output = y.flat().data();
  if constexpr (!is_cpu<Device>) {
    pooling_ops<Device>::max_pool_forward(ctx, shape, x.shape(), y.shape(), input, output);
  } else {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, window_maximum<T>);
    detail::for_each_output(ctx, shape, x.shape(), y.shape(),
                            [&](index_t n, index_t oy, index_t ox, const detail::pool_window& w) {
                              kernel(input + detail::offset_of(w, x.shape(), n),
                                     detail::pixels_of(w, x.shape()),
                                     output + ((n * y.extent(1) + oy) * y.extent(2) + ox) * y.extent(3));
                            });
  }
}
PUFFERFISH_SEPARATE_OPERATION(conv, max_pool_forward);

/// Gradient of max_pool_forward: dx is overwritten; each dy is added to the first largest pixel of its
/// window, found again from x and y, the output of the forward pass (formula: reference::max_pool_backward).
/// x, dx and y, dy: shapes of the forward pass, dense; dx overlaps nothing. Where y is NaN, dy is dropped. On
/// the CPU an image is one task, since windows may overlap.
template <class T, class Device>
void max_pool_backward(context<Device>& ctx, const pool_shape& shape, const tensor_view<const T, 4>& x,
                       const tensor_view<const T, 4>& y, const tensor_view<const T, 4>& dy,
                       const tensor_view<T, 4>& dx) {
  const T* input = x.flat().data();
  const T* largest = y.flat().data();
  const T* gradient = dy.flat().data();
  T* result = dx.flat().data();
  if constexpr (!is_cpu<Device>) {
    pooling_ops<Device>::max_pool_backward(ctx, shape, x.shape(), y.shape(), input, largest, gradient,
                                           result);
  } else {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, window_winner<T>);
    detail::for_each_gradient(ctx, x.shape(), result, [&](index_t n, parameter_t<T>* image) {
      detail::for_each_window(shape, x.shape(), y.shape(), [&](index_t oy, index_t ox, const auto& w) {
        const index_t at = ((n * y.extent(1) + oy) * y.extent(2) + ox) * y.extent(3);
        kernel(input + detail::offset_of(w, x.shape(), n), largest + at, gradient + at,
               detail::pixels_of(w, x.shape()), image + detail::offset_of(w, x.shape(), 0));
      });
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(conv, max_pool_backward);

/// y = the average of each window (formula: reference::average_pool_forward), summed in parameter_t<T>. The
/// divisor is the number of pixels of the window inside the image, or with count_padding kernel.height *
/// kernel.width. x, y: NHWC, dense, y shaped shape.output(x); y does not overlap x.
template <class T, class Device>
void average_pool_forward(context<Device>& ctx, const pool_shape& shape, bool count_padding,
                          const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) {
  const T* input = x.flat().data();
  T* output = y.flat().data();
  if constexpr (!is_cpu<Device>) {
    pooling_ops<Device>::average_pool_forward(ctx, shape, x.shape(), y.shape(), count_padding, input, output);
  } else {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, window_sum<T>);
    detail::for_each_output(ctx, shape, x.shape(), y.shape(),
                            [&](index_t n, index_t oy, index_t ox, const detail::pool_window& w) {
                              kernel(input + detail::offset_of(w, x.shape(), n),
                                     detail::pixels_of(w, x.shape()),
                                     detail::share_of<T>(shape, w, count_padding),
                                     output + ((n * y.extent(1) + oy) * y.extent(2) + ox) * y.extent(3));
                            });
  }
}
PUFFERFISH_SEPARATE_OPERATION(conv, average_pool_forward);

/// Gradient of average_pool_forward: dx is overwritten; each dy, divided by the divisor of its window, is
/// added to all its pixels (formula: reference::average_pool_backward). dx, dy: shapes of x and y, dense; dx
/// overlaps nothing.
template <class T, class Device>
void average_pool_backward(context<Device>& ctx, const pool_shape& shape, bool count_padding,
                           const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) {
  const T* gradient = dy.flat().data();
  T* result = dx.flat().data();
  if constexpr (!is_cpu<Device>) {
    pooling_ops<Device>::average_pool_backward(ctx, shape, dx.shape(), dy.shape(), count_padding, gradient,
                                               result);
  } else {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, window_spread<T>);
    detail::for_each_gradient(ctx, dx.shape(), result, [&](index_t n, parameter_t<T>* image) {
      detail::for_each_window(shape, dx.shape(), dy.shape(), [&](index_t oy, index_t ox, const auto& w) {
        kernel(gradient + ((n * dy.extent(1) + oy) * dy.extent(2) + ox) * dy.extent(3),
               detail::pixels_of(w, dx.shape()), detail::share_of<T>(shape, w, count_padding),
               image + detail::offset_of(w, dx.shape(), 0));
      });
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(conv, average_pool_backward);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
