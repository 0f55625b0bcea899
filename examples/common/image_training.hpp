// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// What the programs that train image classifiers share: their options, the recipe of a run, data and output.

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <pufferfish/train/procedure.hpp>
#if defined(PUFFERFISH_EXAMPLES_JPEG)
#include <pufferfish/adapters/jpeg.hpp>
#endif

#include "kept_run.hpp"
#include "model_file.hpp"
#include "report.hpp"
#include "training.hpp"

namespace examples {

struct image_options : common_options {
  std::string data_set = "digits";
  model_choice model;
  std::string schedule = "cosine";
  std::vector<double> milestones;
  double lr_warmup = 1.0;
  double momentum = 0.9;
  bool plain_momentum = false;
  double weight_decay = 5e-4;
  bool decay_all = false;
  double label_smoothing = 0.0;
  double clip_norm = 0.0;
  index_t pad_crop = 0;
  bool reflect = false;
  bool flip = false;
  index_t image_size = 224;
  index_t image_resize = 256;
  double smallest_area = 0.08;
  int decode_threads = 0;
  std::uint64_t seed = 1;
  exchange_choice exchange;
  checkpoint_options checkpoints;
  std::string save;
};

/// Adds the options of images from a folder of JPEG files.
inline void add_folder_options(CLI::App& app, image_options& o, std::vector<option_use>& uses) {
  app.add_option("--image-size", o.image_size, "Height and width of the network's images")
      ->check(CLI::Range(1, 4096));
  app.add_option("--image-resize", o.image_resize,
                 "Shorter side of an image before its middle is cut out, in tests")
      ->check(CLI::Range(1, 8192));
  app.add_option("--smallest-area", o.smallest_area,
                 "Smallest share of an image in a random window, in training; 1: its middle")
      ->check(CLI::Range(0.001, 1.0));
  app.add_option("--decode-threads", o.decode_threads, "Threads that read images; 0: all")
      ->check(CLI::Range(0, 1024));
  for (const char* name : {"--image-size", "--image-resize", "--smallest-area", "--decode-threads"}) {
    uses.push_back({name, "--dataset", folder_set});
  }
}

/// Adds the options of data, network and recipe. `switches`: as common_texts::switches. `folders`: folders of
/// JPEG files are a data set, too. `uses`: options of the program that have an effect only with one value of
/// another option.
inline void add_image_options(CLI::App& app, image_options& o, bool switches, bool folders = false,
                              std::vector<option_use> uses = {}) {
  common_texts texts{"Folder of the data set, or of several by name; empty: the bundled digits",
                     "Images a step, over all ranks"};
  texts.switches = switches;
  add_common_options(app, o, texts);
  std::vector<std::string> sets = data_set_names();
  std::string known = "digits, mnist, fashion-mnist or cifar10";
  if (folders) {
    sets.emplace_back(folder_set);
    known += "; folder: DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg";
  }
  app.add_option("--dataset", o.data_set, known)->check(CLI::IsMember(sets));
  if (folders) add_folder_options(app, o, uses);
  add_model_options(app, o.model);
  app.add_option("--schedule", o.schedule, "Of the learning rate")
      ->check(CLI::IsMember({"cosine", "multistep", "constant"}));
  app.add_option("--milestones", o.milestones, "Epochs of multistep (default: at 1/2 and 3/4)")
      ->delimiter(',');
  app.add_option("--lr-warmup", o.lr_warmup, "Epochs in which the rate rises to its full value")
      ->check(check_not_negative);
  app.add_option("--momentum", o.momentum, "Of SGD, Nesterov's")->check(CLI::Range(0.0, 1.0));
  app.add_flag("--plain-momentum", o.plain_momentum, "Not Nesterov's");
  app.add_option("--weight-decay", o.weight_decay, "Of weights")->check(check_not_negative);
  app.add_flag("--decay-all", o.decay_all, "And of biases and normalisation");
  app.add_option("--label-smoothing", o.label_smoothing, "Share spread over all classes")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--clip-norm", o.clip_norm, "Largest gradient norm; 0: any")->check(check_not_negative);
  CLI::Option* crop = app.add_option("--pad-crop", o.pad_crop, "Largest shift of an image, in pixels")
                          ->check(CLI::Range(0, 1000));
  app.add_flag("--reflect", o.reflect, "Fill the border with the mirror image instead of black")->needs(crop);
  app.add_flag("--flip", o.flip, "Mirror images at random");
  app.add_option("--seed", o.seed, "Of everything random");
  uses.insert(uses.end(), {{"--milestones", "--schedule", "multistep"},
                           {"--blocks", "--model", "small-resnet"},
                           {"--stem-stride", "--model", "small-resnet"},
                           {"--no-batch-norm", "--model", "small-resnet", "small-vgg"}});
  refuse_without_effect(app, uses);
}

/// Adds the options of files. Returns that of --save.
inline CLI::Option* add_file_options(CLI::App& app, image_options& o) {
  add_checkpoint_options(app, o.checkpoints);
  return app.add_option("--save", o.save, "File for the trained network, for predict");
}

/// The schedule of the learning rate over `epochs` epochs.
inline pufferfish::schedule schedule_of(const image_options& o, double epochs) {
  pufferfish::schedule factor;
  if (o.schedule == "cosine") factor = pufferfish::cosine(epochs);
  if (o.schedule == "multistep") {
    factor = pufferfish::multi_step(o.milestones.empty() ? std::vector<double>{epochs / 2, 3 * epochs / 4}
                                                         : o.milestones);
  }
  if (o.lr_warmup > 0.0) factor = pufferfish::linear_warmup(o.lr_warmup, 0.1, factor);
  return factor;
}

/// Copies the recipe to the options of a run, with a schedule over `epochs` epochs.
inline void apply(const image_options& o, double epochs, pufferfish::training_options& t) {
  t.learning_rate = o.lr;
  t.rate_schedule = schedule_of(o, epochs);
  t.optimizer = pufferfish::sgd_options{o.momentum, 0.0, o.momentum > 0.0 && !o.plain_momentum,
                                        o.weight_decay, o.decay_all};
  t.smoothing.epsilon = o.label_smoothing;
  t.clip_norm = o.clip_norm;
  t.batch = o.batch;
  t.augment.pad_crop = o.pad_crop;
  t.augment.reflect = o.reflect;
  t.augment.flip = o.flip;
  if (o.data_set == folder_set) t.augment.smallest_area = o.smallest_area;
  t.seed = o.seed;
  apply(o.exchange, t);
}

/// The options of a run that stays dense.
inline pufferfish::training_options dense_recipe(const image_options& o) {
  pufferfish::training_options t;
  t.mode = pufferfish::training_mode::dense;
  t.epochs = o.epochs;
  t.divergence_steps = o.divergence_steps;
  apply(o, static_cast<double>(o.epochs), t);
  return t;
}

/// The recipe in JSON results.
inline nlohmann::ordered_json recipe_json(const image_options& o, double epochs, int ranks) {
  return {{"learning_rate", o.lr},
          {"schedule", schedule_of(o, epochs).describe()},
          {"momentum", o.momentum},
          {"nesterov", o.momentum > 0.0 && !o.plain_momentum},
          {"weight_decay", o.weight_decay},
          {"decay_all", o.decay_all},
          {"label_smoothing", o.label_smoothing},
          {"clip_norm", o.clip_norm},
          {"batch", o.batch},
          {"pad_crop", o.pad_crop},
          {"reflect", o.reflect},
          {"flip", o.flip},
          {"smallest_area", o.data_set == folder_set ? o.smallest_area : 1.0},
          {"seed", o.seed},
          {"ranks", ranks},
          {"threads", threads_for(o.threads, ranks)}};
}

/// Data and output of a program, on one of the ranks.
struct image_setting {
  image_setting(const image_options& o, int rank)
      : out(rank, o.json, o.progress),
        data(load_data(o.data_set, o.data)),
        image{1, data.train.height, data.train.width, data.train.channels} {
    if (data.name == folder_set) image = {1, o.image_size, o.image_size, 3};
  }

  console out;
  data_set data;
  extents<4> image;

  /// The network, initialized.
  template <class T = float, class Device = pufferfish::device::cpu>
  pufferfish::network<T, Device> network_of(const image_options& o) const {
    auto net = build_model<T, Device>(o.model, image, classes());
    net.initialize(o.seed);
    return net;
  }

  index_t classes() const { return static_cast<index_t>(data.classes.size()); }

  /// The training or the test images, for a run.
  template <class T, class Device = pufferfish::device::cpu>
  std::shared_ptr<const pufferfish::image_source<T, Device>> images([[maybe_unused]] const image_options& o,
                                                                    bool train) const {
#if defined(PUFFERFISH_EXAMPLES_JPEG)
    if (data.name == folder_set) {
      return std::make_shared<pufferfish::folder_images<T, Device>>(
          train ? data.train_files : data.test_files,
          pufferfish::folder_options{
              .size = o.image_size, .resize = o.image_resize, .threads = o.decode_threads});
    }
#endif
    return std::make_shared<pufferfish::images_in_memory<T, Device>>(train ? data.train : data.test);
  }

  model_card card_of(const image_options& o, const pufferfish::normalization& normalize,
                     const std::string& mode) const {
    model_card card;
    card.model = o.model;
    card.image = image;
    card.pixel_maximum = data.pixel_maximum;
    card.normalize = normalize;
    card.classes = data.classes;
    card.data_set = data.name;
    card.mode = mode;
    return card;
  }

  template <class T, class Device>
  costs costs_of(const pufferfish::network<T, Device>& net, index_t bytes_per_step) const {
    return {net.parameter_count(), net.macs(image), bytes_per_step};
  }
};

/// CPU machine of a rank.
template <class Comm>
pufferfish::context_options cpu_machine(const image_options& o, const Comm& comm) {
  return machine_of(pufferfish::device::cpu{}, {}, threads_for(o.threads, comm.size()), comm.rank());
}

/// Throws state_error, naming the first difference, unless a file was made with the same options. Options
/// that change no result may differ.
inline void check_same_options(const std::string& path, const nlohmann::ordered_json& stored,
                               const nlohmann::ordered_json& mine) {
  for (const auto& [name, value] : mine.items()) {
    if (name == "ranks" || name == "threads" || name == "levels" || stored.value(name, value) == value)
      continue;
    throw pufferfish::state_error(path + ": made with " + name + " " + stored[name].dump() +
                                  ", this run has " + value.dump());
  }
}

/// Whether a file is there, according to rank 0. Collective.
template <class Comm>
bool is_there(Comm& comm, const std::string& path) {
  return !pufferfish::detail::on_root(comm, [&] {
            return std::string(pufferfish::detail::is_regular_file(path) ? "yes" : "");
          }).empty();
}

/// A member of all entries, added.
inline double sum_of(const nlohmann::ordered_json& entries, const char* member) {
  double sum = 0.0;
  for (const nlohmann::ordered_json& one : entries) sum += one.at(member).get<double>();
  return sum;
}

}  // namespace examples
