// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Trains an image classifier, dense or by the Pufferfish procedure, alone or on many ranks:
//   mpirun -n 4 build/examples/train_image_classifier --dataset mnist --data DIR --model small-resnet
//     --mode hybrid --checkpoint run.safetensors --resume --save model.safetensors --json results.json

#include <pufferfish/train/measure_statistics.hpp>
#include <pufferfish/weights/statistics.hpp>

#include "common/kept_run.hpp"
#include "common/model_file.hpp"
#include "common/progress.hpp"
#include "common/report.hpp"
#include "common/training.hpp"

namespace {

using namespace examples;

struct options : common_options {
  std::string data_set = "digits";
  model_choice model;
  procedure_options procedure;
  index_t first_layer = 2;
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
  std::uint64_t seed = 1;
  exchange_choice exchange;
  checkpoint_options checkpoints;
  std::string save, save_statistics;
  bool merge = false;
};

void add_options(CLI::App& app, options& o) {
  add_common_options(app, o,
                     {"Folder of the data set, or of several by name; empty: the bundled digits",
                      "Images a step, over all ranks"});
  add_device_options(app, o.device);
  app.add_option("--dataset", o.data_set, "digits, mnist, fashion-mnist or cifar10")
      ->check(CLI::IsMember(data_set_names()));
  add_model_options(app, o.model);
  add_procedure_options(app, o.procedure);
  app.add_option("--first-layer", o.first_layer, "First factorized layer, counted from 1")
      ->check(CLI::Range(1, 100000));
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
  CLI::Option* crop = app.add_option("--pad-crop", o.pad_crop, "Shift images by up to so many pixels")
                          ->check(CLI::Range(0, 1000));
  app.add_flag("--reflect", o.reflect, "Fill the border with the mirror image instead of black")->needs(crop);
  app.add_flag("--flip", o.flip, "Mirror images at random");
  app.add_option("--seed", o.seed, "Of everything random");
  add_exchange_options(app, o.exchange);
  add_checkpoint_options(app, o.checkpoints);
  CLI::Option* save = app.add_option("--save", o.save, "File for the trained network, for predict");
  app.add_option("--save-statistics", o.save_statistics,
                 "And what its weights met in 20 batches, for factorize_weights --statistics")
      ->needs(save);
  app.add_flag("--merge", o.merge, "Save it with its factors multiplied out: dense")->needs(save);
  refuse_without_effect(app, {{"--milestones", "--schedule", "multistep"},
                              {"--blocks", "--model", "small-resnet"},
                              {"--stem-stride", "--model", "small-resnet"}});
}

pufferfish::schedule schedule_of(const options& o) {
  const double epochs = schedule_epochs(o, o.procedure);
  pufferfish::schedule factor;
  if (o.schedule == "cosine") factor = pufferfish::cosine(epochs);
  if (o.schedule == "multistep") {
    factor = pufferfish::multi_step(o.milestones.empty() ? std::vector<double>{epochs / 2, 3 * epochs / 4}
                                                         : o.milestones);
  }
  if (o.lr_warmup > 0.0) factor = pufferfish::linear_warmup(o.lr_warmup, 0.1, factor);
  return factor;
}

pufferfish::training_options recipe(const options& o) {
  pufferfish::training_options t;
  apply(o.procedure, o, t);
  t.factorize.first_layer = o.first_layer;
  t.learning_rate = o.lr;
  t.rate_schedule = schedule_of(o);
  t.optimizer = pufferfish::sgd_options{o.momentum, 0.0, o.momentum > 0.0 && !o.plain_momentum,
                                        o.weight_decay, o.decay_all};
  t.smoothing.epsilon = o.label_smoothing;
  t.clip_norm = o.clip_norm;
  t.batch = o.batch;
  t.augment.pad_crop = o.pad_crop;
  t.augment.reflect = o.reflect;
  t.augment.flip = o.flip;
  t.seed = o.seed;
  apply(o.exchange, t);
  return t;
}

nlohmann::ordered_json options_json(const options& o, int ranks) {
  return {{"data_set", o.data_set},
          {"model", o.model},
          {"mode", pufferfish::to_string(o.procedure.mode)},
          {"rank_ratio", o.procedure.rank_ratio},
          {"switch_rate", o.procedure.switch_rate},
          {"restart_rate", restarts(o.procedure)},
          {"switch", switch_json(o.procedure, o)},
          {"first_layer", o.first_layer},
          {"epochs", o.epochs},
          {"warmup_epochs", o.warmup_epochs},
          {"learning_rate", o.lr},
          {"schedule", schedule_of(o).describe()},
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
          {"seed", o.seed},
          {"ranks", ranks},
          {"threads", threads_for(o.threads, ranks)},
          {"device", o.device.device},
          {"precision", o.device.precision}};
}

/// A training run with its checkpoints, on one of the ranks.
template <class T, class Device, class Comm>
class job {
 public:
  job(const options& o, Comm& comm)
      : o_(o),
        comm_(comm),
        out_(comm.rank(), o.json, o.progress),
        data_(load_data(o.data_set, o.data)),
        image_{1, data_.train.height, data_.train.width, data_.train.channels},
        run_(initial_network(), comm, data_.train, data_.test, recipe(o), machine()),
        kept_(o.checkpoints, run_, comm, out_) {}

  /// Returns the exit status.
  int train() {
    if (comm_.rank() == 0) {
      if (!o_.checkpoints.resume) {
        check_new(o_.checkpoints.file, o_.checkpoints.overwrite, "--resume goes on from it, ");
      }
      for (const std::string& path : {o_.save, o_.save_statistics}) check_new(path, o_.checkpoints.overwrite);
      for (const std::string& path : {o_.json, o_.plot, o_.save, o_.save_statistics, o_.checkpoints.file}) {
        check_writable(path);
      }
    }
    const costs before = costs_now();
    out_.line(format("%s on %s: %s parameters, %s MACs, %s; %d ranks, %d threads each", o_.model.name.c_str(),
                     data_.name.c_str(), grouped(before.parameters).c_str(), grouped(before.macs).c_str(),
                     pufferfish::to_string(o_.procedure.mode), comm_.size(),
                     threads_for(o_.threads, comm_.size())));
    for (const std::string& note : switch_notes(o_.procedure, o_, run_)) out_.line(note);
    observer shown(*this);
    const run_end end = kept_.train(shown);
    finish(before, end);
    return end.exit_status();
  }

 private:
  using run_type = pufferfish::procedure<T, Comm, Device>;

  /// The progress display, and a table at the switch.
  class observer final : public pufferfish::training_observer {
   public:
    explicit observer(job& of) : job_(of), shown_(of.out_, of.o_.model.name, of.o_.batch) {}
    void on_step(const pufferfish::training_position& at) override { shown_.on_step(at); }
    void on_epoch(const pufferfish::epoch_result& epoch) override { shown_.on_epoch(epoch); }
    void on_switch(const pufferfish::switch_result& result) override {
      shown_.on_switch(result);
      if (job_.comm_.rank() == 0)
        job_.out_.write("\n" + switch_table(result.factors, job_.o_.procedure.explain) + "\n");
    }

   private:
    job& job_;
    progress shown_;
  };

  pufferfish::network<T, Device> initial_network() const {
    auto net = build_model<T, Device>(o_.model, image_, data_.train.classes);
    net.initialize(o_.seed);
    check_epochs(o_, o_.procedure);
    if constexpr (std::is_same_v<Device, pufferfish::device::cpu>) {
      check_switch(recipe(o_), net);
    } else {
      auto twin = build_model(o_.model, image_, data_.train.classes);
      twin.initialize(o_.seed);
      check_switch(recipe(o_), twin);
    }
    return net;
  }

  auto machine() const {
    return machine_of(Device{}, o_.device, threads_for(o_.threads, comm_.size()), comm_.rank());
  }

  costs costs_now() const {
    return {run_.net().parameter_count(), run_.net().macs(image_), run_.exchange_bytes()};
  }

  void finish(const costs& before, const run_end& end) {
    if (comm_.rank() != 0) return;
    const costs after = costs_now();
    if (end.finished) {
      const pufferfish::epoch_result& last = run_.history().back();
      out_.line(format(
          "test accuracy %.2f %%, loss %.4f; %s parameters, %s MACs, %s bytes a step; parameters %s",
          last.test_accuracy, last.test_loss, grouped(after.parameters).c_str(), grouped(after.macs).c_str(),
          grouped(after.bytes_per_step).c_str(), digest_text(run_.net()).c_str()));
      if (!o_.save.empty()) save_network();
    }
    write_json(o_.json, document(before, after, end));
    const curve c = to_curve(o_.model.name, run_.history(), facts_of(run_, before.bytes_per_step));
    const std::string drawn = plot_curves(o_.plot, o_.model.name + " on " + data_.name, {c});
    if (!drawn.empty()) out_.line(drawn);
  }

  void save_network() const {
    auto net = on_host(run_.net(), build_model(o_.model, image_, data_.train.classes));
    if (o_.merge) pufferfish::merge(net);
    model_card card;
    card.model = o_.model;
    card.image = image_;
    card.pixel_maximum = data_.pixel_maximum;
    card.normalize = run_.normalize();
    card.classes = data_.classes;
    card.data_set = data_.name;
    card.mode = pufferfish::to_string(o_.procedure.mode);
    save_model(o_.save, net, card);
    if (!o_.save_statistics.empty()) save_statistics(net);
  }

  /// Statistics of all dense layers, under the names of their weights. The running statistics of batch norms
  /// are those of the saved network, so `normalized` is not set.
  void save_statistics(pufferfish::network<float>& net) const {
    pufferfish::context<pufferfish::device::cpu> ctx({threads_for(o_.threads, 1)});
    pufferfish::image_task<float> task(net, data_.train, data_.test, recipe(o_), 0, 1);
    pufferfish::factorize_policy all;
    all.first_layer = 1;
    all.last_layer_dense = all.shortcuts_dense = false;
    pufferfish::network_statistics seen = pufferfish::measure_statistics(ctx, task, net, all);
    for (pufferfish::layer_statistics& layer : seen.layers) {
      layer.name += ".weight";
      layer.normalized = false;
    }
    std::erase_if(seen.layers, [](const auto& layer) { return !layer.matrices.front().has_rows(); });
    pufferfish::write_statistics(o_.save_statistics, std::move(seen));
  }

  nlohmann::ordered_json document(const costs& before, const costs& after, const run_end& end) const {
    nlohmann::ordered_json history = nlohmann::ordered_json::array();
    double seconds = 0.0;
    for (std::size_t e = 0; e < run_.history().size(); ++e) {
      history.push_back(examples::to_json(run_.history()[e]));
      history.back()["digest"] = kept_.digests()[e];
      seconds += run_.history()[e].seconds;
    }
    nlohmann::ordered_json j;
    j["options"] = options_json(o_, comm_.size());
    j["accuracy"] = nullptr;
    if (!run_.history().empty()) j["accuracy"] = run_.history().back().test_accuracy;
    j["before"] = examples::to_json(before);
    j["after"] = examples::to_json(after);
    j["exchange"] = exchange_json(o_.exchange, run_);
    j["ms_per_step_dense"] = step_ms(run_.history(), false);
    j["ms_per_step_low_rank"] = step_ms(run_.history(), true);
    j["seconds"] = seconds;
    j["digest"] = digest_text(run_.net());
    if (run_.switched()) j["switch"] = switch_result_json(run_);
    j.update(end.to_json());
    j["history"] = history;
    return j;
  }

  const options& o_;
  Comm& comm_;
  console out_;
  data_set data_;
  extents<4> image_;
  run_type run_;
  kept_run<run_type, Comm> kept_;
};

}  // namespace

int main(int argc, char** argv) {
  options o;
  CLI::App app("Trains an image classifier, dense or by the Pufferfish procedure", "train_image_classifier");
  add_options(app, o);
  return run(app, argc, argv, [&](auto& comm) {
    return on_device(o.device, comm.rank(), [&](auto device, auto number) {
      return job<decltype(number), decltype(device), std::decay_t<decltype(comm)>>(o, comm).train();
    });
  });
}
