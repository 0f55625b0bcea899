// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Trains a small residual network on handwritten digits, dense and by the Pufferfish procedure, with several
// seeds each, on as many ranks as it is started with, and compares.
//   mpirun -n 2 build/examples/quickstart --json results.json --plot curves.svg

#include <ctime>

#include "common/progress.hpp"
#include "common/report.hpp"
#include "common/training.hpp"

namespace {

using namespace examples;
using pufferfish::training_mode;

struct options : common_options {
  index_t seeds = 3;
  model_choice model;
  double rank_ratio = 0.25;
  index_t first_layer = 4;
};

/// The results of one seed, on rank 0.
struct seed_result {
  std::vector<pufferfish::epoch_result> history;
  run_facts facts;
  index_t parameters = 0, macs = 0;
  double processor_ms = 0.0;  ///< per step of the final network: processor time of the rank
  double accuracy() const { return history.back().test_accuracy; }
};

/// Forwards everything to another observer, and measures the processor time of steps, summed over all threads
/// of this rank. Unlike time on the clock, it hardly depends on other programs on the same cores.
class processor_clock final : public pufferfish::training_observer {
 public:
  explicit processor_clock(pufferfish::training_observer& shown) : shown_(shown) {}
  void on_step(const pufferfish::training_position& at) override {
    const std::clock_t now = std::clock();
    // The first step of an epoch is not measured: it follows a test.
    if (at.step > 1) {
      spent_ += 1e3 * static_cast<double>(now - before_) / CLOCKS_PER_SEC;
      ++steps_;
    }
    shown_.on_step(at);
    before_ = std::clock();
  }
  void on_epoch(const pufferfish::epoch_result& epoch) override { shown_.on_epoch(epoch); }
  void on_switch(const pufferfish::switch_result& result) override {
    spent_ = 0.0;
    steps_ = 0;
    shown_.on_switch(result);
  }
  double ms_per_step() const { return steps_ > 0 ? spent_ / static_cast<double>(steps_) : 0.0; }

 private:
  pufferfish::training_observer& shown_;
  std::clock_t before_ = 0;
  double spent_ = 0.0;
  long steps_ = 0;
};

pufferfish::training_options recipe(const options& o, training_mode mode, index_t seed) {
  pufferfish::training_options t;
  t.mode = mode;
  t.epochs = o.epochs;
  t.warmup_epochs = o.warmup_epochs;
  t.factorize.rank = pufferfish::rank_ratio{o.rank_ratio};
  t.factorize.first_layer = o.first_layer;
  const auto epochs = static_cast<double>(o.epochs);
  t.learning_rate = o.lr;
  t.rate_schedule = pufferfish::linear_warmup(1.0, 0.1, pufferfish::cosine(epochs));
  t.optimizer = pufferfish::sgd_options{.momentum = 0.9, .nesterov = true, .weight_decay = 5e-4};
  t.batch = o.batch;
  t.augment.pad_crop = 1;
  t.seed = static_cast<std::uint64_t>(seed);
  return t;
}

template <class Comm>
seed_result train(const options& o, const data_set& data, Comm& comm, const console& out, training_mode mode,
                  index_t seed) {
  const extents<4> image{1, data.train.height, data.train.width, data.train.channels};
  pufferfish::network<float> net = build_model(o.model, image, data.train.classes);
  net.initialize(static_cast<std::uint64_t>(seed));
  check_epochs(o, {.mode = mode});
  check_switch(recipe(o, mode, seed), net);
  pufferfish::context_options machine;
  machine.threads = threads_for(o.threads, comm.size());
  pufferfish::procedure<float, Comm> run(std::move(net), comm, data.train, data.test, recipe(o, mode, seed),
                                         machine);
  progress shown(out, format("%-6s seed %td", pufferfish::to_string(mode), seed), o.batch);
  processor_clock clock(shown);
  const index_t bytes_before = run.exchange_bytes();
  run.run(clock);
  return {run.history(), facts_of(run, bytes_before), run.net().parameter_count(), run.net().macs(image),
          clock.ms_per_step()};
}

/// The results of all seeds of one mode.
struct mode_result {
  training_mode mode;
  std::vector<seed_result> seeds;

  template <class F>
  std::vector<double> each(F&& f) const {
    std::vector<double> values;
    for (const seed_result& seed : seeds) values.push_back(f(seed));
    return values;
  }
  bool low_rank() const { return mode != training_mode::dense; }
  std::vector<double> accuracies() const {
    return each([](const seed_result& s) { return s.accuracy(); });
  }
  /// Of the network at the end of the mode's training.
  double ms_per_step() const {
    return median(each([this](const seed_result& s) { return step_ms(s.history, low_rank()); }));
  }
  double waiting() const {
    return median(
        each([this](const seed_result& s) { return waiting_share(s.history, s.facts, low_rank()); }));
  }
  double processor_ms_per_step() const {
    return median(each([](const seed_result& s) { return s.processor_ms; }));
  }
  double switch_ms() const {
    return mean(
        each([](const seed_result& s) { return s.facts.switched ? s.facts.switched->milliseconds : 0.0; }));
  }
  double kept_energy() const {
    return mean(each([](const seed_result& s) {
      return s.facts.switched ? s.facts.switched->factors.kept_energy() : 1.0;
    }));
  }
};

std::string table_of(const std::vector<mode_result>& modes) {
  text_table table({"mode", "parameters", "MACs", "bytes/step", "ms/step", "waiting", "CPU ms/step",
                    "accuracy", "+-", "switch", "kept energy"});
  for (const mode_result& m : modes) {
    const seed_result& one = m.seeds.front();
    table.add({pufferfish::to_string(m.mode), grouped(one.parameters), grouped(one.macs),
               grouped(one.facts.bytes_after), format("%.2f", m.ms_per_step()),
               format("%.0f %%", 100.0 * m.waiting()), format("%.2f", m.processor_ms_per_step()),
               format("%.2f %%", mean(m.accuracies())), format("%.2f", standard_deviation(m.accuracies())),
               m.low_rank() ? format("%.1f ms", m.switch_ms()) : "-",
               m.low_rank() ? format("%.4f", m.kept_energy()) : "-"});
  }
  return table.str();
}

nlohmann::ordered_json to_json(const mode_result& m, const options& o, const std::string& data_set,
                               int ranks) {
  const seed_result& one = m.seeds.front();
  nlohmann::ordered_json runs = nlohmann::ordered_json::array();
  for (const seed_result& s : m.seeds) {
    nlohmann::ordered_json history = nlohmann::ordered_json::array();
    for (const auto& epoch : s.history) history.push_back(examples::to_json(epoch));
    runs.push_back({{"seed", runs.size() + 1}, {"accuracy", s.accuracy()}, {"history", history}});
    if (s.facts.switched) runs.back()["switch"] = examples::to_json(*s.facts.switched);
  }
  return {{"mode", pufferfish::to_string(m.mode)},
          {"parameters", one.parameters},
          {"macs", one.macs},
          {"bytes_per_step", one.facts.bytes_after},
          {"ms_per_step", m.ms_per_step()},
          {"waiting_share", m.waiting()},
          {"cpu_ms_per_step", m.processor_ms_per_step()},
          {"accuracy_mean", mean(m.accuracies())},
          {"accuracy_std", standard_deviation(m.accuracies())},
          {"kept_energy", m.kept_energy()},
          {"switch_ms", m.switch_ms()},
          {"data_set", data_set},
          {"model", o.model},
          {"rank_ratio", o.rank_ratio},
          {"first_layer", o.first_layer},
          {"epochs", o.epochs},
          {"warmup_epochs", o.warmup_epochs},
          {"batch", o.batch},
          {"ranks", ranks},
          {"threads", threads_for(o.threads, ranks)},
          {"runs", runs}};
}

/// The mean over the seeds, with a band from the lowest to the highest accuracy over the seeds.
curve curve_of(const mode_result& m) {
  const seed_result& one = m.seeds.front();
  curve c = to_curve(pufferfish::to_string(m.mode), one.history, one.facts);
  std::vector<std::vector<double>> seconds;
  for (const seed_result& s : m.seeds) seconds.push_back(to_curve("", s.history, s.facts).seconds);
  for (std::size_t e = 0; e < c.accuracy.size(); ++e) {
    const auto accuracies = m.each([e](const seed_result& s) { return s.history[e].test_accuracy; });
    c.accuracy[e] = mean(accuracies);
    c.loss[e] = mean(m.each([e](const seed_result& s) { return s.history[e].test_loss; }));
    c.seconds[e] = 0.0;
    for (const std::vector<double>& of_seed : seconds) {
      c.seconds[e] += of_seed[e] / static_cast<double>(seconds.size());
    }
    c.lowest_accuracy.push_back(*std::min_element(accuracies.begin(), accuracies.end()));
    c.highest_accuracy.push_back(*std::max_element(accuracies.begin(), accuracies.end()));
  }
  return c;
}

template <class Comm>
void compare(const options& o, Comm& comm) {
  const console out(comm.rank(), o.json, o.progress);
  if (comm.rank() == 0) {
    for (const std::string& path : {o.json, o.plot}) check_writable(path);
  }
  const auto start = std::chrono::steady_clock::now();
  const data_set data = load_data("digits", o.data);
  out.line(format("digits: %td training and %td test images; %s, width %td, on %s with %s", data.train.count,
                  data.test.count, o.model.name.c_str(), o.model.width, counted(comm.size(), "rank").c_str(),
                  counted(threads_for(o.threads, comm.size()), "thread").c_str()));
  std::vector<mode_result> modes{{training_mode::dense, {}}, {training_mode::hybrid, {}}};
  for (mode_result& m : modes) {
    for (index_t seed = 1; seed <= o.seeds; ++seed) {
      m.seeds.push_back(train(o, data, comm, out, m.mode, seed));
    }
  }
  if (comm.rank() != 0) return;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  out.write("\n" + table_of(modes));
  out.line(format("accuracy: test set, after the last epoch, mean and deviation of %td seeds", o.seeds));
  out.line("bytes: payload of one gradient all-reduce");
  out.line("ms/step: on the clock; waiting: share of it that the exchange took after the backward pass");
  out.line("CPU ms/step: processor time of rank 0, without the time in which other programs had the cores");
  const mode_result &dense = modes[0], &hybrid = modes[1];
  const auto share = [](index_t part, index_t all) {
    return 100.0 * static_cast<double>(part) / static_cast<double>(all);
  };
  out.line(
      format("hybrid: %.1f %% of the parameters and bytes, %.1f %% of the MACs, %+.2f points of accuracy; "
             "%.0f s in all",
             share(hybrid.seeds[0].parameters, dense.seeds[0].parameters),
             share(hybrid.seeds[0].macs, dense.seeds[0].macs),
             mean(hybrid.accuracies()) - mean(dense.accuracies()), seconds.count()));
  nlohmann::ordered_json document = nlohmann::ordered_json::array();
  for (const mode_result& m : modes) document.push_back(to_json(m, o, data.name, comm.size()));
  write_json(o.json, document);
  if (!o.json.empty() && o.json != "-") out.line("results: " + o.json);
  const std::string title = format("Digits, %td seeds: mean, lowest and highest", o.seeds);
  const std::string drawn = plot_curves(o.plot, title, {curve_of(dense), curve_of(hybrid)});
  if (!drawn.empty()) out.line(drawn);
}

}  // namespace

int main(int argc, char** argv) {
  options o;
  CLI::App app("Trains a small residual network on digits, dense and by the Pufferfish procedure",
               "quickstart");
  o.batch = 64;
  o.model.width = 16;
  add_common_options(app, o,
                     {"Folder of the digits; empty: the bundled ones", "Images a step, over all ranks"});
  app.add_option("--seeds", o.seeds, "Runs of each mode")->check(CLI::Range(1, 1000));
  app.add_option("--width", o.model.width, "Channels of the first stage")->check(CLI::Range(1, 4096));
  app.add_option("--rank-ratio", o.rank_ratio, "Rank of a factorized layer, as a share of its full rank")
      ->check(CLI::Range(1e-6, 1.0));
  app.add_option("--first-layer", o.first_layer, "First factorized layer, counted from 1")
      ->check(CLI::Range(1, 1000));
  return run(app, argc, argv, [&](auto& comm) { compare(o, comm); });
}
