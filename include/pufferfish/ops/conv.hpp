// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Two-dimensional convolution with its gradients: the plain reference and the fast CPU form.
///
/// Activations are NHWC and dense. Weights are stored [kernel height][kernel width][in][out]: the matrix of
/// conv_shape::patch() rows and out_channels columns that multiplies the patches of the input.

#include <algorithm>

#include <pufferfish/ops/conv_shape.hpp>
#include <pufferfish/ops/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace reference {

/// Calls f(output row, output column, kernel row, kernel column, input row, input column) for every tap that
/// touches a real pixel of an input of the given height and width.
template <class F>
void for_each_tap(const conv_shape& shape, const extents<4>& input, const extents<4>& output, F&& f) {
  for (index_t oy = 0; oy < output[1]; ++oy) {
    for (index_t ox = 0; ox < output[2]; ++ox) {
      for (index_t ky = 0; ky < shape.kernel.height; ++ky) {
        const index_t iy = oy * shape.stride.height - shape.padding.height + ky * shape.dilation.height;
        if (iy < 0 || iy >= input[1]) continue;
        for (index_t kx = 0; kx < shape.kernel.width; ++kx) {
          const index_t ix = ox * shape.stride.width - shape.padding.width + kx * shape.dilation.width;
          if (ix >= 0 && ix < input[2]) f(oy, ox, ky, kx, iy, ix);
        }
      }
    }
  }
}

/// y[n,oy,ox,o] = b[o] + sum over taps and i of x[n,iy,ix,i] w[o,i,ky,kx], with iy = oy stride - padding + ky
/// dilation; padded taps count as zero. w: OIHW view, any strides; bias: out_channels elements or nullptr.
template <class T>
void conv_forward(const conv_shape& shape, const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& w,
                  const T* bias, const tensor_view<T, 4>& y) {
  for (index_t n = 0; n < y.extent(0); ++n) {
    for (index_t oy = 0; oy < y.extent(1); ++oy) {
      for (index_t ox = 0; ox < y.extent(2); ++ox) {
        for (index_t o = 0; o < y.extent(3); ++o) y(n, oy, ox, o) = bias == nullptr ? T{} : bias[o];
      }
    }
    for_each_tap(shape, x.shape(), y.shape(), [&](auto oy, auto ox, auto ky, auto kx, auto iy, auto ix) {
      for (index_t o = 0; o < y.extent(3); ++o) {
        for (index_t i = 0; i < x.extent(3); ++i) y(n, oy, ox, o) += x(n, iy, ix, i) * w(o, i, ky, kx);
      }
    });
  }
}

/// dx[n,iy,ix,i] = sum over taps and o of dy[n,oy,ox,o] w[o,i,ky,kx].
template <class T>
void conv_backward_input(const conv_shape& shape, const tensor_view<const T, 4>& dy,
                         const tensor_view<const T, 4>& w, const tensor_view<T, 4>& dx) {
  for (T& value : dx.flat()) value = T{};
  for (index_t n = 0; n < dx.extent(0); ++n) {
    for_each_tap(shape, dx.shape(), dy.shape(), [&](auto oy, auto ox, auto ky, auto kx, auto iy, auto ix) {
      for (index_t o = 0; o < dy.extent(3); ++o) {
        for (index_t i = 0; i < dx.extent(3); ++i) dx(n, iy, ix, i) += dy(n, oy, ox, o) * w(o, i, ky, kx);
      }
    });
  }
}

/// dw[o,i,ky,kx] (+)= sum over n and taps of dy[n,oy,ox,o] x[n,iy,ix,i]. dw: OIHW view, any strides.
template <class T>
void conv_backward_weight(const conv_shape& shape, const tensor_view<const T, 4>& x,
                          const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dw, bool accumulate) {
  tensor<T, 4> sum(dw.shape());
  for (index_t n = 0; n < x.extent(0); ++n) {
    for_each_tap(shape, x.shape(), dy.shape(), [&](auto oy, auto ox, auto ky, auto kx, auto iy, auto ix) {
      for (index_t o = 0; o < dy.extent(3); ++o) {
        for (index_t i = 0; i < x.extent(3); ++i) sum(o, i, ky, kx) += dy(n, oy, ox, o) * x(n, iy, ix, i);
      }
    });
  }
  for (index_t o = 0; o < dw.extent(0); ++o) {
    for (index_t i = 0; i < dw.extent(1); ++i) {
      for (index_t ky = 0; ky < dw.extent(2); ++ky) {
        for (index_t kx = 0; kx < dw.extent(3); ++kx) {
          dw(o, i, ky, kx) = sum(o, i, ky, kx) + (accumulate ? dw(o, i, ky, kx) : T{});
        }
      }
    }
  }
}

}  // namespace reference

namespace detail {

/// Rows of patches, gathered tile by tile: row m holds the inputs that output pixel m sees, zeros for
/// padding.
template <class T>
struct image_patches {
  const conv_shape* shape;
  const T* image;
  extents<4> input;
  extents<4> output;

  /// As the left operand of ops/linear.hpp; *this has to outlive it.
  patch_rows<T> rows() const {
    return {this, shape->patch(), [](const void* self, index_t first, index_t count, T* buffer) {
              static_cast<const image_patches*>(self)->gather_rows(first, count, buffer);
            }};
  }

 private:
  void gather_rows(index_t first, index_t count, T* row) const {
    const index_t pixels = output[1] * output[2];
    for (index_t m = first; m < first + count; ++m, row += shape->patch()) {
      const index_t n = m / pixels, oy = m % pixels / output[2], ox = m % output[2];
      gather(image + n * input[1] * input[2] * input[3], oy, ox, row);
    }
  }

  void gather(const T* sample, index_t oy, index_t ox, T* row) const {
    const index_t channels = input[3], line = shape->kernel.width * channels;
    const index_t left = ox * shape->stride.width - shape->padding.width;
    const bool whole_line = shape->dilation.width == 1 && left >= 0 && left + shape->kernel.width <= input[2];
    for (index_t ky = 0; ky < shape->kernel.height; ++ky, row += line) {
      const index_t iy = oy * shape->stride.height - shape->padding.height + ky * shape->dilation.height;
      if (iy < 0 || iy >= input[1]) {
        std::fill_n(row, line, T{});
      } else if (whole_line) {
        std::copy_n(sample + (iy * input[2] + left) * channels, line, row);
      } else {
        gather_line(sample + iy * input[2] * channels, left, row);
      }
    }
  }

  void gather_line(const T* pixels, index_t left, T* row) const {
    const index_t channels = input[3];
    for (index_t kx = 0; kx < shape->kernel.width; ++kx, row += channels) {
      const index_t ix = left + kx * shape->dilation.width;
      if (ix >= 0 && ix < input[2]) {
        std::copy_n(pixels + ix * channels, channels, row);
      } else {
        std::fill_n(row, channels, T{});
      }
    }
  }
};

inline void check_conv(const char* what, const conv_shape& shape, const extents<4>& x, const extents<4>& y) {
  const extents<4> expected = shape.output(x, what);
  if (expected != y) {
    pufferfish::detail::throw_error<shape_error>(
        {what, ": input ", x, " gives output ", expected, ", not ", y});
  }
}

template <class T>
tensor_view<T, 2> as_rows(const tensor_view<T, 4>& view) {
  return view.reshape(extents<2>{view.extent(0) * view.extent(1) * view.extent(2), view.extent(3)});
}

template <class T>
tensor_view<const T, 2> as_matrix(const conv_shape& shape, const T* w) {
  return {w, {shape.patch(), shape.out_channels}};
}

/// The weight of the convolution that runs backward: taps in opposite order, input and output channels
/// swapped.
template <class T>
void flip_weight(const conv_shape& shape, const T* w, T* flipped) {
  const index_t taps = shape.kernel.height * shape.kernel.width, in = shape.in_channels,
                out = shape.out_channels;
  for (index_t tap = 0; tap < taps; ++tap) {
    const T* from = w + (taps - 1 - tap) * in * out;
    for (index_t o = 0; o < out; ++o) {
      for (index_t i = 0; i < in; ++i) *flipped++ = from[i * out + o];
    }
  }
}

/// dx for stride 1: a convolution of dy with the flipped weight, which gathers where the general form
/// scatters.
template <class T>
void backward_input_by_gather(context<device::cpu>& ctx, const conv_shape& shape,
                              const tensor_view<const T, 4>& dy, const T* w, const tensor_view<T, 4>& dx) {
  conv_shape back = shape;
  std::swap(back.in_channels, back.out_channels);
  back.padding = {shape.dilation.height * (shape.kernel.height - 1) - shape.padding.height,
                  shape.dilation.width * (shape.kernel.width - 1) - shape.padding.width};
  scratch_frame frame(ctx.scratch());
  T* flipped = frame.take<T>(shape.patch() * shape.out_channels);
  flip_weight(shape, w, flipped);
  const image_patches<T> patches{&back, dy.flat().data(), dy.shape(), dx.shape()};
  patches_forward<T>(ctx, patches.rows(), as_matrix<T>(back, flipped), static_cast<const T*>(nullptr),
                     as_rows(dx));
}

/// dx for any stride: patches of gradients, added to where their pixels came from. One image a task.
template <class T>
void backward_input_by_scatter(context<device::cpu>& ctx, const conv_shape& shape,
                               const tensor_view<const T, 4>& dy, const T* w, const tensor_view<T, 4>& dx) {
  const index_t depth = shape.out_channels, patch = shape.patch(), pixels = dy.extent(1) * dy.extent(2);
  const index_t image = dx.extent(1) * dx.extent(2) * dx.extent(3);
  const index_t tile = tile_rows<T>(depth, patch);
  scratch_frame frame(ctx.scratch());
  const auto operand = gemm_operand<T>::prepare(transpose(as_matrix(shape, w)),
                                                frame.take<T>(gemm_operand<T>::storage_size(depth, patch)));
  T* buffers = frame.take<T>(tile * patch * ctx.threads());
  ctx.parallel_for(dx.extent(0), [&](index_t n, int worker) {
    T* target = dx.data() + n * image;
    std::fill_n(target, image, T{});
    for (index_t first = 0; first < pixels; first += tile) {
      const index_t count = std::min(tile, pixels - first);
      const tensor_view<T, 2> gradients(buffers + worker * tile * patch, {count, patch});
      operand.multiply({dy.data() + (n * pixels + first) * depth, {count, depth}}, gradients, false);
      const T* row = gradients.data();
      for (index_t m = first; m < first + count; ++m) {
        const index_t top = m / dy.extent(2) * shape.stride.height - shape.padding.height;
        const index_t left = m % dy.extent(2) * shape.stride.width - shape.padding.width;
        for (index_t ky = 0; ky < shape.kernel.height; ++ky) {
          for (index_t kx = 0; kx < shape.kernel.width; ++kx, row += shape.in_channels) {
            const index_t iy = top + ky * shape.dilation.height, ix = left + kx * shape.dilation.width;
            if (iy < 0 || iy >= dx.extent(1) || ix < 0 || ix >= dx.extent(2)) continue;
            T* pixel = target + (iy * dx.extent(2) + ix) * shape.in_channels;
            for (index_t i = 0; i < shape.in_channels; ++i) pixel[i] += row[i];
          }
        }
      }
    }
  });
}

}  // namespace detail

/// y = x * w + b (formula: reference::conv_forward). x, y: NHWC, dense; w: HWIO storage; bias: out_channels
/// elements or nullptr; y overlaps no input. Throws shape_error if the shapes do not fit.
template <class T>
void conv_forward(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                  const T* w, const T* bias, const tensor_view<T, 4>& y) {
  detail::check_conv("conv_forward", shape, x.shape(), y.shape());
  const auto weight = detail::as_matrix(shape, w);
  if (shape.is_pointwise())
    return linear_forward<T>(ctx, detail::as_rows(x), weight, bias, detail::as_rows(y));
  const detail::image_patches<T> patches{&shape, x.flat().data(), x.shape(), y.shape()};
  detail::patches_forward<T>(ctx, patches.rows(), weight, bias, detail::as_rows(y));
}

/// dx from dy (formula: reference::conv_backward_input). Shapes, layouts and errors as conv_forward.
template <class T>
void conv_backward_input(context<device::cpu>& ctx, const conv_shape& shape,
                         const tensor_view<const T, 4>& dy, const T* w, const tensor_view<T, 4>& dx) {
  detail::check_conv("conv_backward_input", shape, dx.shape(), dy.shape());
  if (dx.empty()) return;
  const bool padding_fits = shape.padding.height <= shape.dilation.height * (shape.kernel.height - 1) &&
                            shape.padding.width <= shape.dilation.width * (shape.kernel.width - 1);
  if (shape.is_pointwise()) {
    linear_backward_input<T>(ctx, detail::as_rows(dy), detail::as_matrix(shape, w), detail::as_rows(dx));
  } else if (shape.stride == size2{1, 1} && padding_fits) {
    detail::backward_input_by_gather(ctx, shape, dy, w, dx);
  } else {
    detail::backward_input_by_scatter(ctx, shape, dy, w, dx);
  }
}

/// dw (HWIO storage) from x and dy, overwritten or added to (formula: reference::conv_backward_weight).
/// Shapes, layouts and errors as conv_forward.
template <class T>
void conv_backward_weight(context<device::cpu>& ctx, const conv_shape& shape,
                          const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& dy, T* dw,
                          bool accumulate) {
  detail::check_conv("conv_backward_weight", shape, x.shape(), dy.shape());
  const tensor_view<T, 2> gradient(dw, {shape.patch(), shape.out_channels});
  if (shape.is_pointwise()) {
    return linear_backward_weight<T>(ctx, detail::as_rows(x), detail::as_rows(dy), gradient, accumulate);
  }
  const detail::image_patches<T> patches{&shape, x.flat().data(), x.shape(), dy.shape()};
  detail::patches_backward_weight<T>(ctx, patches.rows(), detail::as_rows(dy), gradient, accumulate);
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
