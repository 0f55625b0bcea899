// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: forward convolution with few output pixels and a large weight, such as the last layers of a
/// network that classifies one image. Reading the weight from memory takes most of the time. The patches of
/// the input are therefore copied (im2col), and the weight is read in place, once and from its first to its
/// last element.

#include <algorithm>

#include <pufferfish/core/arena.hpp>
#include <pufferfish/core/context.hpp>
#include <pufferfish/linalg/gemm/micro_kernels.hpp>
#include <pufferfish/ops/conv/conv_blocks.hpp>
#include <pufferfish/ops/conv/conv_shape.hpp>
#include <pufferfish/ops/conv/tap_axis.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// True if few_pixels_forward can compute a convolution of one group with output extents y: output channels
/// in whole vectors, and at most 256 output pixels, so that the copy of the patches stays small.
template <class T>
bool few_pixels_fit(const conv_shape& shape, const extents<4>& y, const kernel_table<T>& kernels) {
  return shape.out_channels % kernels.lanes == 0 && y[0] * y[1] * y[2] <= 256;
}

/// True if reading the weight of a convolution takes longer than computing with it: few output pixels (`y`:
/// output extents), at least 16 KiB of weight for each of them, and output channels in whole vectors. Padding
/// is multiplied like pixels, so a batch of tiny images does not qualify. Measured on a Zen 5 with AVX-512,
/// relative to the time of direct sums: 0.63 for 512 -> 512 channels at 4x4 pixels, 0.73 at 2x2, and 0.85 for
/// 256 -> 256 at 8x8.
template <class T>
bool few_pixels_pay(const conv_shape& shape, const extents<4>& y, const kernel_table<T>& kernels) {
  constexpr index_t fewest_bytes = 16 << 10, most_pixels = 16, most_of_one_image = 64;
  const index_t pixels = y[0] * y[1] * y[2];
  const index_t bytes = shape.patch() * shape.out_channels * static_cast<index_t>(sizeof(T));
  return pixels <= (y[0] == 1 ? most_of_one_image : most_pixels) && bytes >= fewest_bytes * pixels &&
         shape.out_channels % kernels.lanes == 0;
}

/// Copies the patches of x to `to` (im2col): one row for each output pixel, with patch() elements in the
/// order of the weight's rows and zeros for padding. y: output extents; `to`: pixels of y times patch()
/// elements.
template <class T>
void copy_patches(const conv_shape& shape, const tensor_view<const T, 4>& x, const extents<4>& y, T* to) {
  const index_t channels = x.extent(3);
  const tap_axis rows = forward_axis(x.extent(1), y[1], shape.kernel.height, shape.stride.height,
                                     shape.padding.height, shape.dilation.height);
  const tap_axis columns = forward_axis(x.extent(2), y[2], shape.kernel.width, shape.stride.width,
                                        shape.padding.width, shape.dilation.width);
  for (index_t pixel = 0; pixel < y[0] * y[1] * y[2]; ++pixel) {
    const index_t column = pixel % y[2], row = pixel / y[2] % y[1], image = pixel / y[2] / y[1];
    for (index_t i = 0; i < rows.taps; ++i) {
      for (index_t j = 0; j < columns.taps; ++j, to += channels) {
        if (!rows.meets(i, row) || !columns.meets(j, column)) {
          std::fill_n(to, channels, T{});
          continue;
        }
        const index_t line = row * rows.in_step + rows.tap_offset(i);
        const index_t place = column * columns.in_step + columns.tap_offset(j);
        std::copy_n(x.data() + ((image * x.extent(1) + line) * x.extent(2) + place) * channels, channels, to);
      }
    }
  }
}

/// One block, along the depth, of a matrix product with few rows: c = a w, or c += a w with `accumulate`. a:
/// rows x steps, row stride a_stride; w: steps x columns, row stride w_stride, which is the row stride of c,
/// too. While a panel of columns is computed, the same columns of the next `steps` rows of w are prefetched.
template <class T>
void multiply_few_rows(const kernel_table<T>& kernels, const T* a, index_t a_stride, index_t rows, const T* w,
                       index_t w_stride, index_t steps, T* c, index_t columns, bool accumulate) {
  constexpr index_t size = static_cast<index_t>(sizeof(T)), line = 64;
  for (index_t column = 0; column < columns; column += kernels.widest_adjacent * kernels.lanes) {
    const index_t vectors = std::min<index_t>(kernels.widest_adjacent, (columns - column) / kernels.lanes);
    const block_tap<T> tap{a, w + column};
    block_arguments<T> block{&tap, &tap + 1,   steps,           a_stride * size, size, w_stride * size,
                             0,    c + column, w_stride * size, accumulate};
    block.prefetch_step = w_stride * size;
    const T* const soon = w + column + steps * w_stride;
    index_t fetched = 0;  // offset of the next prefetch in each of the following rows, in bytes
    const auto* kernel = kernels.strided[vectors - 1].by_rows;
    for (index_t left = rows; left > 0; ++kernel) {
      for (; left >= kernel->rows; left -= kernel->rows) {
        block.prefetch = moved(soon, fetched);
        fetched = (fetched + line) % (vectors * kernels.lanes * size);
        kernel->run(block);
        block.left_shift += kernel->rows * block.row_step;
        block.result = moved(block.result, kernel->rows * block.result_step);
      }
    }
  }
}

/// y = x * w for a convolution of one group for which few_pixels_fit() is true. Each sum is computed in the
/// order of the weight's rows, so the result does not depend on the number of threads. y is overwritten.
template <class T>
void few_pixels_forward(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                        const T* w, const tensor_view<T, 4>& y, const kernel_table<T>& kernels) {
  constexpr index_t block = 128;
  const index_t pixels = y.extent(0) * y.extent(1) * y.extent(2), depth = shape.patch(), out = y.extent(3);
  scratch_frame frame(ctx.scratch());
  T* const patches = frame.take<T>(pixels * depth);
  copy_patches<T>(shape, x, y.shape(), patches);
  // Each thread computes one piece of the output channels, as wide as possible, since long rows of the weight
  // are read faster than short ones.
  const index_t vectors = out / kernels.lanes, pieces = std::min<index_t>(ctx.threads(), vectors);
  ctx.parallel_for(pieces, [&](index_t piece, int) {
    const index_t begin = vectors * piece / pieces * kernels.lanes;
    const index_t columns = vectors * (piece + 1) / pieces * kernels.lanes - begin;
    for (index_t k = 0; k < depth; k += block) {
      multiply_few_rows(kernels, patches + k, depth, pixels, w + k * out + begin, out,
                        std::min(block, depth - k), y.data() + begin, columns, k > 0);
    }
  });
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
