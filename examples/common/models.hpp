// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The networks that the examples know, by name, with what users may choose about them.

#include <string>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <pufferfish/models/by_name.hpp>

namespace examples {

using pufferfish::extents;
using pufferfish::index_t;

struct model_choice {
  std::string name = "small-resnet";
  index_t width = 16;       ///< channels of the first stage (small-resnet, small-vgg), features (mlp)
  index_t blocks = 1;       ///< a stage of small-resnet
  index_t stem_stride = 1;  ///< of small-resnet's first convolution
  bool no_batch_norm = false;
};

/// Options for all of it, and the values as JSON and back.
inline void add_model_options(CLI::App& app, model_choice& m) {
  app.add_option("--model", m.name, "The network")->check(CLI::IsMember(pufferfish::model_names()));
  app.add_option("--width", m.width, "Channels of the first stage of a small network; features of an mlp")
      ->check(CLI::Range(1, 4096));
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

/// Builds the network; initialize it. `image`: 1 x height x width x channels. Throws value_error
/// or shape_error if the model does not take such images.
inline pufferfish::network<float> build_model(const model_choice& m, const extents<4>& image,
                                              index_t classes) {
  using namespace pufferfish;
  const auto make = [&]() -> network<float> {
    if (m.name == "mlp") {
      return mlp<float>(
          {.inputs = image[1] * image[2] * image[3], .hidden = {m.width, m.width}, .classes = classes});
    }
    if (m.name == "small-vgg") {
      return small_vgg<float>({.image = {image[1], image[2]},
                               .channels_in = image[3],
                               .classes = classes,
                               .width = m.width,
                               .batch_norm = !m.no_batch_norm});
    }
    if (m.name != "small-resnet") return make_model<float>(m.name, image, classes, 0);
    return small_resnet<float>({.channels_in = image[3],
                                .classes = classes,
                                .width = m.width,
                                .blocks = m.blocks,
                                .stem_stride = m.stem_stride,
                                .batch_norm = !m.no_batch_norm});
  };
  network<float> net = make();
  net.output_shape(image);
  return net;
}

}  // namespace examples
