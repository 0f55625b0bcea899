// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The operations of ops/pooling/ on a device, one kernel each. Operands are dense and in memory of the
/// context's device; the functions launch kernels in the context's stream and do not wait. Equal arguments
/// give equal bits. A failed launch throws backend_error.

#include <pufferfish/gpu/kernels/pooling/pooling.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/ops/pooling/global_average.hpp>
#include <pufferfish/ops/pooling/pooling.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Sizes of windows, strides, padding and images as kernel arguments.
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

/// Device implementation of the functions of ops/pooling/, where formulas and shapes are described. `input`
/// and `output`: NHWC extents of x and y.
template <>
struct pooling_ops<device::gpu> {
  /// y = the largest element of each window; NaN if the window has one.
  template <class T>
  static void max_pool_forward(context<device::gpu>& ctx, const pool_shape& shape, const extents<4>& input,
                               const extents<4>& output, const T* x, T* y) {
    gpu::kernels::max_pool_forward<T>(ctx.stream(), gpu::detail::pool_windows_of(shape, input, output), x, y);
  }

  /// dx = the sum of dy over the windows whose first largest element, equal to y, is the pixel.
  template <class T>
  static void max_pool_backward(context<device::gpu>& ctx, const pool_shape& shape, const extents<4>& input,
                                const extents<4>& output, const T* x, const T* y, const T* dy, T* dx) {
    gpu::kernels::max_pool_backward<T>(ctx.stream(), gpu::detail::pool_windows_of(shape, input, output), x, y,
                                       dy, dx);
  }

  /// y = the average of each window.
  template <class T>
  static void average_pool_forward(context<device::gpu>& ctx, const pool_shape& shape,
                                   const extents<4>& input, const extents<4>& output, bool count_padding,
                                   const T* x, T* y) {
    gpu::kernels::average_pool_forward<T>(ctx.stream(), gpu::detail::pool_windows_of(shape, input, output),
                                          count_padding, x, y);
  }

  /// dx = the sum of dy / divisor over the windows that contain the pixel.
  template <class T>
  static void average_pool_backward(context<device::gpu>& ctx, const pool_shape& shape,
                                    const extents<4>& input, const extents<4>& output, bool count_padding,
                                    const T* dy, T* dx) {
    gpu::kernels::average_pool_backward<T>(ctx.stream(), gpu::detail::pool_windows_of(shape, input, output),
                                           count_padding, dy, dx);
  }

  /// y = the average over all `pixels` pixels of each image.
  template <class T>
  static void global_average_forward(context<device::gpu>& ctx, const T* x, index_t images, index_t pixels,
                                     index_t channels, T* y) {
    gpu::kernels::global_average_forward<T>(ctx.stream(), x, images, pixels, channels, y);
  }

  /// dx = dy / pixels for each pixel.
  template <class T>
  static void global_average_backward(context<device::gpu>& ctx, const T* dy, index_t images, index_t pixels,
                                      index_t channels, T* dx) {
    gpu::kernels::global_average_backward<T>(ctx.stream(), dy, images, pixels, channels, dx);
  }
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END
