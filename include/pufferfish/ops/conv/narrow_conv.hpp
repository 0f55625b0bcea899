// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: convolutions of 16-bit elements on the CPU by the float kernels. Blocks of images are widened to
/// float in scratch memory, convolved in float, and rounded once. The blocks depend on shapes alone, so the
/// results are bitwise equal for any number of threads.

#include <algorithm>

#include <pufferfish/ops/conv/conv_shape.hpp>
#include <pufferfish/ops/linear/narrow_product.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// The cut of two batches x and y with equal numbers of images into blocks of images, so that the float
/// copies of a block are small.
struct image_blocks {
  index_t images, a, b, count;  ///< images; elements of an image of x and of y; images of a block

  image_blocks(const extents<4>& x, const extents<4>& y)
      : images(x[0]),
        a(x[1] * x[2] * x[3]),
        b(y[1] * y[2] * y[3]),
        count(std::min(images, widened_rows(a + b))) {}

  /// Calls f(first, number) for each block in order: the block has images first .. first + number - 1.
  template <class F>
  void for_each(F&& f) const {
    for (index_t first = 0; first < images; first += count) f(first, std::min(count, images - first));
  }
};

/// `shape` with the number of images replaced.
inline extents<4> with_images(extents<4> shape, index_t images) {
  shape[0] = images;
  return shape;
}

/// y = x * w + bias (bias may be nullptr), computed in float and rounded once. convolve(x, w, bias, y)
/// computes the float convolution of a block of images. `moments`, unless nullptr, receives the moments of
/// the rounded y.
template <class T, class Convolve>
void narrow_conv_forward(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                         const T* w, const T* bias, const tensor_view<T, 4>& y, moment_parts<T>* moments,
                         Convolve&& convolve) {
  const tensor_view<T, 2> rows = y.reshape(extents<2>{y.extent(0) * y.extent(1) * y.extent(2), y.extent(3)});
  if (moments != nullptr) start_row_moments(rows, *moments);
  scratch_frame frame(ctx.scratch());
  const image_blocks blocks(x.shape(), y.shape());
  const float* const weight = widened(ctx, frame, w, shape.patch() * shape.out_channels);
  const float* const wide_bias = widened(ctx, frame, bias, shape.out_channels);
  float *const from = frame.take<float>(blocks.count * blocks.a), *const to = frame.take<float>(blocks.count *
                                                                                                blocks.b);
  blocks.for_each([&](index_t first, index_t count) {
    convert(ctx, x.data() + first * blocks.a, from, count * blocks.a);
    convolve(tensor_view<const float, 4>(from, with_images(x.shape(), count)), weight, wide_bias,
             tensor_view<float, 4>(to, with_images(y.shape(), count)));
    convert(ctx, to, y.data() + first * blocks.b, count * blocks.b);
  });
  if (moments != nullptr) add_row_moments(ctx, rows, *moments);
}

/// dx = the gradient of the input, or dx += the gradient with `add`, computed in float and rounded once.
/// convolve(dy, w, dx) computes the float gradient of a block of images; if `add` is set, convolve must add
/// the gradient to its dx, which holds the widened old values.
template <class T, class Convolve>
void narrow_conv_backward_input(context<device::cpu>& ctx, const conv_shape& shape,
                                const tensor_view<const T, 4>& dy, const T* w, const tensor_view<T, 4>& dx,
                                bool add, Convolve&& convolve) {
  scratch_frame frame(ctx.scratch());
  const image_blocks blocks(dy.shape(), dx.shape());
  const float* const weight = widened(ctx, frame, w, shape.patch() * shape.out_channels);
  float *const from = frame.take<float>(blocks.count * blocks.a), *const to = frame.take<float>(blocks.count *
                                                                                                blocks.b);
  blocks.for_each([&](index_t first, index_t count) {
    T* const result = dx.data() + first * blocks.b;
    convert(ctx, dy.data() + first * blocks.a, from, count * blocks.a);
    if (add) convert(ctx, result, to, count * blocks.b);
    convolve(tensor_view<const float, 4>(from, with_images(dy.shape(), count)), weight,
             tensor_view<float, 4>(to, with_images(dx.shape(), count)));
    convert(ctx, to, result, count * blocks.b);
  });
}

/// Calls convolve(x, dy, first) for each block of images of x and dy in float, in order; `first` is true for
/// the first block. A batch without images gives one call with empty tensors.
template <class T, class Convolve>
void narrow_conv_backward_weight(context<device::cpu>& ctx, const tensor_view<const T, 4>& x,
                                 const tensor_view<const T, 4>& dy, Convolve&& convolve) {
  scratch_frame frame(ctx.scratch());
  const image_blocks blocks(x.shape(), dy.shape());
  float *const left = frame.take<float>(blocks.count * blocks.a), *const right = frame.take<float>(
                                                                      blocks.count * blocks.b);
  const auto run = [&](index_t first, index_t count) {
    convert(ctx, x.data() + first * blocks.a, left, count * blocks.a);
    convert(ctx, dy.data() + first * blocks.b, right, count * blocks.b);
    convolve(tensor_view<const float, 4>(left, with_images(x.shape(), count)),
             tensor_view<const float, 4>(right, with_images(dy.shape(), count)), first == 0);
  };
  blocks.images == 0 ? run(0, 0) : blocks.for_each(run);
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
