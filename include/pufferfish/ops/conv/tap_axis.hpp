// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: which inputs each output of a convolution depends on, one axis at a time, forward and backward.
///
/// Example: a kernel of 3, stride 2, padding 1 over 8 inputs, which gives 4 outputs. Forward: output j reads
/// inputs 2 j - 1, 2 j and 2 j + 1 by kernel elements 0, 1 and 2. Backward: there are two phases of pixels.
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

/// A range of positions.
struct range {
  index_t begin;
  index_t end;
  index_t length() const { return end - begin; }
};

/// One axis of a correlation. Tap i of output j multiplies input j * in_step + offset + i * offset_step
/// by kernel element kernel + i * kernel_step. Output j is stored at position out_first + j * out_step.
struct tap_axis {
  index_t inputs, outputs;
  index_t in_step, out_first, out_step;
  index_t taps, offset, offset_step;
  index_t kernel, kernel_step;

  index_t tap_offset(index_t tap) const { return offset + tap * offset_step; }
  index_t tap_kernel(index_t tap) const { return kernel + tap * kernel_step; }

  /// True if the tap of this output reads a pixel of the image, not padding.
  bool meets(index_t tap, index_t output) const {
    const index_t input = output * in_step + tap_offset(tap);
    return input >= 0 && input < inputs;
  }

  /// The outputs whose tap reads a pixel of the image. Divides: not for inner loops.
  range valid(index_t tap) const {
    const index_t at = tap_offset(tap);
    const index_t begin = at >= 0 ? 0 : (-at + in_step - 1) / in_step;
    const index_t end = at >= inputs ? 0 : std::min(outputs, (inputs - 1 - at) / in_step + 1);
    return {std::min(begin, std::max<index_t>(end, 0)), std::max<index_t>(end, 0)};
  }
};

/// The axis of a convolution's forward direction: tap i of output j reads input j stride - padding + i
/// dilation by kernel element i.
inline tap_axis forward_axis(index_t inputs, index_t outputs, index_t kernel, index_t stride, index_t padding,
                             index_t dilation) {
  return {inputs, outputs, stride, 0, 1, kernel, -padding, dilation, 0, 1};
}

/// The axis of the input gradient, inputs and outputs swapped, for pixels phase, phase + stride, ...
/// These share their taps: kernel elements at a constant step, last to first, so that offsets ascend.
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

/// True if kernels for segments of an image row apply: three adjacent taps, padding of at most one pixel.
inline bool segments_fit(const tap_axis& columns) {
  return columns.taps == 3 && columns.in_step == 1 && columns.out_step == 1 && columns.offset_step == 1 &&
         columns.offset >= -1 && columns.outputs + columns.tap_offset(2) <= columns.inputs + 1;
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
