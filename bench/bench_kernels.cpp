// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Times every different convolution of ResNet-18 and VGG-19 (CIFAR), dense and low-rank (a quarter of the
// output channels; the rank as a run-time number and, where compiled, in the type), forward and backward.
// Results are percentages of the least possible time (common/roofline.hpp): `percent` is the median run
// relative to the peak measured right before or after it, `best` the fastest run relative to the best peak of
// all. The two differ on a machine whose cores are shared.
//
// Directions of low-rank layers: `grad_weight` is a backward pass without the gradient of the input,
// `backward` a complete one, `grad_input` their difference.
//
// With --table measure, the program instead times every algorithm that can compute a pass, as the measured
// table of kernel choices does (linalg/kernel_choice.hpp), and prints the built-in choice and the fastest.

#include <CLI/CLI.hpp>

#include <cmath>
#include <map>
#include <utility>

#include <pufferfish/linalg/kernel_choice.hpp>

#include "../examples/common/session.hpp"
#include "common/conv_case.hpp"
#include "common/networks.hpp"
#include "common/report.hpp"
#include "common/timing.hpp"

namespace {

using namespace bench;

struct settings {
  int threads = 1;
  index_t batch = 128;
  int runs = 9;
  std::vector<std::string> networks{"resnet18", "vgg19"};
  std::string layer;
  bool low_rank_only = false;
  bool winograd = true;
  std::string table = "builtin";
  std::string json_file;
};

/// Candidates of one layer in one mode: their indices among those that run in turns.
struct mode_candidates {
  std::string mode;
  conv_work cost;
  std::size_t forward, grad_weight, other;  // other: grad_input of a dense layer, else backward
};

std::string shape_text(const conv_layer& layer, index_t rank) {
  const auto middle = rank > 0 ? format("%td->", rank) : std::string();
  return format("%td->%s%td %tdx%td/%td @%tdx%td", layer.shape.in_channels, middle.c_str(),
                layer.shape.out_channels, layer.shape.kernel.height, layer.shape.kernel.width,
                layer.shape.stride.height, layer.input[1], layer.input[2]);
}

std::vector<sample> difference(const std::vector<sample>& whole, const std::vector<sample>& part) {
  std::vector<sample> result;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    result.push_back({std::max(whole[i].seconds - part[i].seconds, 1e-9), whole[i].peak});
  }
  return result;
}

/// The samples of one direction as percent of the bound; each sample has its own peak.
struct measurement {
  std::vector<sample> samples;
  work cost;
  double least_seconds;  // of all samples

  measurement(std::vector<sample> s, const work& w)
      : samples(std::move(s)), cost(w), least_seconds(spread_of(seconds_of(samples)).least) {}
  // The time of `whole` minus that of `part`.
  measurement(const std::vector<sample>& whole, const std::vector<sample>& part, const work& w)
      : samples(difference(whole, part)),
        cost(w),
        least_seconds(
            std::max(1e-9, spread_of(seconds_of(whole)).least - spread_of(seconds_of(part)).least)) {}

  json summary(const bandwidth& b) const {
    std::vector<double> percent, bound, peak;
    for (const sample& s : samples) {
      const double least = cost.least_seconds(s.peak, b);
      percent.push_back(100.0 * least / s.seconds);
      bound.push_back(cost.operations / least * 1e-9);
      peak.push_back(s.peak);
    }
    const spread time = spread_of(seconds_of(samples));
    return {
        {"ms", rounded(time.median * 1e3)},
        {"gflops", rounded(cost.operations / time.median * 1e-9)},
        {"bound_gflops", rounded(spread_of(bound).median)},
        {"percent_of_bound", rounded(spread_of(percent).median)},
        {"percent_undisturbed", rounded(100.0 * cost.least_seconds(spread_of(peak).most, b) / least_seconds)},
        {"ms_min", rounded(least_seconds * 1e3)},
        {"ms_max", rounded(time.most * 1e3)},
        {"peak_gflops", rounded(spread_of(peak).median)}};
  }
};

/// Median over the rounds of the ratio of a round's time to that of `other`.
double ratio_to(const std::vector<sample>& samples, const std::vector<sample>& other) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < samples.size(); ++i) ratios.push_back(samples[i].seconds / other[i].seconds);
  return spread_of(std::move(ratios)).median;
}

/// Percent of the bound of the layers that the paper factorizes: mean and worst, by mode and direction.
class goals {
 public:
  void add(const std::string& mode, const std::string& direction, double percent, double best) {
    percents_[{mode, direction}].push_back(percent);
    best_[{mode, direction}].push_back(best);
  }
  std::string str() const {
    text_table table({"factorized layers, percent of bound", "direction", "geometric mean", "worst",
                      "best runs", "worst", "shapes"});
    for (const auto& [key, values] : percents_) {
      const std::vector<double>& best = best_.at(key);
      table.add({key.first, key.second, format("%.1f", mean_of(values)), format("%.1f", least_of(values)),
                 format("%.1f", mean_of(best)), format("%.1f", least_of(best)),
                 std::to_string(values.size())});
    }
    return table.str();
  }
  bool empty() const { return percents_.empty(); }

 private:
  static double mean_of(const std::vector<double>& values) {
    double logs = 0;
    for (double value : values) logs += std::log(value);
    return std::exp(logs / static_cast<double>(values.size()));
  }
  static double least_of(const std::vector<double>& values) {
    return *std::min_element(values.begin(), values.end());
  }

  std::map<std::pair<std::string, std::string>, std::vector<double>> percents_, best_;
};

class program {
 public:
  explicit program(settings s)
      : settings_(std::move(s)),
        ctx_({settings_.threads, 1, settings_.winograd}),
        meter_(settings_.threads) {}

  void run() {
    reporter out(settings_.json_file);
    out.machine(settings_.threads);
    const bandwidth b = meter_.measure();
    out.text(format("peak %.1f GFLOP/s, memory %.1f GB/s, last cache %.1f GB/s; batch %td, %d runs\n\n",
                    measure_peak(settings_.threads), b.memory * 1e-9, b.cache * 1e-9, settings_.batch,
                    settings_.runs));
    if (settings_.table == "measure") return compare_choices(out);
    for (const std::string& name : settings_.networks) {
      text_table table(
          {name, "shape", "mode", "direction", "ms", "GFLOP/s", "bound", "percent", "best", "ms min..max"});
      for (const conv_layer& layer : conv_layers(name)) {
        if (!settings_.layer.empty() && layer.name != settings_.layer) continue;
        measure(name, layer, table, out);
      }
      out.text(table.str() + "\n");
    }
    if (!goals_.empty()) out.text(goals_.str());
  }

 private:
  void measure(const std::string& network, const conv_layer& layer, text_table& table, reporter& out) {
    extents<4> input = layer.input;
    input[0] = settings_.batch;
    const index_t rank = layer.rank();
    const bandwidth b = meter_.measure(1);
    const auto dense = dense_case(ctx_, layer.shape, input);
    const auto dynamic = dynamic_case(ctx_, layer.shape, rank, input);
    const auto fixed = static_case(ctx_, layer.shape, rank, input);
    turns all(settings_.threads);
    std::vector<mode_candidates> modes;
    if (!settings_.low_rank_only) {
      modes.push_back({"dense", dense->cost(), all.add([&] { dense->forward(); }),
                       all.add([&] { dense->grad_weight(); }), all.add([&] { dense->grad_input(); })});
    }
    for (const auto& [mode, c] :
         {std::pair{"lowrank", dynamic.get()}, std::pair{"lowrank_static", fixed.get()}}) {
      if (c != nullptr) modes.push_back(low_rank_candidates(all, mode, *c));
    }
    all.run(settings_.runs);

    const auto dynamic_mode = std::find_if(modes.begin(), modes.end(),
                                           [](const mode_candidates& m) { return m.mode == "lowrank"; });
    for (const mode_candidates& m : modes) {
      const bool low_rank = m.mode != "dense";
      std::vector<std::pair<std::string, measurement>> directions;
      directions.push_back({"forward", {all.samples(m.forward), m.cost.forward()}});
      const std::vector<sample>& other = all.samples(m.other);
      const work grad_input = m.cost.grad_input();
      directions.push_back({"grad_input", low_rank
                                              ? measurement(other, all.samples(m.grad_weight), grad_input)
                                              : measurement(other, grad_input)});
      directions.push_back({"grad_weight", {all.samples(m.grad_weight), m.cost.grad_weight()}});
      if (low_rank) directions.push_back({"backward", {other, m.cost.backward()}});
      for (const auto& [direction, measured] : directions) {
        json object{{"network", network},
                    {"layer", layer.name},
                    {"mode", m.mode},
                    {"shape", shape_text(layer, low_rank ? rank : 0)},
                    {"direction", direction},
                    {"threads", settings_.threads},
                    {"isa", pufferfish::to_string(pufferfish::widest_isa())},
                    {"precision", "fp32"}};
        object.update(measured.summary(b));
        object["memory_gbs"] = rounded(b.memory * 1e-9);
        object["batch"] = settings_.batch;
        object["rank"] = low_rank ? rank : 0;
        object["layers"] = layer.count;
        object["factorized_layers"] = layer.factorized;
        if (m.mode == "lowrank_static" && direction == "forward") {
          object["to_dynamic"] = ratio_to(all.samples(m.forward), all.samples(dynamic_mode->forward));
        } else if (m.mode == "lowrank_static" && direction == "backward") {
          object["to_dynamic"] = ratio_to(all.samples(m.other), all.samples(dynamic_mode->other));
        }
        const double percent = object["percent_of_bound"].get<double>();
        const double best = object["percent_undisturbed"].get<double>();
        if (layer.factorized > 0) goals_.add(m.mode, direction, percent, best);
        table.add({layer.name, object["shape"].get<std::string>(), m.mode, direction,
                   format("%.3f", object["ms"].get<double>()), format("%.1f", object["gflops"].get<double>()),
                   format("%.1f", object["bound_gflops"].get<double>()), format("%.1f", percent),
                   format("%.1f", best),
                   format("%.3f..%.3f", object["ms_min"].get<double>(), object["ms_max"].get<double>())});
        out.record(object);
      }
    }
  }

  // Milliseconds of each algorithm in each of the rounds, for a key.
  using choice_times = std::map<std::string, std::vector<double>>;
  struct measured_choices {
    std::string rule;
    choice_times times;
    std::map<std::string, int> chosen;  // rounds in which the table has chosen the algorithm
  };

  void compare_choices(reporter& out) {
    std::map<pufferfish::kernel_key, measured_choices> all;
    for (const std::string& name : settings_.networks) {
      for (const conv_layer& layer : conv_layers(name)) {
        if (!settings_.layer.empty() && layer.name != settings_.layer) continue;
        extents<4> input = layer.input;
        input[0] = settings_.batch;
        const auto dense = settings_.low_rank_only ? nullptr : dense_case(ctx_, layer.shape, input);
        const auto low_rank = dynamic_case(ctx_, layer.shape, layer.rank(), input);
        for (int round = 0; round < settings_.runs; ++round) {
          pufferfish::kernel_choices::measure();
          for (conv_case* c : {dense.get(), low_rank.get()}) {
            if (c == nullptr) continue;
            c->forward();
            c->prepare_backward();
            c->backward();
          }
          for (const auto& [key, row] : pufferfish::kernel_choices::rows()) {
            measured_choices& m = all[key];
            m.rule = row.times.front().algorithm;
            ++m.chosen[row.chosen];
            for (const auto& time : row.times) m.times[time.algorithm].push_back(time.milliseconds);
          }
        }
      }
    }
    text_table table({"built-in", "ms", "fastest", "ms", "ratio", "chosen", "operation", "shape"});
    for (const auto& [key, m] : all) {
      const double rule = spread_of(m.times.at(m.rule)).median;
      std::string fastest = m.rule;
      for (const auto& [algorithm, times] : m.times) {
        if (spread_of(times).median < spread_of(m.times.at(fastest)).median) fastest = algorithm;
      }
      const double least = spread_of(m.times.at(fastest)).median;
      int rounds = 0;
      for (const auto& [algorithm, count] : m.chosen) rounds += count;
      const auto found = m.chosen.find(fastest);
      const int chosen = found == m.chosen.end() ? 0 : found->second;
      table.add({m.rule, format("%.3f", rule), fastest, format("%.3f", least), format("%.2f", least / rule),
                 format("%d of %d", chosen, rounds), key.operation, key.shape});
      json object{{"operation", key.operation},
                  {"type", key.type},
                  {"shape", key.shape},
                  {"threads", key.threads},
                  {"isa", key.isa},
                  {"builtin", m.rule},
                  {"builtin_ms", rounded(rule)},
                  {"fastest", fastest},
                  {"fastest_ms", rounded(least)},
                  {"chosen", chosen},
                  {"rounds", rounds}};
      out.record(object);
    }
    out.text(table.str());
  }

  static mode_candidates low_rank_candidates(turns& all, const char* mode, conv_case& c) {
    const auto prepare = [&c] { c.prepare_backward(); };
    return {mode, c.cost(), all.add([&c] { c.forward(); }), all.add([&c] { c.grad_weight(); }, prepare),
            all.add([&c] { c.backward(); }, prepare)};
  }

  settings settings_;
  pufferfish::cpu_context ctx_;
  bandwidth_meter meter_;
  goals goals_;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Times the convolutions of ResNet-18 and VGG-19, dense and low-rank, in every direction",
               "bench_kernels"};
  settings s;
  app.option_defaults()->always_capture_default();
  app.add_option("--threads", s.threads, "Threads")->check(CLI::Range(1, 4096));
  app.add_option("--batch", s.batch, "Images")->check(CLI::Range(1, 65536));
  app.add_option("--runs", s.runs, "Timed runs of everything")->check(CLI::Range(1, 100000));
  app.add_option("--network", s.networks, "Networks")->check(CLI::IsMember(image_network_names()));
  app.add_option("--layer", s.layer, "Only the layer of this name");
  app.add_flag("--lowrank", s.low_rank_only, "No dense layers");
  app.add_flag("!--direct", s.winograd, "Direct sums only, no Winograd");
  app.add_option("--table", s.table, "measure: compare the algorithms of each pass, built-in and fastest")
      ->check(CLI::IsMember({"builtin", "measure"}));
  app.add_option("--json", s.json_file,
                 "Write a JSON object for each measurement to this file (-: standard output)");
  return examples::run_on_first(app, argc, argv, [&] { program(std::move(s)).run(); });
}
