// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The geometry of convolutions for kernels: the inputs of an output along one axis, and divisions by numbers
/// that are known before a kernel starts. Plain C++, for host compilers and for CUDA.

#include <cstdint>

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

// Functions of these structs are always inlined. Otherwise they would be visible outside of a shared object,
// like the structs.

/// A convolution and the images to which it is applied. Lengths are in pixels. An image has fewer than 2^31
/// elements. out_height and out_width follow from the other numbers.
struct conv_geometry {
  index_t images;
  int in_height, in_width, in_channels;
  int out_height, out_width, out_channels;
  int kernel_height, kernel_width;
  int stride_height, stride_width;
  int padding_height, padding_width;
  int dilation_height, dilation_width;

  /// Number of input elements that one output pixel reads: kernel height * kernel width * input channels.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE int patch() const {
    return kernel_height * kernel_width * in_channels;
  }
  /// Number of pixels of all output images.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE index_t out_pixels() const {
    return images * (static_cast<index_t>(out_height) * out_width);
  }
  /// Number of pixels of all input images.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE index_t in_pixels() const {
    return images * (static_cast<index_t>(in_height) * in_width);
  }
};

/// Divides numbers 0 <= n < 2^31 by a fixed number (1 .. 2^31 - 1), by a multiplication and a shift. Source:
/// Granlund, Montgomery: "Division by invariant integers using multiplication", 1994. With 2^(shift - 32) <
/// divisor <= 2^(shift - 31), the multiplier is 2^shift / divisor rounded up; its error is too small to
/// change the quotient of a 31-bit dividend.
///
///     const divider by_width = divider::by(width);  // on the host
///     const int row = by_width.quotient(n), column = by_width.remainder(n, row);
struct divider {
  std::uint32_t divisor, multiplier, shift;

  /// The divider for a number.
  PUFFERFISH_HOST_DEVICE static PUFFERFISH_ALWAYS_INLINE divider by(int number) {
    const auto d = static_cast<std::uint32_t>(number);
    std::uint32_t shift = 31;
    while ((std::uint64_t{1} << (shift - 31)) < d) ++shift;
    return {d, static_cast<std::uint32_t>(((std::uint64_t{1} << shift) + d - 1) / d), shift};
  }
  /// n / divisor, rounded down.
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE int quotient(int n) const {
    return static_cast<int>((static_cast<std::uint64_t>(static_cast<std::uint32_t>(n)) * multiplier) >>
                            shift);
  }
  /// n % divisor, for quotient(n).
  PUFFERFISH_HOST_DEVICE PUFFERFISH_ALWAYS_INLINE int remainder(int n, int quotient) const {
    return n - quotient * static_cast<int>(divisor);
  }
};

/// One axis of a correlation. Output j is the pixel out_first + j * out_step of the result. Its tap i reads
/// the input pixel j * in_step + offset + i * offset_step, and the kernel's element kernel + i * kernel_step.
struct conv_axis {
  int inputs, outputs;
  int in_step, out_first, out_step;
  int taps, offset, offset_step;
  int kernel, kernel_step;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// The axis of the forward pass of a convolution.
PUFFERFISH_HOST_DEVICE inline conv_axis forward_axis(int inputs, int outputs, int kernel, int stride,
                                                     int padding, int dilation) {
  return {inputs, outputs, stride, 0, 1, kernel, -padding, dilation, 0, 1};
}

/// The axis of the gradient of the input, which is a correlation with inputs and outputs swapped. `pixels`:
/// extent of the convolution's input; `gradients`: extent of its output. The pixels phase, phase + stride,
/// ... use the same taps: every step-th one, from the last to the first, so that offsets increase. `phase`: 0
/// .. stride - 1. A phase may have no taps.
PUFFERFISH_HOST_DEVICE inline conv_axis backward_axis(int pixels, int gradients, int kernel, int stride,
                                                      int padding, int dilation, int phase) {
  conv_axis axis{gradients, (pixels - phase + stride - 1) / stride, 1, phase, stride, 0, 0, 0, 0, 0};
  for (int k = kernel - 1; k >= 0; --k) {
    const int reach = phase + padding - k * dilation;
    if (reach % stride != 0) continue;
    if (axis.taps == 0) {
      axis.offset = reach / stride;
      axis.kernel = k;
    } else if (axis.taps == 1) {
      axis.offset_step = reach / stride - axis.offset;
      axis.kernel_step = k - axis.kernel;
    }
    ++axis.taps;
  }
  return axis;
}

/// The vertical axis (rows of pixels) of the forward convolution of a geometry.
PUFFERFISH_HOST_DEVICE inline conv_axis forward_rows(const conv_geometry& g) {
  return forward_axis(g.in_height, g.out_height, g.kernel_height, g.stride_height, g.padding_height,
                      g.dilation_height);
}
/// The horizontal axis (columns of pixels) of the forward convolution of a geometry.
PUFFERFISH_HOST_DEVICE inline conv_axis forward_columns(const conv_geometry& g) {
  return forward_axis(g.in_width, g.out_width, g.kernel_width, g.stride_width, g.padding_width,
                      g.dilation_width);
}
/// The vertical axis of the gradient with respect to the input, for the input rows phase, phase +
/// stride_height, ...; 0 <= phase < stride_height.
PUFFERFISH_HOST_DEVICE inline conv_axis backward_rows(const conv_geometry& g, int phase) {
  return backward_axis(g.in_height, g.out_height, g.kernel_height, g.stride_height, g.padding_height,
                       g.dilation_height, phase);
}
/// The horizontal axis of the gradient with respect to the input, for the input columns phase, phase +
/// stride_width, ...; 0 <= phase < stride_width.
PUFFERFISH_HOST_DEVICE inline conv_axis backward_columns(const conv_geometry& g, int phase) {
  return backward_axis(g.in_width, g.out_width, g.kernel_width, g.stride_width, g.padding_width,
                       g.dilation_width, phase);
}

PUFFERFISH_KERNELS_END
