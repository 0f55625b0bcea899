// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `resnet18`: the residual network that Wang et al. (Pufferfish, MLSys 2021) train on CIFAR-10, and their
/// policy of factorization. Those for ImageNet are in imagenet_resnet.hpp.

#include <pufferfish/models/small_resnet.hpp>
#include <pufferfish/nn/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Sizes of a resnet18; the defaults are the published network for CIFAR-10.
struct resnet18_options {
  index_t channels_in = 3;
  index_t classes = 10;
  /// Whether a batch norm follows the first convolution. The paper's network, of 11,173,834 parameters with
  /// 10 classes, has none there; other ResNet-18s for CIFAR do.
  bool stem_norm = false;
  index_t width = 64;  ///< channels of the first stage; the published network's is 64
};

/// ResNet-18 for small images: a 3x3 convolution to 64 channels, four stages of two basic blocks of 64, 128,
/// 256, 512 channels, global average pooling, a linear layer (He, Zhang, Ren and Sun, CVPR 2016, with the
/// stem of section 4.2 and 1x1 convolutions as shortcuts). Names are those of the paper's code: conv1,
/// layer1.0.conv1, ..., layer2.0.shortcut.0, ..., linear; with stem_norm also bn1.
///
/// Parameters are zero (batch norm the identity) until network::initialize. Throws value_error for an option
/// out of its range.
///
/// \code
/// network<float> net = resnet18<float>();
/// net.initialize(1);
/// ...                                // train 80 epochs
/// factorize(net, resnet18_policy());  // 11,173,834 -> 3,336,138 parameters
/// \endcode
template <class T, class Device = device::cpu>
network<T, Device> resnet18(const resnet18_options& options = {}) {
  const small_resnet_options shape{.channels_in = options.channels_in,
                                   .classes = options.classes,
                                   .width = options.width,
                                   .blocks = 2,
                                   .stages = 4};
  return detail::residual_network<T, Device>("resnet18", "linear", shape, options.stem_norm);
}

/// Policy of the paper: K = 4, so that all layers but the stem, the first block, the shortcuts and
/// the linear layer are factorized, at rank ratio 1/4. 3,336,138 of the 11,173,834 parameters of
/// resnet18 are left (Wang et al., Pufferfish, MLSys 2021).
inline factorize_policy resnet18_policy() { return {.first_layer = 4}; }

/// Policy of pure low rank: all eight blocks are factorized; the stem, the shortcuts and the linear layer
/// stay dense. The network then has 3,282,890 parameters.
inline factorize_policy resnet18_low_rank_policy() { return {}; }

PUFFERFISH_NAMESPACE_END
