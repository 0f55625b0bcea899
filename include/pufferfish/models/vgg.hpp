// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `vgg19`: VGG-19 with batch norm as the paper trains it on CIFAR-10, and how the paper factorizes it.

#include <array>

#include <pufferfish/models/small_vgg.hpp>
#include <pufferfish/nn/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN

struct vgg19_options {
  index_t channels_in = 3;
  index_t classes = 10;
  double dropout = 0.5;  ///< before each linear layer but the last
};

/// VGG-19 with batch norm for images of 32x32: sixteen 3x3 convolutions without bias in five stages (2, 2, 4,
/// 4, 4 to 64, 128, 256, 512, 512 channels), each stage behind 2x2 max-pooling, then three linear layers of
/// 512, 512 and `classes` outputs (Simonyan and Zisserman, ICLR 2015, configuration E with narrower linear
/// layers). 20,560,330 parameters with 10 classes. Names as small_vgg's.
///
/// Parameters are zero (batch norm the identity) until network::initialize. Throws value_error for an option
/// out of its range.
template <class T>
network<T> vgg19(const vgg19_options& options = {}) {
  detail::check_option("vgg19", "channels_in", options.channels_in, 1, detail::largest_option);
  detail::check_option("vgg19", "classes", options.classes, 1, detail::largest_option);
  struct stage {
    index_t channels;
    int convolutions;
  };
  constexpr std::array<stage, 5> stages{{{64, 2}, {128, 2}, {256, 4}, {512, 4}, {512, 4}}};
  constexpr index_t hidden = 512;

  sequential<T> features, classifier, net;
  index_t channels = options.channels_in;
  for (const stage& s : stages) {
    detail::add_vgg_stage<T>(features, channels, s.channels, s.convolutions, true);
    channels = s.channels;
  }
  for (const index_t features_in : {channels, hidden}) {
    classifier.add(Dropout<T>(options.dropout)).add(Linear<T>(features_in, hidden)).add(ReLU<T>());
  }
  classifier.add(Linear<T>(hidden, options.classes));
  net.add("features", std::move(features));
  net.add("flatten", Flatten<T>());
  net.add("classifier", std::move(classifier));
  return network<T>{any_layer<T>(std::move(net))};
}

/// What the paper factorizes of it: K = 10, so the last seven convolutions and the first two linear layers,
/// to rank 128 = 1/4. 8,370,634 parameters are left of vgg19's 20,560,330 (Wang et al., Pufferfish, MLSys
/// 2021).
inline factorize_policy vgg19_policy() {
  factorize_policy policy;
  policy.first_layer = 10;
  return policy;
}

PUFFERFISH_NAMESPACE_END
