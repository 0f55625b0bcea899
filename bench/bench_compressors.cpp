// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Times the computation of compressors in a step of ResNet-18, for any number of ranks, in one process:
// nothing is sent, and the blocks of other ranks are copies of this rank's. bench/scaling reads the output;
// it needs these times because the work of some compressors (Signum's votes) grows with the number of ranks.

#include <array>
#include <cstdint>
#include <span>

#include <CLI/CLI.hpp>

#include <pufferfish/compress/compression.hpp>
#include <pufferfish/core/random.hpp>
#include <pufferfish/models/resnet.hpp>
#include <pufferfish/nn/factorize.hpp>

#include "../examples/common/exchange_choice.hpp"
#include "../examples/common/session.hpp"
#include "common/report.hpp"
#include "common/timing.hpp"

namespace {

using namespace bench;
namespace pf = pufferfish;

struct settings {
  std::vector<std::string> modes{"dense", "hybrid"};
  std::vector<std::string> compressors{"powersgd-r4", "signum"};
  examples::compressor_settings codec;  // of all compressors but powersgd-rN
  std::vector<int> ranks{2, 8, 32, 128};
  int threads = 1;
  int runs = 9;
  std::string json_file;
};

pf::compression_options options_of(const std::string& name, const examples::compressor_settings& codec) {
  const std::string power = "powersgd-r";
  if (!name.starts_with(power)) return examples::compression_of(name, codec);
  pf::power_sgd_options options;
  options.rank = std::stoi(name.substr(power.size()));
  return options;
}

/// Replaces the exchange: the messages of all other ranks are copies of this rank's.
void fill(const pf::compressor_message<float>& message, int rank, int ranks) {
  const auto count = static_cast<std::size_t>(ranks), me = static_cast<std::size_t>(rank);
  if (message.sends_length) {
    message.gathered->resize(std::vector<std::size_t>(count, message.own.size()));
    for (std::size_t r = 0; r < count; ++r) std::ranges::copy(message.own, (*message.gathered)[r].begin());
  } else if (message.gathered != nullptr) {
    pf::rank_blocks& blocks = *message.gathered;
    for (std::size_t r = 0; r < count; ++r) {
      if (blocks.size(r) == blocks.size(me)) std::ranges::copy(blocks[me], blocks[r].begin());
    }
  }
  if (message.to_ranks == nullptr) return;
  const pf::rank_blocks& out = *message.to_ranks;
  for (std::size_t r = 0; r < count; ++r) std::ranges::copy(out[me], (*message.from_ranks)[r].begin());
}

/// Milliseconds of encoding and of decoding, summed over the rounds of a step.
std::array<double, 2> once(pf::any_compressor<float>& compressor, pf::cpu_context& ctx,
                           const pf::exchange_place& place, std::span<float> gradients, bool first) {
  std::array<double, 2> ms{};
  for (int round = 0; round < compressor.rounds(); ++round) {
    const auto start = clock::now();
    const auto message = compressor.encode(ctx, place, round, gradients);
    ms[0] += 1e3 * seconds_since(start);
    if (first || message.sends_length) fill(message, place.rank, place.ranks);
    const auto decoding = clock::now();
    compressor.decode(ctx, place, round, gradients);
    ms[1] += 1e3 * seconds_since(decoding);
  }
  return ms;
}

void measure(const settings& s, reporter& out, const std::string& mode, const std::string& name) {
  pf::network<float> net = pf::resnet18<float>();
  if (mode == "hybrid") pf::apply_ranks(net, pf::planned_ranks(net, pf::resnet18_policy()));
  const std::span<float> gradients = net.store().gradients();
  const std::vector<float> fresh = [&] {
    std::vector<float> values(gradients.size());
    pf::fill_normal(std::span<float>(values), 1e-3, pf::random_stream(1, 0));
    return values;
  }();
  pf::cpu_context ctx({.threads = s.threads});
  for (const int ranks : s.ranks) {
    auto compressor = *pf::new_compressor(net.store(), options_of(name, s.codec));
    compressor.start(0, ranks);
    std::vector<double> encode, decode, copy;
    for (int run = 0; run <= s.runs; ++run) {
      const auto start = clock::now();
      std::ranges::copy(fresh, gradients.begin());
      const double copy_ms = 1e3 * seconds_since(start);
      const auto step = static_cast<std::uint64_t>(run);
      const auto ms = once(compressor, ctx, {0, ranks, step}, gradients, run == 0);
      if (run == 0) continue;  // run 0 allocates memory and is not timed
      encode.push_back(ms[0]);
      decode.push_back(ms[1]);
      copy.push_back(copy_ms);
    }
    const json row{{"kind", "codec"},
                   {"network", "resnet18"},
                   {"mode", mode},
                   {"compressor", name},
                   {"ranks", ranks},
                   {"threads", s.threads},
                   {"runs", s.runs},
                   {"encode_ms", rounded(spread_of(encode).median)},
                   {"decode_ms", rounded(spread_of(decode).median)},
                   {"copy_ms", rounded(spread_of(copy).median)}};
    out.record(row);
    out.text(format("%s, %s, %d ranks: encode %.2f ms, decode %.2f ms\n", mode.c_str(), name.c_str(), ranks,
                    row["encode_ms"].get<double>(), row["decode_ms"].get<double>()));
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Times the computing of compressors, for any number of ranks", "bench_compressors"};
  settings s;
  examples::add_compressor_settings(app, s.codec);
  app.option_defaults()->always_capture_default();
  app.add_option("--modes", s.modes, "Networks")->check(CLI::IsMember({"dense", "hybrid"}));
  app.add_option("--compressors", s.compressors, "powersgd-rN, or the names of the examples' --compress");
  app.add_option("--ranks", s.ranks, "Numbers of ranks; Signum keeps 1.4 MB for each")
      ->check(CLI::Range(1, 65536));
  app.add_option("--threads", s.threads, "Threads")->check(CLI::Range(1, 4096));
  app.add_option("--runs", s.runs, "Timed runs of each")->check(CLI::Range(1, 100000));
  app.add_option("--json", s.json_file,
                 "Write a JSON object for each measurement to this file (-: standard output)");
  return examples::run_on_first(app, argc, argv, [&] {
    reporter out(s.json_file);
    out.machine(s.threads);
    for (const std::string& mode : s.modes) {
      for (const std::string& name : s.compressors) measure(s, out, mode, name);
    }
  });
}
