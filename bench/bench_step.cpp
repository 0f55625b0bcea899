// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Times whole training steps on random data, forward, loss, backward and optimizer: ResNet-18 and VGG-19 on
// CIFAR's images, the LSTM language model, the Transformer. The dense network and the network factorized with
// the paper's choice of layers run in turns.

#include <CLI/CLI.hpp>

#include "../examples/common/session.hpp"
#include "common/allocations.hpp"
#include "common/networks.hpp"
#include "common/report.hpp"
#include "common/resident.hpp"
#include "common/timing.hpp"

namespace {

using namespace bench;

struct settings {
  std::string network = "resnet18";
  std::vector<std::string> modes;  // none: the network's own
  index_t batch = 0;               // 0: the network's own
  int threads = 1;
  int runs = 7;
  bool measure_memory = true;
  std::string json_file;
};

constexpr int memory_steps = 10;

/// The measurements of one network.
struct mode_result {
  std::string mode;
  double growth_mib = 0;
  std::unique_ptr<training_step> step;
  std::size_t number = 0;       // index among those that run in turns
  long steady_allocations = 0;  // in the timed steps
  long steady_working_allocations = 0;

  json object(const settings& s, const std::vector<sample>& samples, const bandwidth& b) const {
    std::vector<double> percent, bound, peak;
    for (const sample& one : samples) {
      const double least = step->least_seconds(one.peak, b);
      bound.push_back(least);
      percent.push_back(100.0 * least / one.seconds);
      peak.push_back(one.peak);
    }
    const spread time = spread_of(seconds_of(samples));
    return {{"network", s.network},
            {"mode", mode},
            {"threads", s.threads},
            {"isa", pufferfish::to_string(pufferfish::widest_isa())},
            {"precision", mode.ends_with("_bf16") ? "bf16" : "fp32"},
            {"ms_per_step", rounded(time.median * 1e3)},
            {"peak_mib", rounded(growth_mib)},
            {"ms_min", rounded(time.least * 1e3)},
            {"ms_max", rounded(time.most * 1e3)},
            {"bound_ms", rounded(spread_of(bound).median * 1e3)},
            {"percent_of_bound", rounded(spread_of(percent).median)},
            {"percent_undisturbed", rounded(100.0 * spread_of(bound).least / time.least)},
            {"peak_gflops", rounded(spread_of(peak).median)},
            {"batch", s.batch},
            {"tokens", step->tokens()},
            {"items", step->items()},
            {"parameters", step->parameters()},
            {"working_mib", rounded(static_cast<double>(step->working_bytes()) / (1 << 20))},
            {"steady_allocations", steady_allocations},
            {"steady_working_allocations", steady_working_allocations}};
  }
};

void run(const settings& s) {
  reporter out(s.json_file);
  std::vector<mode_result> modes(s.modes.size());
  for (std::size_t i = 0; i < modes.size(); ++i) modes[i].mode = s.modes[i];
  for (mode_result& m : modes) {
    if (!s.measure_memory) continue;
    m.growth_mib = resident_growth_mib([&] {
      const auto step = make_training_step(s.network, m.mode, s.batch, s.threads);
      for (int i = 0; i < memory_steps; ++i) step->run();
    });
  }
  out.machine(s.threads);
  bandwidth_meter meter(s.threads);
  const bandwidth b = meter.measure();
  turns all(s.threads);
  for (mode_result& m : modes) {
    m.step = make_training_step(s.network, m.mode, s.batch, s.threads);
    long working = 0;
    m.number = all.add([&m, working]() mutable {
      const long before = allocations();
      m.step->run();
      const auto held = static_cast<long>(m.step->working_allocations());
      // Only the last step's counts are kept: the steps before it are the warm-up.
      m.steady_allocations = allocations() - before;
      m.steady_working_allocations = held - working;
      working = held;
    });
  }
  out.text(format("peak %.1f GFLOP/s, memory %.1f GB/s; %s, a step: %s; %d runs\n\n", measure_peak(s.threads),
                  b.memory * 1e-9, s.network.c_str(), modes.front().step->items().c_str(), s.runs));
  all.run(s.runs);
  text_table table({s.network, "parameters", "ms a step", "min..max", "bound ms", "percent", "growth MiB",
                    "tape+scratch MiB", "allocations a step"});
  double first = 0;
  std::string ratios;
  for (const mode_result& m : modes) {
    const json o = m.object(s, all.samples(m.number), b);
    out.record(o);
    const double median = o["ms_per_step"].get<double>();
    if (&m == &modes.front()) {
      first = median;
    } else {
      ratios += format("%s / %s: %.3f. ", m.mode.c_str(), modes.front().mode.c_str(), median / first);
    }
    table.add({m.mode, grouped(m.step->parameters()), format("%.1f", median),
               format("%.1f..%.1f", o["ms_min"].get<double>(), o["ms_max"].get<double>()),
               format("%.1f", o["bound_ms"].get<double>()),
               format("%.1f", o["percent_of_bound"].get<double>()),
               s.measure_memory ? format("%.0f", m.growth_mib) : "-",
               format("%.0f", o["working_mib"].get<double>()),
               format("%ld (arenas: %ld)", m.steady_allocations, m.steady_working_allocations)});
  }
  out.text(table.str());
  out.text(
      format("\n%sBound: %s only. Growth: most resident memory from before the network is made through "
             "%d steps.\n",
             ratios.c_str(), modes.front().step->tokens() > 0 ? "products" : "convolutions", memory_steps));
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Times training steps of a network, dense and factorized", "bench_step"};
  settings s;
  bool no_memory = false, recompute = false, direct = false, bf16 = false;
  app.option_defaults()->always_capture_default();
  app.add_option("--network", s.network, "Network")->check(CLI::IsMember(network_names()));
  app.add_option("--batch", s.batch,
                 "Images, sequences or pairs of a step; 0: 128, 20 (lstm), 32 (transformer)")
      ->check(CLI::Range(0, 65536));
  app.add_option("--modes", s.modes, "dense, hybrid, lowrank (default: dense and the paper's choice)")
      ->check(CLI::IsMember({"dense", "hybrid", "lowrank"}));
  app.add_option("--threads", s.threads, "Threads")->check(CLI::Range(1, 4096));
  app.add_option("--runs", s.runs, "Timed steps of each network")->check(CLI::Range(1, 100000));
  app.add_flag("--no-memory", no_memory,
               "Do not measure the growth of resident memory (ten more steps of each)");
  app.add_flag("--recompute", recompute,
               "Also the hybrid network whose inner activations are computed again in the backward pass");
  app.add_flag("--direct", direct,
               "Also image networks whose convolutions are all direct sums, without Winograd");
  app.add_flag("--bf16", bf16, "Also networks whose activations and gradients are bfloat16");
  app.add_option("--json", s.json_file,
                 "Write a JSON object for each network to this file (-: standard output)");
  return examples::run_on_first(app, argc, argv, [&] {
    s.measure_memory = !no_memory;
    if (s.batch == 0) s.batch = default_batch(s.network);
    if (s.modes.empty()) s.modes = default_modes(s.network);
    if (recompute) s.modes.push_back("hybrid_recompute");
    if (direct) s.modes.insert(s.modes.end(), {"dense_direct", "hybrid_direct"});
    if (bf16) {
      const std::vector<std::string> wide = s.modes;
      for (const std::string& mode : wide) s.modes.push_back(mode + "_bf16");
    }
    run(s);
  });
}
