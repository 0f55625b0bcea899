// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The average over all pixels of an image (global average pooling), with its gradient.
///
/// \code
/// tensor<float, 4> x({8, 7, 7, 512}), y({8, 1, 1, 512});
/// ops::global_average_forward<float>(ctx, x, y);
/// ops::global_average_backward<float>(ctx, dy, dx);
/// \endcode

#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace reference {

/// y[n,0,0,c] = sum over all pixels of x[n,:,:,c] / (H W), summed in double.
template <class T>
void global_average_forward(const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) {
  for (index_t n = 0; n < x.extent(0); ++n) {
    for (index_t c = 0; c < x.extent(3); ++c) {
      double sum = 0.0;
      for (index_t iy = 0; iy < x.extent(1); ++iy) {
        for (index_t ix = 0; ix < x.extent(2); ++ix) sum += static_cast<double>(x(n, iy, ix, c));
      }
      y(n, 0, 0, c) = static_cast<T>(sum / static_cast<double>(x.extent(1) * x.extent(2)));
    }
  }
}

/// dx[n,iy,ix,c] = dy[n,0,0,c] / (H W).
template <class T>
void global_average_backward(const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) {
  for (index_t n = 0; n < dx.extent(0); ++n) {
    for (index_t iy = 0; iy < dx.extent(1); ++iy) {
      for (index_t ix = 0; ix < dx.extent(2); ++ix) {
        for (index_t c = 0; c < dx.extent(3); ++c) {
          dx(n, iy, ix, c) = dy(n, 0, 0, c) / static_cast<T>(dx.extent(1) * dx.extent(2));
        }
      }
    }
  }
}

}  // namespace reference

/// The average over all pixels (formula: reference::global_average_forward), summed in double and rounded
/// once. x: N x H x W x C, y: N x 1 x 1 x C, dense; H W > 0 (else every y is a NaN). y does not overlap x.
/// The shapes are not checked; a view that is not dense throws shape_error. On the CPU an image is one task.
template <class T, class Device>
void global_average_forward(context<Device>& ctx, const tensor_view<const T, 4>& x,
                            const tensor_view<T, 4>& y) {
  const index_t pixels = x.extent(1) * x.extent(2), channels = x.extent(3);
  const T* input = x.flat().data();
  T* output = y.flat().data();
  if constexpr (!is_cpu<Device>) {
    pooling_ops<Device>::global_average_forward(ctx, input, x.extent(0), pixels, channels, output);
  } else {
    scratch_frame frame(ctx.scratch());
    double* buffers = frame.take<double>(channels * ctx.threads());
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, column_sums<T>);
    ctx.parallel_for(x.extent(0), [&](index_t n, int worker) {
      double* sum = buffers + worker * channels;
      std::fill_n(sum, channels, 0.0);
      kernel(input + n * pixels * channels, pixels, channels, channels, sum);
      for (index_t c = 0; c < channels; ++c) {
        output[n * channels + c] = scalar_cast<T>(sum[c] / static_cast<double>(pixels));
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(conv, global_average_forward);

/// The gradient of global_average_forward (formula: reference::global_average_backward). dy: N x 1 x 1 x C,
/// dx: N x H x W x C, dense, overwritten; dx overlaps nothing. The shapes are not checked; a view that is not
/// dense throws shape_error.
template <class T, class Device>
void global_average_backward(context<Device>& ctx, const tensor_view<const T, 4>& dy,
                             const tensor_view<T, 4>& dx) {
  const index_t pixels = dx.extent(1) * dx.extent(2), channels = dx.extent(3);
  const T* gradient = dy.flat().data();
  T* result = dx.flat().data();
  if constexpr (!is_cpu<Device>) {
    pooling_ops<Device>::global_average_backward(ctx, gradient, dx.extent(0), pixels, channels, result);
  } else {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, scale<T>);
    ctx.parallel_for(dx.extent(0), [&](index_t n, int) {
      T* image = result + n * pixels * channels;
      if (pixels > 0)
        kernel(parameter_t<T>{1} / static_cast<parameter_t<T>>(pixels), gradient + n * channels, image,
               channels);
      for (index_t pixel = 1; pixel < pixels; ++pixel) {
        std::copy_n(image, channels, image + pixel * channels);
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(conv, global_average_backward);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
