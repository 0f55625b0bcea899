// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `small_resnet`: residual networks for small images.

#include <string>
#include <utility>

#include <pufferfish/models/blocks.hpp>
#include <pufferfish/nn/layers/linear.hpp>
#include <pufferfish/nn/layers/pooling.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Sizes of a small_resnet; the defaults are the 8-layer network for CIFAR-10.
struct small_resnet_options {
  index_t channels_in = 3;  ///< channels of an image
  index_t classes = 10;     ///< outputs of the last layer
  index_t width = 16;       ///< channels of the first stage; each further stage has twice as many
  index_t blocks = 1;       ///< blocks per stage; n blocks in 3 stages: the paper's network of 6n + 2 layers
  index_t stages = 3;       ///< 1 .. 16; all but the first halve height and width
  index_t stem_stride = 1;  ///< stride of the first convolution
  bool batch_norm = true;   ///< false: biases instead, and a sample's output does not depend on other samples
};

namespace detail {

/// Makes a small_resnet or a resnet18. `model` appears in errors; `last` is the linear layer's name.
/// Without `stem_norm` the first convolution has neither batch norm nor bias, if the others have batch norm.
template <class T, class Device>
network<T, Device> residual_network(const char* model, const char* last, const small_resnet_options& options,
                                    bool stem_norm) {
  const auto check = [model](const char* name, index_t value, index_t high) {
    check_option(model, name, value, 1, high);
  };
  check("channels_in", options.channels_in, largest_option);
  check("classes", options.classes, largest_option);
  check("width", options.width, largest_option);
  check("blocks", options.blocks, largest_option);
  check("stages", options.stages, 16);
  check("stem_stride", options.stem_stride, largest_option);

  Sequential<T, Device> net;
  index_t channels = options.width;
  const conv_shape stem = conv_shape::square(options.channels_in, channels, 3, options.stem_stride, 1);
  if (options.batch_norm && !stem_norm) {
    net.add("conv1", Conv<T>(stem));
  } else {
    add_conv(net, "conv1", "bn1", stem, options.batch_norm);
  }
  net.add("relu", ReLU<T>());
  for (index_t stage = 0; stage < options.stages; ++stage) {
    const index_t out = options.width << stage;
    Sequential<T, Device> layer;
    for (index_t block = 0; block < options.blocks; ++block) {
      const index_t stride = stage > 0 && block == 0 ? 2 : 1;
      layer.add(basic_block<T, Device>(channels, out, stride, options.batch_norm));
      channels = out;
    }
    net.add("layer" + std::to_string(stage + 1), std::move(layer));
  }
  net.add("avgpool", GlobalAvgPool<T>());
  net.add(last, Linear<T>(channels, options.classes));
  return network<T, Device>{any_layer<T, Device>(std::move(net))};
}

}  // namespace detail

/// The residual network of He, Zhang, Ren and Sun (Deep residual learning for image recognition, CVPR 2016,
/// section 4.2): a 3x3 stem, stages of basic blocks of width, 2 width, 4 width, ... channels, the first block
/// of stages 2, 3, ... with stride 2; global average pooling; a linear layer. Where the paper's shortcuts pad
/// with zeros (option A), these are 1x1 convolutions (option B). Names are those of a PyTorch module: conv1,
/// bn1, layer1.0.conv1, ..., layer2.0.shortcut.0, fc. Any image size is valid if the strides leave a pixel.
/// The logits are N x 1 x 1 x classes, without a softmax.
///
/// Parameters are zero (batch norm the identity) until network::initialize. Throws value_error for an option
/// out of its range: stages in 1 .. 16, the other sizes in 1 .. 2^20.
///
/// \code
/// network<float> net = small_resnet<float>({.classes = 100, .width = 32, .blocks = 3});
/// net.initialize(1);
/// const index_t parameters = net.parameter_count(), macs = net.macs({1, 32, 32, 3});
/// \endcode
template <class T, class Device = device::cpu>
network<T, Device> small_resnet(const small_resnet_options& options) {
  return detail::residual_network<T, Device>("small_resnet", "fc", options, true);
}

PUFFERFISH_NAMESPACE_END
