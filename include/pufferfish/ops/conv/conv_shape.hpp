// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The geometry of a two-dimensional convolution.
///
/// \code
/// const conv_shape stem = conv_shape::square(3, 64, 7, 2, 3);  // kernel 7, stride 2, padding 3
/// stem.validate("stem");
/// const extents<4> y = stem.output({2, 224, 224, 3}, "stem");  // {2, 112, 112, 64}
/// \endcode

#include <limits>
#include <string>
#include <string_view>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A height and a width, in that order, in pixels or in kernel elements.
struct size2 {
  index_t height = 0;
  index_t width = 0;
  friend bool operator==(const size2&, const size2&) = default;
};

/// Geometry of a convolution: all properties of the operation except the values of the weight. Lengths are in
/// pixels. On each axis, output pixel o is a sum over kernel elements k, and element k multiplies input pixel
/// o stride + k dilation - padding; input pixels outside the image count as 0.
///
/// The class is an aggregate whose members are not checked until validate() is called. All other functions
/// require a valid shape: a stride of 0, for example, would divide by zero.
struct conv_shape {
  index_t in_channels = 0;   ///< input channels of all groups together
  index_t out_channels = 0;  ///< output channels of all groups together
  size2 kernel{1, 1};        ///< kernel elements in each direction
  size2 stride{1, 1};        ///< input pixels between the windows of adjacent output pixels
  size2 padding{0, 0};       ///< pixels of zeros added on each side of the image
  size2 dilation{1, 1};      ///< input pixels between adjacent kernel elements; 1: no gaps
  /// Number of equal parts into which input channels and output channels are cut. Outputs of part g depend on
  /// inputs of part g only. 1: ordinary convolution; in_channels: depthwise convolution.
  index_t groups = 1;
  friend bool operator==(const conv_shape&, const conv_shape&) = default;

  /// The shape of a square kernel with equal stride, padding and dilation in both directions, and one group.
  /// Does not validate the result.
  // Never inlined: g++ 12.2 at -O2 with AVX-512 miscompiles copies of a constant shape,
  // whose paddings become 1 where they are 0 (seen in tests/unit/nn/accounting.cpp).
  PUFFERFISH_NOINLINE static conv_shape square(index_t in, index_t out, index_t kernel, index_t stride = 1,
                                               index_t padding = 0, index_t dilation = 1) {
    return {in, out, {kernel, kernel}, {stride, stride}, {padding, padding}, {dilation, dilation}, 1};
  }

  /// Number of input channels of one group.
  index_t group_inputs() const { return in_channels / groups; }
  /// Number of output channels of one group.
  index_t group_outputs() const { return out_channels / groups; }

  /// Number of input elements that contribute to one output element: kernel height * kernel width *
  /// group_inputs(). The stored weight has patch() rows of out_channels elements.
  index_t patch() const { return kernel.height * kernel.width * group_inputs(); }

  /// True if the convolution is one matrix product [pixels x in] [in x out]: a 1x1 kernel with stride 1, no
  /// padding and one group. The dilation of a 1x1 kernel has no effect.
  bool is_pointwise() const {
    return groups == 1 && kernel == size2{1, 1} && stride == size2{1, 1} && padding == size2{0, 0};
  }

  /// Throws shape_error, with the text `layer` in its message, unless
  /// - channels, kernel, stride, dilation and groups are positive, and no padding is negative,
  /// - groups divide both channels,
  /// - kernel height * kernel width * in_channels * out_channels fits in index_t, and
  /// - in each direction kernel * dilation and the padding are at most a quarter of the largest index_t.
  void validate(std::string_view layer) const {
    // The limit is a quarter of the largest index, since output_length adds a length, two paddings and the
    // span of the dilated kernel.
    constexpr index_t most = std::numeric_limits<index_t>::max() / 4;
    const auto too_long = [](index_t length, index_t spacing, index_t added) {
      const extents<2> reach{length, spacing};
      const index_t pixels = detail::checked_volume(reach.data(), 2);
      return pixels < 0 || pixels > most || added > most;
    };
    const extents<4> weight{kernel.height, kernel.width, in_channels, out_channels};
    const bool positive = in_channels > 0 && out_channels > 0 && kernel.height > 0 && kernel.width > 0 &&
                          stride.height > 0 && stride.width > 0 && dilation.height > 0 &&
                          dilation.width > 0 && groups > 0;
    if (!positive || in_channels % groups != 0 || out_channels % groups != 0 || padding.height < 0 ||
        padding.width < 0 || detail::checked_volume(weight.data(), 4) < 0 ||
        too_long(kernel.height, dilation.height, padding.height) ||
        too_long(kernel.width, dilation.width, padding.width)) {
      detail::throw_error<shape_error>({layer, ": not a convolution: ", describe()});
    }
  }

  /// NHWC extents of the output for an input of NHWC extents `input`. Each length is floor((in + 2 padding -
  /// dilation (kernel - 1) - 1) / stride) + 1; the channels are out_channels. A batch of 0 images is allowed.
  /// Throws shape_error for a negative batch, if input[3] differs from in_channels, or if the dilated kernel
  /// is larger than the padded image. `layer` names the layer in the message: a text, or an object with
  /// describe(), whose text is built only on error.
  template <class Layer>
  extents<4> output(const extents<4>& input, const Layer& layer) const {
    const index_t height =
        output_length(input[1], kernel.height, stride.height, padding.height, dilation.height);
    const index_t width = output_length(input[2], kernel.width, stride.width, padding.width, dilation.width);
    if (input[3] != in_channels || height <= 0 || width <= 0 || input[0] < 0) misfit(name_of(layer), input);
    return {input[0], height, width, out_channels};
  }

  /// Description for messages: "convolution 3 -> 64, kernel 7x7, stride 2x2, padding 3x3, dilation 1x1",
  /// followed by the number of groups if there is more than one.
  PUFFERFISH_COLD std::string describe() const {
    return detail::message({"convolution ",
                            in_channels,
                            " -> ",
                            out_channels,
                            ", kernel ",
                            kernel.height,
                            "x",
                            kernel.width,
                            ", stride ",
                            stride.height,
                            "x",
                            stride.width,
                            ", padding ",
                            padding.height,
                            "x",
                            padding.width,
                            ", dilation ",
                            dilation.height,
                            "x",
                            dilation.width,
                            groups == 1 ? std::string() : ", groups " + std::to_string(groups)});
  }

  /// Output length of one axis (formula: output()), or 0 if the dilated kernel is longer than the padded
  /// axis. Pooling windows use the function with dilation 1.
  static index_t output_length(index_t length, index_t kernel, index_t stride, index_t padding,
                               index_t dilation) {
    const index_t room = length + 2 * padding - dilation * (kernel - 1) - 1;
    return room < 0 ? 0 : room / stride + 1;
  }

 private:
  // Name of a layer in messages: layer.describe() if `layer` has that function; otherwise `layer` is the text
  // itself.
  template <class Layer>
  static std::string name_of(const Layer& layer) {
    if constexpr (requires { layer.describe(); }) {
      return layer.describe();
    } else {
      return layer;
    }
  }
  // Throws the shape_error of output(), with the extents of the input and the reason.
  [[noreturn]] PUFFERFISH_COLD void misfit(std::string layer, const extents<4>& input) const {
    if (layer.find(describe()) == std::string::npos) layer += ", " + describe();
    if (input[3] != in_channels) {
      detail::throw_error<shape_error>({layer, ": input ", input, " (NHWC) does not fit: it has ", input[3],
                                        " channels, not ", in_channels,
                                        input[1] == in_channels ? "; NCHW images must be permuted" : ""});
    }
    if (input[0] < 0) {
      detail::throw_error<shape_error>({layer, ": input ", input, " (NHWC) has a negative number of images"});
    }
    detail::throw_error<shape_error>({layer, ": input ", input, " (NHWC) does not fit: an image of ",
                                      input[1], "x", input[2], " is smaller than the kernel"});
  }
};

PUFFERFISH_NAMESPACE_END
