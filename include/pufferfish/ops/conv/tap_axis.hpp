// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: which input pixels each output pixel of a convolution depends on, for one axis (height or
/// width), in the forward pass and in the gradient of the input.
///
/// Example: kernel length 3, stride 2 and padding 1 over 8 inputs, which give 4 outputs. Forward: output j
/// reads inputs 2 j - 1, 2 j and 2 j + 1, multiplied by kernel elements 0, 1 and 2. Gradient of the input:
/// even and odd pixels depend on different kernel elements and form two phases.
///
/// \code
/// forward_axis(8, 4, 3, 2, 1, 1);      // in_step 2, taps 3, offsets -1, 0, 1 by kernel elements 0, 1, 2
/// backward_axis(8, 4, 3, 2, 1, 1, 0);  // pixel 2 j: one tap, gradient j by kernel element 1
/// backward_axis(8, 4, 3, 2, 1, 1, 1);  // pixel 2 j + 1: gradients j and j + 1 by kernel elements 2 and 0
/// \endcode

#include <algorithm>

#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// The positions begin .. end - 1.
struct range {
  index_t begin;
  index_t end;
  index_t length() const { return end - begin; }
  bool contains(const range& other) const { return begin <= other.begin && other.end <= end; }
};

/// One axis of a correlation. A tap is a pair of an input pixel and the kernel element that multiplies it.
/// Tap i of output j is input j * in_step + offset + i * offset_step with kernel element kernel + i *
/// kernel_step. Output j is stored at position out_first + j * out_step of the result.
struct tap_axis {
  index_t inputs, outputs;  ///< number of input pixels, number of outputs that the correlation computes
  index_t in_step, out_first, out_step;  ///< in pixels
  index_t taps, offset, offset_step;     ///< number of taps of an output; pixels
  index_t kernel, kernel_step;           ///< number of a kernel element, and its change from tap to tap

  /// Offset of a tap: its input pixel for output 0.
  index_t tap_offset(index_t tap) const { return offset + tap * offset_step; }
  /// Kernel element of a tap.
  index_t tap_kernel(index_t tap) const { return kernel + tap * kernel_step; }

  /// True if tap `tap` of output `output` reads a pixel of the image, not padding.
  bool meets(index_t tap, index_t output) const {
    const index_t input = output * in_step + tap_offset(tap);
    return input >= 0 && input < inputs;
  }

  /// The outputs whose tap `tap` reads a pixel of the image, not padding. The function divides and is too
  /// slow for inner loops.
  range valid(index_t tap) const {
    const index_t at = tap_offset(tap);
    const index_t begin = at >= 0 ? 0 : (-at + in_step - 1) / in_step;
    const index_t end = at >= inputs ? 0 : std::min(outputs, (inputs - 1 - at) / in_step + 1);
    return {std::min(begin, std::max<index_t>(end, 0)), std::max<index_t>(end, 0)};
  }
};

/// The axis of a forward pass: tap i of output j reads input j stride - padding + i dilation with kernel
/// element i.
inline tap_axis forward_axis(index_t inputs, index_t outputs, index_t kernel, index_t stride, index_t padding,
                             index_t dilation) {
  return {inputs, outputs, stride, 0, 1, kernel, -padding, dilation, 0, 1};
}

/// The axis of the gradient of the input for one phase: the input pixels phase, phase + stride, ... All
/// pixels of a phase depend on the same kernel elements. The correlation reads the gradients of the outputs
/// and computes those of the pixels: `gradients` is the number of outputs, `pixels` the number of input
/// pixels of the convolution. Taps are ordered from the last kernel element to the first, so that offsets
/// ascend.
inline tap_axis backward_axis(index_t pixels, index_t gradients, index_t kernel, index_t stride,
                              index_t padding, index_t dilation, index_t phase) {
  tap_axis axis{gradients, (pixels - phase + stride - 1) / stride, 1, phase, stride, 0, 0, 0, 0, 0};
  for (index_t k = kernel - 1; k >= 0; --k) {
    const index_t reach = phase + padding - k * dilation;
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

/// True if the segment kernels apply to the columns of a correlation: three adjacent taps, stride 1, and at
/// most one pixel of padding on either side.
inline bool segments_fit(const tap_axis& columns) {
  return columns.taps == 3 && columns.in_step == 1 && columns.out_step == 1 && columns.offset_step == 1 &&
         columns.offset >= -1 && columns.outputs + columns.tap_offset(2) <= columns.inputs + 1;
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
