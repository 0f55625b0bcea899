// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Times one low-rank 3x3 convolution for batches of 1 to 256, for various widths (channels; the rank is a
// quarter) and for every rank from 4 to 256. The time should grow evenly, without jumps.

#include <CLI/CLI.hpp>

#include "../examples/common/session.hpp"
#include "common/conv_case.hpp"
#include "common/report.hpp"
#include "common/timing.hpp"

namespace {

using namespace bench;

struct settings {
  int threads = 1;
  int runs = 5;
  index_t rank_step = 1;
  std::vector<std::string> sweeps = {"batch", "width", "rank"};
  std::string json_file;
};

/// A square low-rank 3x3 convolution.
struct point {
  index_t value;  // of the varied quantity
  index_t batch, pixels, channels, rank;
};

std::vector<point> points_of(const std::string& sweep, index_t rank_step) {
  std::vector<point> result;
  if (sweep == "batch") {
    for (const index_t n : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256}) {
      result.push_back({n, n, 16, 128, 32});
    }
  } else if (sweep == "width") {
    for (index_t c = 16; c <= 256; c += 8) result.push_back({c, 32, 16, c, c / 4});
    for (index_t c = 288; c <= 512; c += 32) result.push_back({c, 32, 16, c, c / 4});
  } else {
    for (index_t r = 4; r <= 256; ++r) {
      if (r == 4 || r % rank_step == 0) result.push_back({r, 64, 8, 256, r});
    }
  }
  return result;
}

void run(const settings& s) {
  reporter out(s.json_file);
  out.machine(s.threads);
  pufferfish::cpu_context ctx({s.threads, 1});
  bandwidth_meter meter(s.threads);
  for (const std::string& sweep : s.sweeps) {
    text_table table({sweep, "shape", "direction", "ms", "GFLOP/s", "percent of bound"});
    const bandwidth b = meter.measure();
    for (const point& p : points_of(sweep, s.rank_step)) {
      const conv_shape shape = conv_shape::square(p.channels, p.channels, 3, 1, 1);
      const auto layer = dynamic_case(ctx, shape, p.rank, {p.batch, p.pixels, p.pixels, p.channels});
      turns all(s.threads);
      const std::size_t forward = all.add([&] { layer->forward(); });
      const std::size_t backward = all.add([&] { layer->backward(); }, [&] { layer->prepare_backward(); });
      all.run(s.runs);
      const std::pair<const char*, std::pair<std::size_t, work>> directions[] = {
          {"forward", {forward, layer->cost().forward()}},
          {"backward", {backward, layer->cost().backward()}}};
      for (const auto& [direction, measured] : directions) {
        const auto& samples = all.samples(measured.first);
        std::vector<double> percent;
        for (const sample& one : samples) {
          percent.push_back(100.0 * measured.second.least_seconds(one.peak, b) / one.seconds);
        }
        const double seconds = spread_of(seconds_of(samples)).median;
        const json object{{"sweep", sweep},
                          {"value", p.value},
                          {"batch", p.batch},
                          {"pixels", p.pixels},
                          {"channels", p.channels},
                          {"rank", p.rank},
                          {"direction", direction},
                          {"threads", s.threads},
                          {"isa", pufferfish::to_string(pufferfish::widest_isa())},
                          {"precision", "fp32"},
                          {"ms", seconds * 1e3},
                          {"gflops", rounded(measured.second.operations / seconds * 1e-9)},
                          {"percent_of_bound", rounded(spread_of(percent).median)}};
        out.record(object);
        table.add({std::to_string(p.value),
                   format("%td x %td->%td->%td @%tdx%td", p.batch, p.channels, p.rank, p.channels, p.pixels,
                          p.pixels),
                   direction, format("%.4f", seconds * 1e3), format("%.1f", object["gflops"].get<double>()),
                   format("%.1f", object["percent_of_bound"].get<double>())});
      }
    }
    out.text(table.str() + "\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Times a low-rank convolution against batch, width and rank", "bench_sweep"};
  settings s;
  app.option_defaults()->always_capture_default();
  app.add_option("--threads", s.threads, "Threads")->check(CLI::Range(1, 4096));
  app.add_option("--runs", s.runs, "Timed runs of everything")->check(CLI::Range(1, 100000));
  app.add_option("--sweep", s.sweeps, "What to vary")->check(CLI::IsMember(s.sweeps));
  app.add_option("--rank-step", s.rank_step, "Measure ranks that are multiples of this")
      ->check(CLI::Range(1, 256));
  app.add_option("--json", s.json_file,
                 "Write a JSON object for each measurement to this file (-: standard output)");
  return examples::run_on_first(app, argc, argv, [&] { run(s); });
}
