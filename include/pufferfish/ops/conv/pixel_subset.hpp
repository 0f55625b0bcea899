// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: 1x1 convolutions whose stride skips pixels. The pixels that are read are copied to a
/// dense tensor; the pass is then a product of matrices of pixels x channels. The other pixels (of stride 2
/// three quarters of the image) are not copied.

#include <algorithm>

#include <pufferfish/core/context.hpp>
#include <pufferfish/ops/conv/conv_shape.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// True for 1x1 kernels without padding: a product of pixels, of every stride-th one.
inline bool is_product_of_pixels(const conv_shape& shape) {
  return shape.kernel == size2{1, 1} && shape.padding == size2{0, 0};
}
inline bool skips_pixels(const conv_shape& shape) {
  return is_product_of_pixels(shape) && shape.stride != size2{1, 1};
}

/// Copies the pixels of x that a convolution with skips_pixels() reads to `pixels`. x: N x H x W x C; pixels:
/// N x H' x W' x C with the extents of the output; both NHWC and dense, and they do not overlap.
template <class T>
void read_pixels(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                 const tensor_view<T, 4>& pixels) {
  const index_t channels = x.extent(3), lines = pixels.extent(1), columns = pixels.extent(2);
  ctx.parallel_for(pixels.extent(0), [&](index_t image, int) {
    T* to = pixels.data() + image * lines * columns * channels;
    for (index_t line = 0; line < lines; ++line) {
      const T* from = x.data() + (image * x.extent(1) + line * shape.stride.height) * x.extent(2) * channels;
      for (index_t column = 0; column < columns; ++column, to += channels) {
        std::copy_n(from + column * shape.stride.width * channels, channels, to);
      }
    }
  });
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
