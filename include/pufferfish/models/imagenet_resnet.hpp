// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Residual networks for ImageNet: `resnet18_imagenet`, `resnet34`, `resnet50`, `resnet101`, `resnet152`,
/// `wide_resnet50_2`, as in torchvision, and the policies with which Wang et al. (Pufferfish, MLSys 2021)
/// factorize them.

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/models/blocks.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/layers/linear.hpp>
#include <pufferfish/nn/layers/pooling.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Sizes of the networks below; the defaults are the published networks.
struct imagenet_resnet_options {
  index_t channels_in = 3;  ///< channels of an image
  index_t classes = 1000;   ///< outputs of the last layer
  /// Blocks per stage; all zeros: the numbers of the published network.
  std::array<index_t, 4> blocks{0, 0, 0, 0};
  index_t width = 64;  ///< channels of the stem and of the first stage's 3x3 convolutions; published: 64
  /// Whether the last batch norm of each branch starts with weight 0, so that every block starts as the
  /// identity (Goyal et al., 2017). The paper's code sets it for its pure low-rank networks only.
  bool zero_init_residual = false;
  /// Networks of basic blocks only. True: every 3x3 convolution is a LowRankNormConv of rank outputs / 4 from
  /// the start. This gives the parameter counts of the paper's pure low-rank ResNet-18 (3,800,488) and
  /// ResNet-34 (6,615,528).
  bool factor_bn = false;
};

namespace detail {

/// Constants that distinguish the networks of the family.
struct imagenet_resnet_shape {
  const char* name;
  std::array<index_t, 4> blocks;
  bool bottleneck;     ///< blocks of 1x1, 3x3, 1x1 convolutions, the last with four times the channels
  index_t inner_wide;  ///< factor of the channels within a bottleneck
};

inline constexpr imagenet_resnet_shape resnet18_shape{"resnet18_imagenet", {2, 2, 2, 2}, false, 1};
inline constexpr imagenet_resnet_shape resnet34_shape{"resnet34", {3, 4, 6, 3}, false, 1};
inline constexpr imagenet_resnet_shape resnet50_shape{"resnet50", {3, 4, 6, 3}, true, 1};
inline constexpr imagenet_resnet_shape resnet101_shape{"resnet101", {3, 4, 23, 3}, true, 1};
inline constexpr imagenet_resnet_shape resnet152_shape{"resnet152", {3, 8, 36, 3}, true, 1};
inline constexpr imagenet_resnet_shape wide_resnet50_2_shape{"wide_resnet50_2", {3, 4, 6, 3}, true, 2};

/// Makes a bottleneck block: convolutions 1x1 to `inner` channels, 3x3 with the stride, 1x1 to `out`
/// channels.
template <class T, class Device>
Residual<T, Device> bottleneck_block(index_t in, index_t inner, index_t out, index_t stride) {
  Sequential<T, Device> branch;
  add_conv(branch, "conv1", "bn1", conv_shape::square(in, inner, 1), true);
  branch.add("relu1", ReLU<T>());
  add_conv(branch, "conv2", "bn2", conv_shape::square(inner, inner, 3, stride, 1), true);
  branch.add("relu2", ReLU<T>());
  add_conv(branch, "conv3", "bn3", conv_shape::square(inner, out, 1), true);
  return Residual<T, Device>(std::move(branch), shortcut_of<T, Device>(in, out, stride), true, "downsample");
}

/// Makes a basic block whose 3x3 convolutions are factors with a batch norm between them.
/// The rank of both is outputs / 4, at least 1; batch norms follow them as in a basic block.
template <class T, class Device>
Residual<T, Device> low_rank_norm_block(index_t in, index_t out, index_t stride) {
  const index_t rank = std::max<index_t>(1, out / 4);
  Sequential<T, Device> branch;
  branch.add("conv1", LowRankNormConv<T, Device>(conv_shape::square(in, out, 3, stride, 1), rank));
  branch.add("bn1", BatchNorm<T>(out));
  branch.add("relu", ReLU<T>());
  branch.add("conv2", LowRankNormConv<T, Device>(conv_shape::square(out, out, 3, 1, 1), rank));
  branch.add("bn2", BatchNorm<T>(out));
  return Residual<T, Device>(std::move(branch), shortcut_of<T, Device>(in, out, stride), true, "downsample");
}

/// Draws the initial values of torchvision: convolutions from N(0, 2 / fan_out), and weight 0 in the last
/// batch norm of each branch, called bn<Last>.
template <class T, int Last>
void imagenet_values(const std::string& name, parameter<parameter_t<T>>& p, random_stream random) {
  kaiming_convolutions<T>(name, p, random);
  if (name.starts_with("layer") && name.ends_with(".bn" + std::to_string(Last) + ".weight")) {
    init::constant(p, 0.0);
  }
}

/// Assembles a network of the family. Throws value_error for an option out of its range, and for factor_bn
/// with bottleneck blocks.
template <class T, class Device>
network<T, Device> imagenet_resnet(const imagenet_resnet_shape& shape,
                                   const imagenet_resnet_options& options) {
  check_option(shape.name, "channels_in", options.channels_in, 1, largest_option);
  check_option(shape.name, "classes", options.classes, 1, largest_option);
  check_option(shape.name, "width", options.width, 1, largest_option);
  if (options.factor_bn && shape.bottleneck) {
    throw_error<value_error>({std::string(shape.name), ": factor_bn is for basic blocks"});
  }
  std::array<index_t, 4> blocks = options.blocks;
  if (blocks == std::array<index_t, 4>{}) blocks = shape.blocks;

  Sequential<T, Device> net;
  index_t channels = options.width;
  add_conv(net, "conv1", "bn1", conv_shape::square(options.channels_in, channels, 7, 2, 3), true);
  net.add("relu", ReLU<T>());
  net.add("maxpool", MaxPool<T>(3, 2, 1));
  for (std::size_t stage = 0; stage < blocks.size(); ++stage) {
    check_option(shape.name, "a stage's blocks", blocks[stage], 1, largest_option);
    const index_t planes = options.width << stage, out = shape.bottleneck ? 4 * planes : planes;
    Sequential<T, Device> layer;
    for (index_t block = 0; block < blocks[stage]; ++block) {
      const index_t stride = stage > 0 && block == 0 ? 2 : 1;
      if (shape.bottleneck) {
        layer.add(bottleneck_block<T, Device>(channels, planes * shape.inner_wide, out, stride));
      } else if (options.factor_bn) {
        layer.add(low_rank_norm_block<T, Device>(channels, out, stride));
      } else {
        layer.add(basic_block<T, Device>(channels, out, stride, true, "downsample"));
      }
      channels = out;
    }
    net.add("layer" + std::to_string(stage + 1), std::move(layer));
  }
  net.add("avgpool", GlobalAvgPool<T>());
  net.add("fc", Linear<T>(channels, options.classes));
  const auto values = !options.zero_init_residual ? &kaiming_convolutions<T>
                      : shape.bottleneck          ? &imagenet_values<T, 3>
                                                  : &imagenet_values<T, 2>;
  return network<T, Device>{any_layer<T, Device>(initialized_sequential<T, Device>(std::move(net), values))};
}

inline bool is_downsample(const std::string& name) { return name.find(".downsample.") != std::string::npos; }

/// Policy that factorizes stage 4, with its shortcut in networks of bottleneck blocks, without it
/// in networks of basic blocks. The linear layer stays dense.
inline factorize_policy stage4_policy(const imagenet_resnet_shape& shape) {
  factorize_policy policy;
  const index_t convolutions = shape.bottleneck ? 3 : 2;
  policy.first_layer = 2 + convolutions * (shape.blocks[0] + shape.blocks[1] + shape.blocks[2]);
  policy.shortcuts_dense = !shape.bottleneck;
  policy.also_if = [](const std::string& name, matrix_size) {
    return !is_downsample(name) || name.starts_with("layer4.");
  };
  return policy;
}

}  // namespace detail

/// ResNet-18, -34, -50, -101, -152 (He, Zhang, Ren and Sun, CVPR 2016, table 1; stride on the 3x3
/// convolution of a bottleneck, as torchvision) and WideResNet-50-2 (Zagoruyko and Komodakis, BMVC 2016: the
/// inner channels of the bottlenecks doubled): a 7x7 convolution with stride 2, 3x3 max pooling with stride
/// 2, four stages, global average pooling, a linear layer. 11,689,512, 21,797,672, 25,557,032, 44,549,160,
/// 60,192,808 and 68,883,240 parameters with 1000 classes. Names are torchvision's: conv1, bn1,
/// layer1.0.conv1, ..., layer2.0.downsample.0, ..., fc. Any image size is valid if the strides leave a pixel.
///
/// Parameters are zero (batch norm the identity) until network::initialize, which draws convolutions from
/// N(0, 2 / fan_out). All functions throw value_error for an option out of its range: sizes outside 1 ..
/// 2^20, and factor_bn for networks of bottleneck blocks.
///
/// \code
/// network<float> net = resnet50<float>();
/// net.initialize(1);
/// const tensor<float, 4> logits = net.forward(ctx, images.view());  // N x 224 x 224 x 3 -> N x 1 x 1 x 1000
/// factorize(net, resnet50_policy());
/// \endcode
template <class T, class Device = device::cpu>
network<T, Device> resnet18_imagenet(const imagenet_resnet_options& options = {}) {
  return detail::imagenet_resnet<T, Device>(detail::resnet18_shape, options);
}
/// ResNet-34 for ImageNet, a network of basic blocks; see resnet18_imagenet for contract and source.
template <class T, class Device = device::cpu>
network<T, Device> resnet34(const imagenet_resnet_options& options = {}) {
  return detail::imagenet_resnet<T, Device>(detail::resnet34_shape, options);
}
/// ResNet-50 for ImageNet, a network of bottleneck blocks; see resnet18_imagenet for contract and source.
template <class T, class Device = device::cpu>
network<T, Device> resnet50(const imagenet_resnet_options& options = {}) {
  return detail::imagenet_resnet<T, Device>(detail::resnet50_shape, options);
}
/// ResNet-101 for ImageNet, a network of bottleneck blocks; see resnet18_imagenet for contract and source.
template <class T, class Device = device::cpu>
network<T, Device> resnet101(const imagenet_resnet_options& options = {}) {
  return detail::imagenet_resnet<T, Device>(detail::resnet101_shape, options);
}
/// ResNet-152 for ImageNet, a network of bottleneck blocks; see resnet18_imagenet for contract and source.
template <class T, class Device = device::cpu>
network<T, Device> resnet152(const imagenet_resnet_options& options = {}) {
  return detail::imagenet_resnet<T, Device>(detail::resnet152_shape, options);
}
/// WideResNet-50-2 for ImageNet: bottleneck blocks with doubled inner channels; see resnet18_imagenet for
/// contract and source.
template <class T, class Device = device::cpu>
network<T, Device> wide_resnet50_2(const imagenet_resnet_options& options = {}) {
  return detail::imagenet_resnet<T, Device>(detail::wide_resnet50_2_shape, options);
}

/// Hybrid policy of the paper for ResNet-50: stage 4 and its shortcut at rank 1/4, i.e. from layer K = 41 on.
/// 15,202,344 parameters are left (Wang et al., Pufferfish, MLSys 2021).
///
///     network<float> net = resnet50<float>();
///     net.initialize(1);                  // then train it
///     factorize(net, resnet50_policy());  // 25,557,032 -> 15,202,344 parameters
inline factorize_policy resnet50_policy() { return detail::stage4_policy(detail::resnet50_shape); }
/// Hybrid policy of the paper's code for ResNet-101: stage 4 and its shortcut at rank 1/4 (K = 92).
/// 34,194,472 parameters are left.
inline factorize_policy resnet101_policy() { return detail::stage4_policy(detail::resnet101_shape); }
/// Hybrid policy of the paper's code for ResNet-152: stage 4 and its shortcut at rank 1/4 (K = 143).
/// 49,838,120 parameters are left.
inline factorize_policy resnet152_policy() { return detail::stage4_policy(detail::resnet152_shape); }
/// Hybrid policy of the paper for WideResNet-50-2: stage 4 and its shortcut at rank 1/4 (K = 41). 40,047,400
/// parameters are left.
inline factorize_policy wide_resnet50_2_policy() {
  return detail::stage4_policy(detail::wide_resnet50_2_shape);
}

/// Hybrid policy for ResNet-18 on ImageNet, a network of basic blocks: the layers of stage 4 are factorized,
/// shortcuts stay dense. The paper (Wang et al., MLSys 2021) has no hybrid form of this network.
inline factorize_policy resnet18_imagenet_policy() { return detail::stage4_policy(detail::resnet18_shape); }
/// Hybrid policy for ResNet-34 on ImageNet: the layers of stage 4 are factorized, shortcuts stay dense.
inline factorize_policy resnet34_policy() { return detail::stage4_policy(detail::resnet34_shape); }

/// Policy of pure low rank for networks of bottleneck blocks: all layers but the stem and the linear layer
/// are factorized, shortcuts included, at rank 1/4.
inline factorize_policy bottleneck_low_rank_policy() { return {.shortcuts_dense = false}; }
/// Policy of pure low rank for networks of basic blocks: all layers but the stem, the shortcuts and the
/// linear layer are factorized, at rank 1/4.
inline factorize_policy basic_low_rank_policy() { return {}; }

/// Returns, for apply_ranks, the ranks of the low-rank ResNet-50 (8,745,000 parameters) and WideResNet-50-2
/// (22,417,192) of Wang, Agarwal, Papailiopoulos (Pufferfish, MLSys 2021), in which all layers but stem and
/// classifier are factorized from the start. They are those of bottleneck_low_rank_policy, except that a
/// shortcut has rank outputs / 16, and the first convolution of a block has rank outputs / 4 even if it has
/// more outputs than inputs. `net` must be a dense network of bottleneck blocks. Throws the errors of
/// planned_ranks.
///
///     network<float> net = resnet50<float>();
///     apply_ranks(net, reference_ranks(net));  // 8,745,000 parameters, all zero
template <class T, class Device = device::cpu>
std::vector<layer_rank> reference_ranks(const network<T, Device>& net) {
  std::vector<layer_rank> ranks = planned_ranks(net, bottleneck_low_rank_policy());
  net.for_each_layer([&](const std::string& name, const any_layer<T, Device>& layer) {
    for (layer_rank& wanted : ranks) {
      if (wanted.name != name) continue;
      const index_t out = layer.first_matrix().rows;
      if (detail::is_downsample(name)) wanted.ranks = {std::max<index_t>(1, out / 16)};
      if (name.ends_with(".conv1")) wanted.ranks = {std::max<index_t>(1, out / 4)};
    }
  });
  return ranks;
}

PUFFERFISH_NAMESPACE_END
