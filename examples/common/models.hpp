// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The networks of the examples by name, and the users' choices about them.

#include <string>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <pufferfish/models/by_name.hpp>

namespace examples {

using pufferfish::extents;
using pufferfish::index_t;

struct model_choice {
  std::string name = "small-resnet";
  index_t width = 0;        ///< channels of the first stage, features of an mlp; 0: the model's own
  index_t blocks = 1;       ///< per stage of small-resnet
  index_t stem_stride = 1;  ///< of small-resnet's first convolution
  bool no_batch_norm = false;
};

/// Adds the options of a model_choice; its values as JSON, and the inverse.
inline void add_model_options(CLI::App& app, model_choice& m) {
  app.add_option("--model", m.name, "The network")->check(CLI::IsMember(pufferfish::model_names()));
  app.add_option(
         "--width", m.width,
         "Channels of the first stage, features of an mlp; 0: the model's own (16 of a small one, 64 of a "
         "ResNet-18 or VGG)")
      ->check(CLI::Range(0, 4096));
  app.add_option("--blocks", m.blocks, "Blocks a stage of small-resnet")->check(CLI::Range(1, 100));
  app.add_option("--stem-stride", m.stem_stride, "Stride of small-resnet's first convolution")
      ->check(CLI::Range(1, 16));
  app.add_flag("--no-batch-norm", m.no_batch_norm, "Biases instead of batch normalisation");
}
inline void to_json(nlohmann::ordered_json& j, const model_choice& m) {
  j = {{"name", m.name},
       {"width", m.width},
       {"blocks", m.blocks},
       {"stem_stride", m.stem_stride},
       {"batch_norm", !m.no_batch_norm}};
}
inline void from_json(const nlohmann::ordered_json& j, model_choice& m) {
  j.at("name").get_to(m.name);
  j.at("width").get_to(m.width);
  j.at("blocks").get_to(m.blocks);
  j.at("stem_stride").get_to(m.stem_stride);
  m.no_batch_norm = !j.at("batch_norm").get<bool>();
}

/// Builds the network, not initialized. `image`: 1 x height x width x channels. Throws value_error or
/// shape_error if the model does not accept such images, or has a fixed width and another one was chosen.
template <class T = float, class Device = pufferfish::device::cpu>
pufferfish::network<T, Device> build_model(const model_choice& m, const extents<4>& image, index_t classes) {
  using namespace pufferfish;
  const auto width_or = [&m](index_t own) { return m.width > 0 ? m.width : own; };
  const auto make = [&]() -> network<T, Device> {
    if (m.name == "mlp") {
      const index_t hidden = width_or(16);
      return mlp<T, Device>(
          {.inputs = image[1] * image[2] * image[3], .hidden = {hidden, hidden}, .classes = classes});
    }
    if (m.name == "small-vgg") {
      return small_vgg<T, Device>({.image = {image[1], image[2]},
                                   .channels_in = image[3],
                                   .classes = classes,
                                   .width = width_or(16),
                                   .batch_norm = !m.no_batch_norm});
    }
    if (m.name == "small-resnet") {
      return small_resnet<T, Device>({.channels_in = image[3],
                                      .classes = classes,
                                      .width = width_or(16),
                                      .blocks = m.blocks,
                                      .stem_stride = m.stem_stride,
                                      .batch_norm = !m.no_batch_norm});
    }
    if (const bool stem_norm = m.name == "resnet18_cifar_stem_bn"; stem_norm || m.name == "resnet18_cifar") {
      return resnet18<T, Device>(
          {.channels_in = image[3], .classes = classes, .stem_norm = stem_norm, .width = width_or(64)});
    }
    if (m.width > 0 && m.name.starts_with("vgg")) {
      const vgg_options sizes{.channels_in = image[3], .classes = classes, .width = m.width};
      return m.name == "vgg11_bn"   ? vgg11<T, Device>(sizes)
             : m.name == "vgg19_bn" ? vgg19<T, Device>(sizes)
                                    : vgg19_lth<T, Device>(sizes);
    }
    if (m.width > 0) {
      throw value_error(m.name + " has a width of its own, " + std::to_string(m.width) + " was given");
    }
    return make_model<T, Device>(m.name, image, classes, 0);
  };
  network<T, Device> net = make();
  net.output_shape(image);
  return net;
}

}  // namespace examples
