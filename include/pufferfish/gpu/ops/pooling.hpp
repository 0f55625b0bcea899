// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Maximum and average pooling on a device, over windows and over whole images.
///
/// Formulas: ops/pooling/pooling.hpp, ops/pooling/global_average.hpp. Images are NHWC, dense, in memory of
/// the context's device. Outputs overlap nothing. The shapes are not checked: y has the shape that
/// pool_shape::output gives for x, dx that of x. Work is put into the context's stream; the same arguments
/// give the same bits. A failed launch throws backend_error.

#include <pufferfish/gpu/kernels/pooling/pooling.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/ops/pooling/global_average.hpp>
#include <pufferfish/ops/pooling/pooling.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// The numbers of a pooling operation for a kernel.
inline kernels::pool_windows pool_windows_of(const pool_shape& shape, const extents<4>& input,
                                             const extents<4>& output) {
  return {input[0],
          input[1],
          input[2],
          input[3],
          output[1],
          output[2],
          shape.kernel.height,
          shape.kernel.width,
          shape.stride.height,
          shape.stride.width,
          shape.padding.height,
          shape.padding.width};
}

}  // namespace gpu::detail

namespace ops {

/// y[n,oy,ox,c] = the largest x[n,:,:,c] in the window; padding does not count; a NaN in the window gives
/// NaN.
template <class T>
void max_pool_forward(context<device::gpu>& ctx, const pool_shape& shape, const tensor_view<const T, 4>& x,
                      const tensor_view<T, 4>& y) {
  gpu::kernels::max_pool_forward<T>(ctx.stream(), gpu::detail::pool_windows_of(shape, x.shape(), y.shape()),
                                    x.flat().data(), y.flat().data());
}

/// Each dy is added to the first pixel of its window, row by row, that equals y. y: the result of the forward
/// pass. Where y is NaN, dy is dropped. dx is overwritten.
template <class T>
void max_pool_backward(context<device::gpu>& ctx, const pool_shape& shape, const tensor_view<const T, 4>& x,
                       const tensor_view<const T, 4>& y, const tensor_view<const T, 4>& dy,
                       const tensor_view<T, 4>& dx) {
  gpu::kernels::max_pool_backward<T>(ctx.stream(), gpu::detail::pool_windows_of(shape, x.shape(), y.shape()),
                                     x.flat().data(), y.flat().data(), dy.flat().data(), dx.flat().data());
}

/// y = sum over the window / number of its pixels: all of them with `count_padding`, else the real ones.
template <class T>
void average_pool_forward(context<device::gpu>& ctx, const pool_shape& shape, bool count_padding,
                          const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) {
  gpu::kernels::average_pool_forward<T>(ctx.stream(),
                                        gpu::detail::pool_windows_of(shape, x.shape(), y.shape()),
                                        count_padding, x.flat().data(), y.flat().data());
}

/// Each dy, divided as in the forward pass, is added to all real pixels of its window. dx is overwritten.
template <class T>
void average_pool_backward(context<device::gpu>& ctx, const pool_shape& shape, bool count_padding,
                           const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) {
  gpu::kernels::average_pool_backward<T>(ctx.stream(),
                                         gpu::detail::pool_windows_of(shape, dx.shape(), dy.shape()),
                                         count_padding, dy.flat().data(), dx.flat().data());
}

/// y[n,0,0,c] = sum over all pixels of x[n,:,:,c] / (H W). x: N x H x W x C, H W > 0; y: N x 1 x 1 x C.
template <class T>
void global_average_forward(context<device::gpu>& ctx, const tensor_view<const T, 4>& x,
                            const tensor_view<T, 4>& y) {
  gpu::kernels::global_average_forward<T>(ctx.stream(), x.flat().data(), x.extent(0),
                                          x.extent(1) * x.extent(2), x.extent(3), y.flat().data());
}

/// dx[n,iy,ix,c] = dy[n,0,0,c] / (H W).
template <class T>
void global_average_backward(context<device::gpu>& ctx, const tensor_view<const T, 4>& dy,
                             const tensor_view<T, 4>& dx) {
  gpu::kernels::global_average_backward<T>(ctx.stream(), dy.flat().data(), dx.extent(0),
                                           dx.extent(1) * dx.extent(2), dx.extent(3), dx.flat().data());
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
