// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `small_vgg`: plain convolutional networks for small images.

#include <algorithm>
#include <string>
#include <utility>

#include <pufferfish/models/blocks.hpp>
#include <pufferfish/nn/layers/dropout.hpp>
#include <pufferfish/nn/layers/flatten.hpp>
#include <pufferfish/nn/layers/linear.hpp>
#include <pufferfish/nn/layers/pooling.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Sizes of a small_vgg.
struct small_vgg_options {
  size2 image{32, 32};      ///< pixels; the first linear layer depends on it
  index_t channels_in = 3;  ///< channels of an image
  index_t classes = 10;     ///< outputs of the last layer
  index_t width = 16;       ///< channels of the first stage; each further stage has twice as many
  index_t stages = 2;       ///< each halves height and width; at least one pixel must be left
  index_t hidden = 128;     ///< features between the two linear layers
  double dropout = 0.5;     ///< dropout probability before each linear layer
  bool batch_norm = true;   ///< whether convolutions have batch norms; otherwise they have biases
};

namespace detail {

/// Appends a stage of VGG: 3x3 convolutions to `out` channels, each with batch norm (else a bias) and ReLU,
/// then 2x2 max-pooling.
template <class T, class Device>
void add_vgg_stage(Sequential<T, Device>& to, index_t in, index_t out, int convolutions, bool batch_norm) {
  for (int conv = 0; conv < convolutions; ++conv) {
    to.add(Conv<T>(conv_shape::square(conv == 0 ? in : out, out, 3, 1, 1), !batch_norm));
    if (batch_norm) to.add(BatchNorm<T>(out));
    to.add(ReLU<T>());
  }
  to.add(MaxPool<T>(2));
}

}  // namespace detail

/// Stages of two 3x3 convolutions, each with batch norm and ReLU, and 2x2 max-pooling; then two linear
/// layers, each after dropout: a small network of the kind of Simonyan and Zisserman (Very deep convolutional
/// networks, ICLR 2015). Names are those of torchvision: features.0, ..., classifier.1, classifier.4. The
/// first linear layer has (height >> stages) (width >> stages) channels inputs, so images must have the size
/// of the options. The logits are N x 1 x 1 x classes, without a softmax.
///
/// Parameters are zero (batch norm the identity) until network::initialize. Throws value_error for an option
/// out of its range: at least one stage, at most 16, and no more than leave a pixel; the other sizes in 1 ..
/// 2^20; dropout in [0, 1).
///
/// \code
/// network<float> net = small_vgg<float>({.image = {28, 28}, .channels_in = 1});
/// net.initialize(1);
/// \endcode
template <class T, class Device = device::cpu>
network<T, Device> small_vgg(const small_vgg_options& options) {
  const auto check = [](const char* name, index_t value, index_t high) {
    detail::check_option("small_vgg", name, value, 1, high);
  };
  check("image height", options.image.height, detail::largest_option);
  check("image width", options.image.width, detail::largest_option);
  check("channels_in", options.channels_in, detail::largest_option);
  check("classes", options.classes, detail::largest_option);
  check("width", options.width, detail::largest_option);
  check("hidden", options.hidden, detail::largest_option);
  index_t most_stages = 0;
  while (std::min(options.image.height, options.image.width) >> (most_stages + 1) > 0) ++most_stages;
  check("stages", options.stages, std::min<index_t>(most_stages, 16));

  Sequential<T, Device> features, classifier, net;
  index_t channels = options.channels_in;
  for (index_t stage = 0; stage < options.stages; ++stage) {
    const index_t out = options.width << stage;
    detail::add_vgg_stage<T>(features, channels, out, 2, options.batch_norm);
    channels = out;
  }
  const index_t pixels = (options.image.height >> options.stages) * (options.image.width >> options.stages);
  classifier.add(Dropout<T>(options.dropout))
      .add(Linear<T>(pixels * channels, options.hidden))
      .add(ReLU<T>())
      .add(Dropout<T>(options.dropout))
      .add(Linear<T>(options.hidden, options.classes));
  net.add("features", std::move(features));
  net.add("flatten", Flatten<T>());
  net.add("classifier", std::move(classifier));
  return network<T, Device>{any_layer<T, Device>(std::move(net))};
}

PUFFERFISH_NAMESPACE_END
