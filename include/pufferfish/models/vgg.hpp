// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `vgg11`, `vgg19`, `vgg19_lth`: VGG networks with batch norm as trained on CIFAR-10 by Wang et al.
/// (Pufferfish, MLSys 2021), and their policies of factorization.

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include <pufferfish/models/blocks.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/layers/dropout.hpp>
#include <pufferfish/nn/layers/flatten.hpp>
#include <pufferfish/nn/layers/linear.hpp>
#include <pufferfish/nn/layers/pooling.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Sizes of vgg11, vgg19 and vgg19_lth; the defaults are the published networks for CIFAR-10.
struct vgg_options {
  index_t channels_in = 3;  ///< channels of an image
  index_t classes = 10;     ///< outputs of the last layer
  double dropout = 0.5;     ///< dropout probability before each linear layer but the last; vgg19_lth has none
  index_t width = 64;       ///< channels of the first convolutions; the published networks' are 64
};
using vgg19_options = vgg_options;

namespace detail {

/// Number of convolutions in each of the five stages, which have 1, 2, 4, 8, 8 times `width` channels.
using vgg_stages = std::array<int, 5>;
inline constexpr vgg_stages vgg11_stages{1, 1, 2, 2, 2};
inline constexpr vgg_stages vgg19_stages{2, 2, 4, 4, 4};

/// Makes the convolutions conv1, conv2, ..., each with batch_norm1, ... and relu1, ...; 2x2 max pooling after
/// every stage, but `last_pool` after the last; then a Flatten. Throws value_error for an option out of its
/// range.
template <class T, class Device>
Sequential<T, Device> vgg_features(const char* model, const vgg_stages& stages, const vgg_options& options,
                                   any_layer<T, Device> last_pool) {
  check_option(model, "channels_in", options.channels_in, 1, largest_option);
  check_option(model, "classes", options.classes, 1, largest_option);
  check_option(model, "width", options.width, 1, largest_option);
  Sequential<T, Device> net;
  index_t in = options.channels_in;
  int number = 0;
  for (std::size_t stage = 0; stage < stages.size(); ++stage) {
    const index_t out = options.width << std::min<std::size_t>(stage, 3);
    for (int conv = 0; conv < stages[stage]; ++conv) {
      const std::string n = std::to_string(++number);
      add_conv(net, "conv" + n, "batch_norm" + n, conv_shape::square(in, out, 3, 1, 1), true);
      net.add("relu" + n, ReLU<T>());
      in = out;
    }
    const std::string pool = "pool" + std::to_string(stage + 1);
    net.add(pool, stage + 1 < stages.size() ? any_layer<T, Device>(MaxPool<T>(2)) : last_pool);
  }
  net.add("flatten", Flatten<T>());
  return net;
}

/// Makes the convolutions of the given stages, then the classifier of three linear layers.
template <class T, class Device>
network<T, Device> vgg(const char* model, const vgg_stages& stages, const vgg_options& options) {
  Sequential<T, Device> net = vgg_features<T, Device>(model, stages, options, MaxPool<T>(2)), classifier;
  const index_t hidden = 8 * options.width;
  for (int layer = 0; layer < 2; ++layer) {
    classifier.add(Dropout<T>(options.dropout)).add(Linear<T>(hidden, hidden)).add(ReLU<T>());
  }
  classifier.add(Linear<T>(hidden, options.classes));
  net.add("classifier", std::move(classifier));
  return network<T, Device>{
      any_layer<T, Device>(initialized_sequential<T, Device>(std::move(net), &kaiming_convolutions<T>))};
}

/// Draws weights from N(0, 2 / fan_in) and batch norm weights from U[0, 1).
template <class T>
void lottery_ticket_values(const std::string& name, parameter<parameter_t<T>>& p, random_stream random) {
  if (p.layout().dims > 1) {
    const double fan_in = static_cast<double>(init::fans_of(p.layout()).in);
    init::normal(p, std::sqrt(2.0 / fan_in), random);
  } else if (p.role() == parameter_role::norm && name.ends_with(".weight")) {
    init::uniform(p, 0.0, 1.0, random);
  }
}

}  // namespace detail

/// VGG-11 and VGG-19 with batch norm for images of 32x32: eight or sixteen 3x3 convolutions without bias in
/// five stages to 64, 128, 256, 512 and 512 channels, 2x2 max pooling after each stage, then three linear
/// layers of 512, 512 and `classes` outputs (Simonyan and Zisserman, ICLR 2015, configurations A and E with
/// narrower linear layers). 9,753,674 and 20,560,330 parameters with 10 classes. Names are those of the
/// paper's code: conv1, batch_norm1, ..., classifier.1, classifier.4, classifier.6.
///
/// Parameters are zero (batch norm the identity) until network::initialize, which draws convolutions from
/// N(0, 2 / fan_out). Both functions throw value_error for an option out of its range.
///
/// Images are 32 x 32 pixels: output_shape throws shape_error for other sizes that leave no or more than one
/// pixel after the last pooling. The logits are N x 1 x 1 x classes.
///
/// \code
/// network<float> net = vgg19<float>({.classes = 100});
/// net.initialize(1);
/// factorize(net, vgg19_policy());
/// \endcode
template <class T, class Device = device::cpu>
network<T, Device> vgg11(const vgg_options& options = {}) {
  return detail::vgg<T, Device>("vgg11", detail::vgg11_stages, options);
}
/// VGG-19 with batch norm for images of 32x32; see vgg11 for contract and source.
template <class T, class Device = device::cpu>
network<T, Device> vgg19(const vgg_options& options = {}) {
  return detail::vgg<T, Device>("vgg19", detail::vgg19_stages, options);
}

/// The VGG-19 that Wang et al. (Pufferfish, MLSys 2021) compare with lottery tickets: 2x2 average pooling
/// after the last stage, and one linear layer, fc. 20,035,018 parameters with 10 classes. Initial values of
/// that comparison: weights from N(0, 2 / fan_in), batch norm weights from U[0, 1). Everything else is as in
/// vgg19. There is no dropout: throws value_error for an options.dropout other than 0 and the default.
template <class T, class Device = device::cpu>
network<T, Device> vgg19_lth(const vgg_options& options = {}) {
  if (options.dropout != 0.0 && options.dropout != vgg_options().dropout) {
    detail::throw_error<value_error>(
        {"vgg19_lth: dropout is ", options.dropout, ", but this network has no dropout"});
  }
  Sequential<T, Device> net = detail::vgg_features<T, Device>("vgg19_lth", detail::vgg19_stages, options,
                                                              any_layer<T, Device>(AvgPool<T>(2)));
  net.add("fc", Linear<T>(8 * options.width, options.classes));
  return network<T, Device>{any_layer<T, Device>(
      detail::initialized_sequential<T, Device>(std::move(net), &detail::lottery_ticket_values<T>))};
}

/// Policy of the paper for vgg19: K = 10, so that the last seven convolutions and the first two linear
/// layers get rank 128 = 1/4. 8,370,634 of 20,560,330 parameters are left (Wang et al., Pufferfish,
/// MLSys 2021). Of vgg19_lth, which has no such linear layers, 8,107,466 of 20,035,018 are left.
inline factorize_policy vgg19_policy() { return {.first_layer = 10}; }

/// Hybrid policy for vgg11, which the paper (Wang et al., MLSys 2021) does not contain: factorizes from the
/// first convolution of 512 to 512 channels on.
inline factorize_policy vgg11_policy() { return {.first_layer = 6}; }

/// Policy of pure low rank: all layers but the first convolution and the last linear layer are factorized.
/// vgg11 is left with 2,878,538 parameters, vgg19 with 5,884,362.
inline factorize_policy vgg_low_rank_policy() { return {}; }

PUFFERFISH_NAMESPACE_END
