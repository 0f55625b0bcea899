// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What tests of training runs on a device share: small runs of every task, on a device and on the CPU.
#pragma once

#include "support.hpp"

#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include <pufferfish/gpu.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/train/language_task.hpp>
#include <pufferfish/train/translation_task.hpp>

#include "../unit/support/train_support.hpp"

namespace gpu_test {

using train_support::recorder;

/// What a network computes in: T on a device, float on the CPU.
template <class T, class Device>
using computing_t = std::conditional_t<std::is_same_v<Device, pf::device::gpu>, T, float>;

/// Every parameter, buffer and loss of a run.
struct outcome {
  std::vector<float> values, buffers;
  std::vector<double> losses, accuracies;
};

template <class Run>
outcome outcome_of(const Run& run) {
  outcome result;
  run.net().read_on_host([&](const auto&) {
    for (const auto& entry : run.net().store().parameters()) {
      result.values.insert(result.values.end(), entry.thing->values().begin(), entry.thing->values().end());
    }
    for (const auto& entry : run.net().store().buffer_entries()) {
      result.buffers.insert(result.buffers.end(), entry.thing->values().begin(), entry.thing->values().end());
    }
  });
  for (const pf::epoch_result& epoch : run.history()) {
    result.losses.insert(result.losses.end(), {epoch.train_loss, epoch.test_loss});
    result.accuracies.insert(result.accuracies.end(), {epoch.train_accuracy, epoch.test_accuracy});
  }
  return result;
}

inline void check_same(const outcome& a, const outcome& b) {
  CHECK(a.values == b.values);
  CHECK(a.buffers == b.buffers);
  CHECK(a.losses == b.losses);
  CHECK(a.accuracies == b.accuracies);
}
inline void check_close(const outcome& a, const outcome& b, double tolerance) {
  CHECK(difference(a.values, b.values) < tolerance);
  CHECK(difference(a.buffers, b.buffers) < tolerance);
  CHECK(difference(a.losses, b.losses) < tolerance);
  CHECK(difference(a.accuracies, b.accuracies) < 0.06);  // one image of the smaller set
}

/// Convolutions with batch norm, a residual block and dropout.
template <class Device, class T = float>
pf::network<T, Device> tiny_images(pf::index_t width = 6) {
  using namespace pf;
  Sequential<T, Device> layers;
  layers.add("conv1", Conv<T>(conv_shape::square(1, width, 3, 1, 1), false));
  layers.add("bn1", BatchNorm<T>(width));
  layers.add("relu1", ReLU<T>());
  Sequential<T, Device> branch;
  branch.add("conv1", Conv<T>(conv_shape::square(width, width, 3, 1, 1), false));
  branch.add("bn1", BatchNorm<T>(width));
  layers.add("block", Residual<T, Device>(std::move(branch)));
  layers.add("pool", GlobalAvgPool<T>());
  layers.add("hidden", Linear<T>(width, 2 * width));
  layers.add("relu3", ReLU<T>());
  layers.add("drop", Dropout<T>(0.1));
  layers.add("fc", Linear<T>(2 * width, 4));
  network<T, Device> net{any_layer<T, Device>(std::move(layers))};
  net.initialize(5);
  return net;
}

/// Tests make runs of each of these, on any device and with any communicator. T: what networks on a device
/// compute in.
template <class T = float>
struct image_case {
  pf::image_set train = train_support::quadrants(54, 1), test = train_support::quadrants(20, 2);

  static pf::training_options options() {
    pf::training_options o = train_support::small_options();
    o.epochs = 4;
    o.warmup_epochs = 2;
    o.batch = 12;  // five steps, the last one of six images
    o.augment.pad_crop = 1;
    o.augment.flip = true;
    o.smoothing.epsilon = 0.1;
    return o;
  }
  template <class Device, class Comm>
  using run_type = pf::procedure<computing_t<T, Device>, Comm, Device>;
  template <class Device, class Comm>
  run_type<Device, Comm> make(Comm& comm, const pf::training_options& o = options(),
                              const typename run_type<Device, Comm>::machine_options& machine = {}) const {
    return run_type<Device, Comm>(tiny_images<Device, computing_t<T, Device>>(), comm, train, test, o,
                                  machine);
  }
};

template <class T = float>
struct language_case {
  std::vector<std::int32_t> train = text(330, 1), test = text(90, 2);

  /// Sentences of a tiny language whose next word follows from the last, with a draw now and then.
  static std::vector<std::int32_t> text(index_t tokens, std::uint64_t seed) {
    std::vector<std::int32_t> result{1, 2};
    const pf::random_stream draws(seed, 5);
    std::uint64_t at = 0;
    while (static_cast<index_t>(result.size()) < tokens) {
      const std::int32_t before = result.back();
      const bool free = draws.word(at++) % 8 == 0;
      result.push_back(free ? static_cast<std::int32_t>(draws.word(at++) % 11) : (2 * before + 1) % 11);
    }
    return result;
  }
  static pf::run_options options() {
    pf::run_options o;
    o.epochs = 4;
    o.warmup_epochs = 2;
    o.factorize = pf::lstm_lm_policy();
    o.learning_rate = 2.0;
    o.rate_plateau.emplace(2.0);
    o.switch_rate_factor = 0.5;
    o.optimizer = pf::sgd_options{};
    o.clip_norm = 0.25;
    o.seed = 2;
    return o;
  }
  template <class Device>
  using task_type = pf::language_task<pf::lstm_lm<computing_t<T, Device>, Device>, Device>;
  template <class Device, class Comm>
  using run_type = pf::training_run<task_type<Device>, Comm>;
  template <class Device, class Comm>
  run_type<Device, Comm> make(Comm& comm, const pf::run_options& o = options(),
                              const typename run_type<Device, Comm>::machine_options& machine = {}) const {
    typename task_type<Device>::model_type net{pf::lstm_lm<computing_t<T, Device>, Device>({11, 12, 2, 0.2})};
    net.initialize(3);
    // Segments of 12 tokens, the last one of 5.
    task_type<Device> task(net, train, test, {5, 12, 3}, comm.rank(), comm.size());
    return run_type<Device, Comm>(std::move(net), comm, std::move(task), o, machine);
  }
};

struct translation_case {
  pf::sentence_pairs train = pairs(30, 1), test = pairs(9, 2);

  /// Sentences of a few words, and the same backwards.
  static pf::sentence_pairs pairs(index_t count, std::uint64_t seed) {
    pf::sentence_pairs result;
    const pf::random_stream draws(seed, 6);
    std::uint64_t at = 0;
    for (index_t i = 0; i < count; ++i) {
      std::vector<std::int32_t> words(1 + draws.word(at++) % 4);
      for (std::int32_t& word : words) word = static_cast<std::int32_t>(4 + draws.word(at++) % 7);
      result.source.push_back(words);
      std::reverse(words.begin(), words.end());
      result.target.push_back(words);
    }
    return result;
  }
  static pf::run_options options() {
    pf::run_options o;
    o.epochs = 7;
    o.warmup_epochs = 1;
    o.factorize = pf::transformer_policy(0);
    o.learning_rate = 2e-3;
    o.optimizer = pf::adam_options{};
    o.seed = 3;
    return o;
  }
  template <class Device>
  using task_type = pf::translation_task<float, Device>;
  template <class Device>
  static typename task_type<Device>::model_type model() {
    pf::transformer_options shape;
    shape.vocabulary = 11;
    shape.width = 16;
    shape.hidden = 24;
    shape.layers = 1;
    shape.heads = 2;
    shape.key = shape.value = 8;
    shape.positions = 12;
    shape.padding = pf::special_tokens{}.padding;
    typename task_type<Device>::model_type net{pf::transformer<float, Device>(shape)};
    net.initialize(3);
    return net;
  }
  template <class Device>
  task_type<Device> task(const typename task_type<Device>::model_type& net, std::uint64_t seed, int rank = 0,
                         int ranks = 1) const {
    pf::translation_task_options how;
    how.batch = 8;
    return task_type<Device>(net, train, test, how, seed, rank, ranks);
  }
  template <class Device, class Comm>
  using run_type = pf::training_run<task_type<Device>, Comm>;
  template <class Device, class Comm>
  run_type<Device, Comm> make(Comm& comm, const pf::run_options& o = options(),
                              const typename run_type<Device, Comm>::machine_options& machine = {}) const {
    auto net = model<Device>();
    auto own = task<Device>(net, o.seed, comm.rank(), comm.size());
    return run_type<Device, Comm>(std::move(net), comm, std::move(own), o, machine);
  }
};

/// A whole run, saved after `stop` steps. Saving averages the statistics of batch norm over ranks: runs that
/// are to have the same bits save at the same step.
template <class Run>
void run_and_save(Run& run, index_t stop, const std::string& path, pf::training_observer& seen) {
  while (!run.finished()) {
    if (run.total_steps() == static_cast<std::uint64_t>(stop)) run.save(path);
    run.advance(seen);
  }
}

template <class Device, class Case, class Comm, class Options, class... Machine>
outcome whole_run(const Case& of, Comm& comm, const Options& options, const Machine&... machine) {
  auto run = of.template make<Device>(comm, options, machine...);
  pf::training_observer nobody;
  run.run(nobody);
  CHECK(run.switched().has_value());
  return outcome_of(run);
}

}  // namespace gpu_test
