// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Trains an image classifier, dense or by the Pufferfish procedure, alone or on many ranks:
//   mpirun -n 4 build/examples/train_image_classifier --dataset mnist --data DIR --model small-resnet
//     --mode hybrid --checkpoint run.safetensors --resume --save model.safetensors --json results.json

#include <pufferfish/train/measure_statistics.hpp>
#include <pufferfish/weights/statistics.hpp>

#include "common/image_training.hpp"

namespace {

using namespace examples;

#if defined(PUFFERFISH_EXAMPLES_JPEG)
constexpr bool reads_folders = true;
#else
constexpr bool reads_folders = false;
#endif

struct options : image_options {
  procedure_options procedure;
  index_t first_layer = 2;
  std::string save_statistics;
  bool merge = false;
};

void add_options(CLI::App& app, options& o) {
  add_image_options(app, o, true, reads_folders);
  add_device_options(app, o.device);
  add_procedure_options(app, o.procedure);
  app.add_option("--first-layer", o.first_layer, "First factorized layer, counted from 1")
      ->check(CLI::Range(1, 100000));
  add_exchange_options(app, o.exchange);
  CLI::Option* save = add_file_options(app, o);
  app.add_option("--save-statistics", o.save_statistics,
                 "And what its weights met in 20 batches, for factorize_weights --statistics")
      ->needs(save);
  app.add_flag("--merge", o.merge, "Save it with its factors multiplied out: dense")->needs(save);
}

pufferfish::training_options recipe(const options& o) {
  pufferfish::training_options t;
  apply(o.procedure, o, t);
  t.factorize.first_layer = o.first_layer;
  apply(o, schedule_epochs(o, o.procedure), t);
  return t;
}

nlohmann::ordered_json options_json(const options& o, int ranks) {
  nlohmann::ordered_json j{{"data_set", o.data_set},
                           {"model", o.model},
                           {"mode", pufferfish::to_string(o.procedure.mode)},
                           {"rank_ratio", o.procedure.rank_ratio},
                           {"switch_rate", o.procedure.switch_rate},
                           {"restart_rate", restarts(o.procedure)},
                           {"switch", switch_json(o.procedure, o)},
                           {"first_layer", o.first_layer},
                           {"epochs", o.epochs},
                           {"warmup_epochs", o.warmup_epochs}};
  j.update(recipe_json(o, schedule_epochs(o, o.procedure), ranks));
  j["device"] = o.device.device;
  j["precision"] = o.device.precision;
  return j;
}

/// A training run with its checkpoints, on one of the ranks.
template <class T, class Device, class Comm>
class job {
 public:
  job(const options& o, Comm& comm)
      : o_(o),
        comm_(comm),
        set_(o, comm.rank()),
        run_(initial_network(), comm, set_.template images<T, Device>(o, true),
             set_.template images<T, Device>(o, false), recipe(o), machine()),
        kept_(o.checkpoints, run_, comm, set_.out) {}

  /// Returns the exit status.
  int train() {
    if (comm_.rank() == 0) check_files(o_.checkpoints, {o_.json, o_.plot}, {o_.save, o_.save_statistics});
    const costs before = costs_now();
    set_.out.line(format("%s on %s: %s parameters, %s MACs, %s; %s, %s each", o_.model.name.c_str(),
                         set_.data.name.c_str(), grouped(before.parameters).c_str(),
                         grouped(before.macs).c_str(), pufferfish::to_string(o_.procedure.mode),
                         counted(comm_.size(), "rank").c_str(),
                         counted(threads_for(o_.threads, comm_.size()), "thread").c_str()));
    for (const std::string& note : switch_notes(o_.procedure, o_, run_)) set_.out.line(note);
    run_display shown(set_.out, o_.model.name, o_.batch, o_.procedure.explain);
    const run_end end = kept_.train(shown);
    finish(before, end);
    return end.exit_status();
  }

 private:
  using run_type = pufferfish::procedure<T, Comm, Device>;

  pufferfish::network<T, Device> initial_network() const {
    auto net = set_.template network_of<T, Device>(o_);
    check_epochs(o_, o_.procedure);
    if constexpr (std::is_same_v<decltype(net), pufferfish::network<float>>) {
      check_switch(recipe(o_), net);
    } else {
      check_switch(recipe(o_), set_.network_of(o_));
    }
    return net;
  }

  auto machine() const {
    return machine_of(Device{}, o_.device, threads_for(o_.threads, comm_.size()), comm_.rank());
  }

  costs costs_now() const { return set_.costs_of(run_.net(), run_.exchange_bytes()); }

  void finish(const costs& before, const run_end& end) {
    if (comm_.rank() != 0) return;
    const costs after = costs_now();
    if (end.finished) {
      const pufferfish::epoch_result& last = run_.history().back();
      set_.out.line(
          format("test accuracy %.2f %%%s, loss %.4f; %s parameters, %s MACs, %s bytes a step; parameters %s",
                 last.test_accuracy, top5_text(last).c_str(), last.test_loss,
                 grouped(after.parameters).c_str(), grouped(after.macs).c_str(),
                 grouped(after.bytes_per_step).c_str(), digest_text(run_.net()).c_str()));
      if (!o_.save.empty()) save_network();
    }
    write_json(o_.json, document(before, after, end));
    const curve c = to_curve(o_.model.name, run_.history(), facts_of(run_, before.bytes_per_step));
    const std::string drawn = plot_curves(o_.plot, o_.model.name + " on " + set_.data.name, {c});
    if (!drawn.empty()) set_.out.line(drawn);
  }

  static std::string top5_text(const pufferfish::epoch_result& seen) {
    return seen.test_top5 > 0.0 ? format(" (top-5 %.2f %%)", seen.test_top5) : "";
  }

  void save_network() const {
    auto net = on_host(run_.net(), build_model(o_.model, set_.image, set_.classes()));
    if (o_.merge) pufferfish::merge(net);
    save_model(o_.save, net, set_.card_of(o_, run_.normalize(), pufferfish::to_string(o_.procedure.mode)));
    if (!o_.save_statistics.empty()) save_statistics(net);
  }

  /// Statistics of all dense layers, under the names of their weights. The running statistics of batch norms
  /// are those of the saved network, so `normalized` is not set.
  void save_statistics(pufferfish::network<float>& net) const {
    pufferfish::context<pufferfish::device::cpu> ctx({threads_for(o_.threads, 1)});
    pufferfish::image_task<float> task(net, set_.template images<float>(o_, true),
                                       set_.template images<float>(o_, false), recipe(o_), 0, 1);
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
    nlohmann::ordered_json j;
    j["options"] = options_json(o_, comm_.size());
    j["accuracy"] = nullptr;
    if (!run_.history().empty()) {
      const pufferfish::epoch_result& last = run_.history().back();
      j["accuracy"] = last.test_accuracy;
      if (last.test_top5 > 0.0) j["top5_accuracy"] = last.test_top5;
    }
    kept_.add_results(j, before, after, o_.exchange, end);
    return j;
  }

  const options& o_;
  Comm& comm_;
  image_setting set_;
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
