// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Files of trained networks that contain everything needed to use them: model, image size, classes.

#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <pufferfish/models/weights.hpp>
#include <pufferfish/train/checkpoint.hpp>
#include <pufferfish/train/loader.hpp>

#include "models.hpp"

namespace examples {

/// What a program needs to build the network again and to prepare its input.
struct model_card {
  model_choice model;
  extents<4> image{1, 0, 0, 0};  ///< 1 x height x width x channels
  int pixel_maximum = 255;       ///< of the images on which the network was trained
  pufferfish::normalization normalize;
  std::vector<std::string> classes;
  std::string data_set;
  std::string mode;  ///< how it was trained

  index_t class_count() const { return static_cast<index_t>(classes.size()); }
};

inline std::string to_text(const model_card& card) {
  nlohmann::ordered_json j;
  j["model"] = card.model;
  j["image"] = card.image;
  j["pixel_maximum"] = card.pixel_maximum;
  j["mean"] = card.normalize.mean;
  j["deviation"] = card.normalize.deviation;
  j["classes"] = card.classes;
  j["data_set"] = card.data_set;
  j["mode"] = card.mode;
  return j.dump();
}

/// The inverse. Throws io_error, naming the file.
inline model_card card_from_text(const std::string& text, const std::string& file) {
  try {
    const nlohmann::ordered_json j = nlohmann::ordered_json::parse(text);
    model_card card;
    card.model = j.at("model").get<model_choice>();
    card.image = j.at("image").get<extents<4>>();
    card.pixel_maximum = j.at("pixel_maximum").get<int>();
    card.normalize.mean = j.at("mean").get<std::vector<float>>();
    card.normalize.deviation = j.at("deviation").get<std::vector<float>>();
    card.classes = j.at("classes").get<std::vector<std::string>>();
    card.data_set = j.at("data_set").get<std::string>();
    card.mode = j.at("mode").get<std::string>();
    bool usable = card.pixel_maximum >= 1 && card.pixel_maximum <= 255 && card.image[0] == 1;
    for (index_t extent : card.image) usable = usable && extent >= 1 && extent <= 4096;
    usable = usable && card.model.width >= 0 && card.model.width <= 4096;
    for (index_t value : {card.model.blocks, card.model.stem_stride, card.class_count()}) {
      usable = usable && value >= 1 && value <= 4096;
    }
    if (!usable) throw pufferfish::io_error(file + ": its model card has numbers out of range");
    return card;
  } catch (const nlohmann::json::exception& e) {
    throw pufferfish::io_error(file + ": its model card is not one: " + e.what());
  }
}

inline constexpr const char* card_fact = "examples.model_card";

/// Writes a network with its card, without optimizer state. Call it on one rank.
inline void save_model(const std::string& path, const pufferfish::network<float>& net,
                       const model_card& card) {
  pufferfish::save_checkpoint(path, net, {}, {{card_fact, to_text(card)}});
}

/// Reads a network that save_model wrote, dense or low-rank, or the output of
/// factorize_weights for it. Throws io_error.
inline std::pair<pufferfish::network<float>, model_card> load_model(const std::string& path) {
  const pufferfish::safetensors_file weights = pufferfish::safetensors_file::read(path);
  if (weights.metadata().count("pufferfish.low_rank") > 0 && weights.metadata().count(card_fact) > 0) {
    model_card card = card_from_text(weights.metadata().find(card_fact)->second, path);
    pufferfish::network<float> net = build_model(card.model, card.image, card.class_count());
    pufferfish::apply_ranks(net, pufferfish::factor_ranks(weights));
    pufferfish::load_weights(net, weights);
    return {std::move(net), std::move(card)};
  }
  const pufferfish::checkpoint_file file = pufferfish::open_checkpoint(path);
  model_card card = card_from_text(file.fact(card_fact), path);
  pufferfish::network<float> net = build_model(card.model, card.image, card.class_count());
  file.restore(net);
  return {std::move(net), std::move(card)};
}

}  // namespace examples
