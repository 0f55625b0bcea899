// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: 1x1 convolutions without padding whose stride skips pixels. The pixels that the convolution
/// reads are copied to a dense tensor, and the pass is then a matrix product of pixels x channels. All other
/// pixels, with stride 2 three quarters of the image, are not copied.

#include <algorithm>

#include <pufferfish/core/context.hpp>
#include <pufferfish/ops/conv/conv_shape.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// True for a 1x1 kernel without padding: the convolution is a matrix product of every stride-th pixel.
inline bool is_product_of_pixels(const conv_shape& shape) {
  return shape.kernel == size2{1, 1} && shape.padding == size2{0, 0};
}
/// True for a 1x1 kernel without padding whose stride is not 1, so that some pixels are not read.
inline bool skips_pixels(const conv_shape& shape) {
  return is_product_of_pixels(shape) && shape.stride != size2{1, 1};
}

/// Copies the pixels of x that a convolution with skips_pixels() reads to `pixels`. x: N x H x W x C; pixels:
/// N x H' x W' x C, where H' x W' are the extents of the output. Both are NHWC and dense, and must not
/// overlap.
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
