// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <string>
#include <vector>

#include <pufferfish/train.hpp>

#include "scratch_folder.hpp"

/// What tests of training share: a task small enough for milliseconds, and hard enough that nothing about it
/// is trivial.
namespace train_support {

using namespace pufferfish;

/// `count` images of 6 x 6 x 1: a bright square whose quadrant is the label, in noise.
inline image_set quadrants(index_t count, std::uint64_t seed) {
  image_set set{count, 6, 6, 1, 4, {}, {}};
  const random_stream random(seed, stream_id("quadrants"));
  for (index_t n = 0; n < count; ++n) {
    const auto label = static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(n), 4));
    set.labels.push_back(label);
    for (index_t y = 0; y < 6; ++y) {
      for (index_t x = 0; x < 6; ++x) {
        const bool bright = (y >= 3) == (label >= 2) && (x >= 3) == (label % 2 == 1);
        const std::uint64_t noise =
            random.child("noise").below(static_cast<std::uint64_t>((n * 6 + y) * 6 + x), 120);
        set.pixels.push_back(static_cast<std::uint8_t>(noise + (bright ? 60 : 0)));
      }
    }
  }
  return set;
}

template <class T>
network<T> tiny_net(bool batch_norm, index_t width = 12) {
  Sequential<T> layers;
  layers.add("conv1", Conv<T>(conv_shape::square(1, width, 3, 1, 1), !batch_norm));
  if (batch_norm) layers.add("bn1", BatchNorm<T>(width));
  layers.add("relu1", ReLU<T>());
  Sequential<T> branch;
  branch.add("conv1", Conv<T>(conv_shape::square(width, width, 3, 1, 1), !batch_norm));
  if (batch_norm) branch.add("bn1", BatchNorm<T>(width));
  layers.add("block", Residual<T>(std::move(branch)));
  layers.add("conv2", Conv<T>(conv_shape::square(width, 2 * width, 3, 2, 1), true));
  layers.add("relu2", ReLU<T>());
  layers.add("pool", GlobalAvgPool<T>());
  layers.add("hidden", Linear<T>(2 * width, 2 * width));
  layers.add("relu3", ReLU<T>());
  layers.add("drop", Dropout<T>(0.1));
  layers.add("fc", Linear<T>(2 * width, 4));
  network<T> net{any_layer<T>(std::move(layers))};
  net.initialize(5);
  return net;
}

inline training_options small_options(training_mode mode = training_mode::hybrid) {
  training_options options;
  options.mode = mode;
  options.epochs = 6;
  options.warmup_epochs = 3;
  options.batch = 24;
  options.learning_rate = 0.05;
  options.rate_schedule = multi_step({4.0});
  options.augment.flip = false;
  options.seed = 9;
  return options;
}

/// Remembers all that it is told.
struct recorder final : training_observer {
  void on_step(const training_position& at) override { positions.push_back(at); }
  void on_epoch(const epoch_result& result) override { epochs.push_back(result); }
  void on_switch(const switch_result& result) override { switches.push_back(result); }
  std::vector<training_position> positions;
  std::vector<epoch_result> epochs;
  std::vector<switch_result> switches;
};

template <class Procedure>
std::uint64_t parameter_digest(Procedure& run) {
  return digest(run.net().store().values());
}

}  // namespace train_support
