// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Convolution and its gradients as plain loops, for any weight layout and number of groups. Tests compare
/// the fast operations of conv.hpp with these functions. The extents of all tensors must fit the shape
/// (conv_shape::output); the functions do not check them. Results must not overlap inputs.

#include <pufferfish/core/separate.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/ops/conv/conv_shape.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::reference {

/// Calls f(output row, output column, kernel row, kernel column, input row, input column) for every tap of
/// every output pixel of an image that reads a pixel of the input, not padding. `input`, `output`: NHWC
/// extents.
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

/// First input channel of the group of output channel `o`: 0 for one group, o for a depthwise convolution.
inline index_t first_input(const conv_shape& shape, index_t o) {
  return o / shape.group_outputs() * shape.group_inputs();
}

/// Forward pass: y[n,oy,ox,o] = b[o] + sum over ky, kx and i of x[n,iy,ix,first(o)+i] w[o,i,ky,kx], with iy =
/// oy stride - padding + ky dilation and ix likewise. first(o) is the first input channel of the group of o
/// (0 for one group), and i counts the in / groups channels of that group. Padding counts as zeros. x, y:
/// NHWC; w: OIHW view [out][in / groups][height][width] with any strides; bias: out_channels elements, or
/// nullptr for no bias. y is overwritten.
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
        const index_t first = first_input(shape, o);
        for (index_t i = 0; i < shape.group_inputs(); ++i) {
          y(n, oy, ox, o) += x(n, iy, ix, first + i) * w(o, i, ky, kx);
        }
      }
    });
  }
}
PUFFERFISH_SEPARATE_FUNCTION(conv, conv_forward);

/// Gradient of the input: dx[n,iy,ix,first(o)+i] = sum over oy, ox, ky, kx and o of dy[n,oy,ox,o]
/// w[o,i,ky,kx], with names as in conv_forward. dx: dense NHWC, overwritten; w: OIHW view with any strides.
template <class T>
void conv_backward_input(const conv_shape& shape, const tensor_view<const T, 4>& dy,
                         const tensor_view<const T, 4>& w, const tensor_view<T, 4>& dx) {
  for (T& value : dx.flat()) value = T{};
  for (index_t n = 0; n < dx.extent(0); ++n) {
    for_each_tap(shape, dx.shape(), dy.shape(), [&](auto oy, auto ox, auto ky, auto kx, auto iy, auto ix) {
      for (index_t o = 0; o < dy.extent(3); ++o) {
        const index_t first = first_input(shape, o);
        for (index_t i = 0; i < shape.group_inputs(); ++i) {
          dx(n, iy, ix, first + i) += dy(n, oy, ox, o) * w(o, i, ky, kx);
        }
      }
    });
  }
}
PUFFERFISH_SEPARATE_FUNCTION(conv, conv_backward_input);

/// Gradient of the weight: dw[o,i,ky,kx] = sum over n, oy and ox of dy[n,oy,ox,o] x[n,iy,ix,first(o)+i], or
/// with `accumulate` dw += this sum, with names as in conv_forward. dw: OIHW view with any strides.
template <class T>
void conv_backward_weight(const conv_shape& shape, const tensor_view<const T, 4>& x,
                          const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dw, bool accumulate) {
  tensor<T, 4> sum(dw.shape());
  for (index_t n = 0; n < x.extent(0); ++n) {
    for_each_tap(shape, x.shape(), dy.shape(), [&](auto oy, auto ox, auto ky, auto kx, auto iy, auto ix) {
      for (index_t o = 0; o < dy.extent(3); ++o) {
        const index_t first = first_input(shape, o);
        for (index_t i = 0; i < shape.group_inputs(); ++i) {
          sum(o, i, ky, kx) += dy(n, oy, ox, o) * x(n, iy, ix, first + i);
        }
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
PUFFERFISH_SEPARATE_FUNCTION(conv, conv_backward_weight);

}  // namespace ops::reference
PUFFERFISH_NAMESPACE_END
