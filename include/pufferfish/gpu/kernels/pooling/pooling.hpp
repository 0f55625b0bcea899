// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of maximum and average pooling over windows and whole NHWC images. Formulas:
/// ops/pooling/pooling.hpp, ops/pooling/global_average.hpp. All arrays are dense, in device memory; results
/// overlap nothing.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Windows over a batch of images; lengths in pixels.
struct pool_windows {
  index_t images, height, width, channels;  ///< of the input
  index_t out_height, out_width;
  index_t kernel_height, kernel_width, stride_height, stride_width, pad_height, pad_width;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// x: images x height x width x channels, y: images x out_height x out_width x channels; the same shapes for
/// dx and dy. Four passes: y = the largest of each window (a NaN if it has one); dx = the sum of dy over the
/// windows whose first largest element, equal to y, is the pixel; y = the average of each window; dx = the
/// sum of dy / (number of averaged pixels) over the windows that contain the pixel.
template <class T>
void max_pool_forward(cudaStream_t stream, const pool_windows& w, const T* x, T* y);
template <class T>
void max_pool_backward(cudaStream_t stream, const pool_windows& w, const T* x, const T* y, const T* dy,
                       T* dx);
template <class T>
void average_pool_forward(cudaStream_t stream, const pool_windows& w, bool count_padding, const T* x, T* y);
template <class T>
void average_pool_backward(cudaStream_t stream, const pool_windows& w, bool count_padding, const T* dy,
                           T* dx);

/// Images of `pixels` pixels (more than 0) each. y_nc = sum_p x_npc / pixels, in double; dx_npc =
/// dy_nc / pixels.
template <class T>
void global_average_forward(cudaStream_t stream, const T* x, index_t images, index_t pixels, index_t channels,
                            T* y);
template <class T>
void global_average_backward(cudaStream_t stream, const T* dy, index_t images, index_t pixels,
                             index_t channels, T* dx);

PUFFERFISH_KERNELS_END
