// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of maximum and average pooling over windows, and of averages over whole images, in NHWC layout.
/// Formulas: ops/pooling/pooling.hpp and ops/pooling/global_average.hpp. All arrays are dense and in device
/// memory; results overlap no other array. Each launcher throws backend_error if its launch fails.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// The windows of a pooling over a batch of images; lengths in pixels.
struct pool_windows {
  index_t images, height, width, channels;  ///< extents of the input
  index_t out_height, out_width;
  index_t kernel_height, kernel_width, stride_height, stride_width, pad_height, pad_width;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// y = the largest element of each window, NaN if the window has a NaN. x: images x height x width x
/// channels; y: images x out_height x out_width x channels.
template <class T>
void max_pool_forward(cudaStream_t stream, const pool_windows& w, const T* x, T* y);
/// dx = the sum of dy over the windows in which the pixel is the first element, row by row, that equals y. dx
/// has the shape of x, dy that of y.
template <class T>
void max_pool_backward(cudaStream_t stream, const pool_windows& w, const T* x, const T* y, const T* dy,
                       T* dx);
/// y = the average of each window: the sum of its pixels inside of the image, divided by their number or,
/// with count_padding, by kernel_height * kernel_width.
template <class T>
void average_pool_forward(cudaStream_t stream, const pool_windows& w, bool count_padding, const T* x, T* y);
/// dx = the sum of dy / divisor over the windows that contain the pixel, with the divisor of
/// average_pool_forward.
template <class T>
void average_pool_backward(cudaStream_t stream, const pool_windows& w, bool count_padding, const T* dy,
                           T* dx);

/// y_nc = sum_p x_npc / pixels, summed in double, for images of `pixels` > 0 pixels. x: images x pixels x
/// channels; y: images x channels.
template <class T>
void global_average_forward(cudaStream_t stream, const T* x, index_t images, index_t pixels, index_t channels,
                            T* y);
/// dx_npc = dy_nc / pixels. dx: images x pixels x channels; dy: images x channels.
template <class T>
void global_average_backward(cudaStream_t stream, const T* dy, index_t images, index_t pixels,
                             index_t channels, T* dx);

PUFFERFISH_KERNELS_END
