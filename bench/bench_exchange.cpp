// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Times the gradient exchange over MPI on all ranks: all-reduces of many sizes with every algorithm, and
// training steps of ResNet-18 with every compressor, compared with the same steps without exchange. Rank 0
// prints. bench/testbed runs it between hosts with a known link; mpirun runs it anywhere.

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

#include <pufferfish/compress/compression.hpp>
#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/distributed/mpi_environment.hpp>
#include <pufferfish/distributed/tune.hpp>

#include "../examples/common/exchange_choice.hpp"
#include "../examples/common/session.hpp"
#include "common/networks.hpp"
#include "common/report.hpp"
#include "common/timing.hpp"

namespace {

using namespace bench;
namespace pf = pufferfish;
using communicator = pf::mpi::communicator;

struct settings {
  std::vector<std::string> only{"allreduce", "buckets", "step"};
  std::vector<long> sizes;
  std::vector<std::string> modes{"dense", "hybrid"};
  std::vector<std::string> compressors{"none", "bf16", "fp16", "powersgd-r4", "signum"};
  std::string network = "resnet18";
  index_t batch = 32;
  int threads = 1;
  int runs = 30;
  double seconds = 20;
  double goodput_mbit = 0;
  double skew_ms = 0;
  bool tune = true;
  std::string json_file;

  bool wants(const std::string& kind) const { return std::ranges::find(only, kind) != only.end(); }
};

/// The smallest value such that at least a share `share` of the values is not above it.
double quantile(std::vector<double> values, double share) {
  std::ranges::sort(values);
  const double at = std::ceil(share * static_cast<double>(values.size())) - 1;
  return values[static_cast<std::size_t>(std::clamp(at, 0.0, static_cast<double>(values.size() - 1)))];
}

double median(const std::vector<double>& values) { return spread_of(values).median; }

/// Milliseconds of processor time that this process has used, all threads together.
double processor_ms() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto ms = [](const timeval& t) {
    return 1e3 * static_cast<double>(t.tv_sec) + 1e-3 * static_cast<double>(t.tv_usec);
  };
  return ms(used.ru_utime) + ms(used.ru_stime);
}

/// Number of repetitions for work that took `seconds` on the slowest rank; the same on all ranks.
int agreed_runs(communicator& comm, const settings& s, double seconds) {
  comm.all_reduce_max(std::span<double>(&seconds, 1));
  const double fitting = s.seconds / std::max(seconds, 1e-6);
  return static_cast<int>(std::clamp<double>(fitting, std::min(5, s.runs), s.runs));
}

/// The values of the slowest rank, for each measurement.
std::vector<double> slowest(communicator& comm, std::vector<double> values) {
  comm.all_reduce_max(std::span<double>(values));
  return values;
}

// ---- all-reduces

class all_reduces {
 public:
  all_reduces(communicator& comm, const settings& s, const pf::exchange_plan& plan, reporter& out)
      : comm_(comm), s_(s), plan_(plan), out_(out) {}

  void run() {
    text_table table({"all-reduce", "bytes", "ms", "p90", "min", "percent of the link", "percent, p90"});
    for (const long bytes : s_.sizes) {
      values_.assign(static_cast<std::size_t>(bytes) / sizeof(float), 0.0f);
      for (const auto a : algorithms_) check(a);
      const auto ms = measure();
      for (std::size_t i = 0; i < algorithms_.size(); ++i) {
        const json row = row_of(algorithms_[i], bytes, ms[i]);
        out_.record(row);
        table.add({to_string(algorithms_[i]) + std::string(row["selected"] ? " (selected)" : ""),
                   grouped(bytes), format("%.3f", row["ms"].get<double>()),
                   format("%.3f", row["ms_p90"].get<double>()), format("%.3f", row["ms_min"].get<double>()),
                   shown(row["link_percent"]), shown(row["link_percent_p90"])});
      }
    }
    out_.text(table.str() + "\n");
  }

 private:
  static std::string shown(const json& percent) {
    return percent.is_null() ? "-" : format("%.1f", percent.get<double>());
  }

  /// Checks the sums: a benchmark of wrong sums would be worthless.
  void check(pf::all_reduce_algorithm a) {
    const auto mine = static_cast<float>(comm_.rank() + 1);
    for (std::size_t i = 0; i < values_.size(); ++i) values_[i] = mine * static_cast<float>(i % 1024);
    reduce(a);
    const float sum = static_cast<float>(comm_.size() * (comm_.size() + 1)) / 2;
    for (std::size_t i = 0; i < values_.size(); ++i) {
      if (values_[i] == sum * static_cast<float>(i % 1024)) continue;
      throw std::runtime_error(to_string(a) + std::string(" all-reduce: element ") + std::to_string(i) +
                               " of " + std::to_string(values_.size()) + " is wrong");
    }
    std::ranges::fill(values_, 0.0f);
  }

  void reduce(pf::all_reduce_algorithm a) {
    pf::all_reduce_by(a, comm_, std::span<float>(values_), scratch_);
  }

  /// Milliseconds by which rank `rank` starts late in a run; all ranks compute the same number.
  double lateness(int rank, int run) const {
    const pf::random_stream random(3, static_cast<std::uint64_t>(rank));
    return s_.skew_ms * random.uniform(static_cast<std::uint64_t>(run));
  }

  /// Milliseconds since the last rank has started.
  double once(pf::all_reduce_algorithm a, int run) {
    double last = 0;
    for (int rank = 0; rank < comm_.size(); ++rank) last = std::max(last, lateness(rank, run));
    const double mine = lateness(comm_.rank(), run);
    comm_.barrier();
    const auto start = clock::now();
    while (seconds_since(start) * 1e3 < mine) {
    }
    reduce(a);
    return seconds_since(start) * 1e3 - last;
  }

  /// The algorithms run in turns, so that disturbances affect all of them.
  std::vector<std::vector<double>> measure() {
    double round = 0;
    for (const auto a : algorithms_) round += once(a, 0) * 1e-3;
    const int runs = agreed_runs(comm_, s_, round);
    std::vector<std::vector<double>> ms(algorithms_.size());
    for (int run = 0; run < runs; ++run) {
      for (std::size_t i = 0; i < algorithms_.size(); ++i) ms[i].push_back(once(algorithms_[i], run));
    }
    for (auto& list : ms) list = slowest(comm_, std::move(list));
    return ms;
  }

  json row_of(pf::all_reduce_algorithm a, long bytes, const std::vector<double>& ms) const {
    const double ranks = comm_.size();
    const auto percent = [&](double t) -> json {
      if (s_.goodput_mbit <= 0) return nullptr;
      const double bits = 8 * 2 * (ranks - 1) / ranks * static_cast<double>(bytes);
      return rounded(100 * bits / (t * 1e-3) / (s_.goodput_mbit * 1e6));
    };
    const double middle = median(ms), p90 = quantile(ms, 0.9);
    return {{"kind", "allreduce"},
            {"algorithm", to_string(a)},
            {"selected", a == plan_.algorithm_for(static_cast<std::size_t>(bytes))},
            {"bytes", bytes},
            {"ranks", comm_.size()},
            {"ms", rounded(middle)},
            {"ms_p90", rounded(p90)},
            {"ms_min", rounded(quantile(ms, 0))},
            {"skew_ms", s_.skew_ms},
            {"runs", ms.size()},
            {"link_percent", percent(middle)},
            {"link_percent_p90", percent(p90)}};
  }

  communicator& comm_;
  const settings& s_;
  const pf::exchange_plan& plan_;
  reporter& out_;
  static constexpr std::array algorithms_{pf::all_reduce_algorithm::library, pf::all_reduce_algorithm::ring,
                                          pf::all_reduce_algorithm::recursive_doubling};
  std::vector<float> values_, scratch_;
};

// ---- training steps

/// The options of "none", of "powersgd-r4" (or another rank), or of the words after the examples' --compress,
/// such as "topk --compress-ratio 0.01". Throws runtime_error or value_error for other words.
pf::compression_options options_of(const std::string& words) {
  constexpr std::string_view power = "powersgd-r";
  if (words.starts_with(power) && words.size() > power.size() &&
      words.find_first_not_of("0123456789", power.size()) == words.npos) {
    pf::power_sgd_options power_sgd;
    power_sgd.rank = std::stol(words.substr(power.size()));
    return power_sgd;
  }
  CLI::App app;
  std::string name;
  examples::compressor_settings settings;
  app.add_option("name", name);
  examples::add_compressor_settings(app, settings);
  app.parse(words);
  return examples::compression_of(name, settings);
}

/// "bf16", "fp16", or words of options_of.
std::unique_ptr<pf::gradient_exchange<float, communicator>> make_exchange(const std::string& name,
                                                                          pf::parameter_store<float>& store,
                                                                          communicator& comm,
                                                                          const pf::exchange_plan& plan) {
  pf::exchange_options options;
  options.plan = plan;
  pf::compression_options compression;
  if (name == "bf16") {
    options.wire = pf::exchange_wire::bf16;
  } else if (name == "fp16") {
    options.wire = pf::exchange_wire::fp16;
  } else {
    compression = options_of(name);
  }
  return std::make_unique<pf::gradient_exchange<float, communicator>>(store, comm, options,
                                                                      pf::new_compressor(store, compression));
}

/// Times of one kind of step, one element per run.
struct step_times {
  std::vector<double> total, compute, encode, decode, update, processor;
};

class steps {
 public:
  steps(communicator& comm, const settings& s, const pf::exchange_plan& plan, reporter& out,
        const std::string& mode)
      : comm_(comm),
        s_(s),
        plan_(plan),
        out_(out),
        mode_(mode),
        step_(make_image_step(s.network, mode, s.batch, s.threads)) {}

  void run() {
    if (s_.wants("buckets")) buckets();
    if (s_.wants("step")) compare();
  }

 private:
  using exchange_type = pf::gradient_exchange<float, communicator>;

  /// One step, with or without exchange. All ranks start together.
  void once(exchange_type* exchange, step_times& times) {
    comm_.barrier();
    const double processor = processor_ms();
    const auto start = clock::now();
    step_->forward();
    if (exchange != nullptr) exchange->begin(step_->context());
    step_->backward();
    times.compute.push_back(seconds_since(start) * 1e3);
    step_->begin_update();
    if (exchange == nullptr) {
      const auto computed = clock::now();
      step_->update(0, static_cast<index_t>(step_->store().gradients().size()));
      times.update.push_back(seconds_since(computed) * 1e3);
    } else {
      // A bucket is updated while later buckets are still being exchanged.
      const pf::exchange_report before = exchange->report();
      exchange->finish(step_->context(),
                       [&](const pf::gradient_bucket& bucket) { step_->update(bucket.offset, bucket.size); });
      const pf::exchange_report& after = exchange->report();
      times.encode.push_back(after.encode_ms - before.encode_ms);
      times.decode.push_back(after.decode_ms - before.decode_ms);
      times.update.push_back(after.update_ms - before.update_ms);
    }
    times.total.push_back(seconds_since(start) * 1e3);
    times.processor.push_back(processor_ms() - processor);
  }

  /// Two steps, which allocate all memory; returns the seconds of the second.
  double warm_up(exchange_type* exchange) {
    step_times times;
    for (int i = 0; i < 2; ++i) once(exchange, times);
    return times.total.back() * 1e-3;
  }

  /// Steps with every compressor and steps without exchange run in turns.
  void compare() {
    std::vector<std::unique_ptr<exchange_type>> exchanges;
    double round = warm_up(nullptr);
    for (const std::string& name : s_.compressors) {
      exchanges.push_back(make_exchange(name, step_->store(), comm_, plan_));
      round += warm_up(exchanges.back().get());
      exchanges.back()->clear_report();
    }
    const int runs = agreed_runs(comm_, s_, round / static_cast<double>(1 + exchanges.size()));
    std::vector<step_times> times(exchanges.size());
    step_times alone;
    for (int run = 0; run < runs; ++run) {
      once(nullptr, alone);
      for (std::size_t i = 0; i < exchanges.size(); ++i) once(exchanges[i].get(), times[i]);
    }
    const double compute = median(slowest(comm_, alone.compute));
    const double processor = median(slowest(comm_, alone.processor));
    text_table table({mode_ + ", compressor", "payload bytes", "ms a step", "p90", "compute", "encode",
                      "exposed", "decode", "update", "processor ms"});
    for (std::size_t i = 0; i < exchanges.size(); ++i) {
      const json row = row_of(s_.compressors[i], *exchanges[i], times[i], compute, processor);
      out_.record(row);
      const auto number = [&](const char* field) { return format("%.1f", row[field].get<double>()); };
      table.add({s_.compressors[i], grouped(row["payload_bytes"].get<long>()), number("ms_per_step"),
                 number("ms_p90"), number("compute_ms"), number("encode_ms"), number("exposed_ms"),
                 number("decode_ms"), number("update_ms"), number("processor_ms")});
    }
    out_.text(table.str() + "\n");
  }

  json row_of(const std::string& compressor, const exchange_type& exchange, const step_times& times,
              double compute, double processor) {
    const auto middle_of = [&](const std::vector<double>& list) { return median(slowest(comm_, list)); };
    const std::vector<double> total = slowest(comm_, times.total);
    const double middle = median(total), encode = middle_of(times.encode), decode = middle_of(times.decode),
                 update = middle_of(times.update);
    // Processor time of the progress thread, over all steps since the warm-up.
    std::vector<double> thread{exchange.report().processor_ms / static_cast<double>(total.size())};
    thread = slowest(comm_, thread);
    return {{"kind", "step"},
            {"system", "ours"},
            {"network", s_.network},
            {"mode", mode_},
            {"compressor", compressor},
            {"ranks", comm_.size()},
            {"batch", s_.batch},
            {"threads", s_.threads},
            {"payload_bytes", exchange.payload_bytes()},
            {"ms_per_step", rounded(middle)},
            {"ms_p90", rounded(quantile(total, 0.9))},
            {"ms_min", rounded(quantile(total, 0))},
            {"runs", times.total.size()},
            {"compute_ms", rounded(compute)},
            {"encode_ms", rounded(encode)},
            // Cost of the exchange beyond its own work: waiting, and slower computation meanwhile.
            {"exposed_ms", rounded(middle - compute - encode - decode - update)},
            {"decode_ms", rounded(decode)},
            {"update_ms", rounded(update)},
            {"thread_processor_ms", rounded(thread[0])},
            {"processor_ms", rounded(middle_of(times.processor))},
            {"processor_compute_ms", rounded(processor)}};
  }

  /// The time when each bucket is complete, since the start of the step, without an exchange.
  struct readiness {
    std::vector<int> bucket_of, missing;
    std::vector<double> at;
    std::size_t released = 0;
    clock::time_point start;

    static void on_ready(void* object, const void*, int id) {
      auto& r = *static_cast<readiness*>(object);
      --r.missing[static_cast<std::size_t>(r.bucket_of[static_cast<std::size_t>(id)])];
      // Buckets are released in order.
      while (r.released < r.missing.size() && r.missing[r.released] <= 0) {
        r.at[r.released++] = seconds_since(r.start) * 1e3;
      }
    }
  };

  void buckets() {
    const std::vector<pf::gradient_bucket> cut = pf::cut_buckets(step_->store(), plan_.buckets);
    readiness ready;
    for (std::size_t b = 0; b < cut.size(); ++b) {
      ready.bucket_of.insert(ready.bucket_of.end(), static_cast<std::size_t>(cut[b].count),
                             static_cast<int>(b));
    }
    const int runs = agreed_runs(comm_, s_, warm_up(nullptr));
    std::vector<double> forward, compute, update;
    std::vector<std::vector<double>> at(cut.size());
    for (int run = 0; run < runs; ++run) {
      ready.missing.clear();
      for (const pf::gradient_bucket& b : cut) ready.missing.push_back(b.count);
      ready.at.assign(cut.size(), 0);
      ready.released = 0;
      comm_.barrier();
      ready.start = clock::now();
      step_->forward();
      forward.push_back(seconds_since(ready.start) * 1e3);
      {
        const auto listener = step_->context().on_gradient_ready(&readiness::on_ready, &ready);
        step_->backward();
      }
      compute.push_back(seconds_since(ready.start) * 1e3);
      const auto updating = clock::now();
      step_->begin_update();
      step_->update(0, static_cast<index_t>(step_->store().gradients().size()));
      update.push_back(seconds_since(updating) * 1e3);
      for (std::size_t b = 0; b < cut.size(); ++b) at[b].push_back(ready.at[b]);
    }
    json list = json::array();
    for (std::size_t b = 0; b < cut.size(); ++b) {
      list.push_back({{"bytes", cut[b].size * static_cast<index_t>(sizeof(float))},
                      {"ready_ms", rounded(median(slowest(comm_, at[b])))}});
    }
    const double forward_ms = median(slowest(comm_, forward)), compute_ms = median(slowest(comm_, compute));
    out_.record({{"kind", "buckets"},
                 {"network", s_.network},
                 {"mode", mode_},
                 {"batch", s_.batch},
                 {"ranks", comm_.size()},
                 {"threads", s_.threads},
                 {"runs", runs},
                 {"forward_ms", rounded(forward_ms)},
                 {"backward_ms", rounded(compute_ms - forward_ms)},
                 {"compute_ms", rounded(compute_ms)},
                 {"update_ms", rounded(median(slowest(comm_, update)))},
                 {"buckets", list}});
    out_.text(format("%s: forward %.1f ms, backward %.1f ms; %zu buckets\n\n", mode_.c_str(), forward_ms,
                     compute_ms - forward_ms, cut.size()));
  }

  communicator& comm_;
  const settings& s_;
  const pf::exchange_plan& plan_;
  reporter& out_;
  std::string mode_;
  std::unique_ptr<image_training_step> step_;
};

void run(communicator& comm, const settings& s) {
  reporter out(comm.rank() == 0 ? s.json_file : std::string(), comm.rank() != 0);
  out.machine(s.threads);
  out.text(format("%d ranks; times are the slowest rank's, medians over the runs\n\n", comm.size()));
  const pf::exchange_plan plan = s.tune ? pf::tune(comm) : pf::default_plan(comm.size());
  out.record({{"kind", "plan"}, {"tuned", s.tune}, {"ranks", comm.size()}, {"plan", to_text(plan)}});
  out.text(format("%s plan:\n%s\n", s.tune ? "tuned" : "default", to_text(plan).c_str()));
  if (s.wants("allreduce")) all_reduces(comm, s, plan, out).run();
  if (!s.wants("step") && !s.wants("buckets")) return;
  for (const std::string& mode : s.modes) steps(comm, s, plan, out, mode).run();
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Times all-reduces and training steps with a gradient exchange, over MPI", "bench_exchange"};
  settings s;
  for (long size = 4096; size <= (64L << 20); size *= 2) s.sizes.push_back(size);
  int ranks = 0;
  app.option_defaults()->always_capture_default();
  app.add_option("--only", s.only, "What to measure")->check(CLI::IsMember({"allreduce", "buckets", "step"}));
  app.add_option("--sizes", s.sizes, "All-reduces: bytes")->check(CLI::Range(4L, 1L << 31));
  app.add_option("--modes", s.modes, "Steps: dense, hybrid")->check(CLI::IsMember({"dense", "hybrid"}));
  app.add_option(
      "--compressors", s.compressors,
      "Steps: none, bf16, fp16, powersgd-rN, or what follows the examples' --compress as one argument");
  app.add_option("--network", s.network, "Steps: the network")->check(CLI::IsMember(image_network_names()));
  app.add_option("--batch", s.batch, "Steps: images a rank")->check(CLI::Range(1, 65536));
  app.add_option("--threads", s.threads, "Threads of a rank")->check(CLI::Range(1, 4096));
  app.add_option("--runs", s.runs, "Timed runs of each, at most")->check(CLI::Range(1, 100000));
  app.add_option(
      "--seconds", s.seconds,
      "Stop earlier: about so long for an all-reduce size, and for a compressor's steps (5 runs at least)");
  app.add_option("--goodput-mbit", s.goodput_mbit, "All-reduces: what the link carries, for percentages");
  app.add_option("--skew-ms", s.skew_ms,
                 "All-reduces: ranks begin at random moments within so long, as layers do");
  bool default_plan = false;
  app.add_flag("--default-plan", default_plan,
               "The plan for any network, not one that tune() makes for this");
  app.add_option("--ranks", ranks, "Number of ranks to require; fails for another number (0: any number)");
  app.add_option("--json", s.json_file,
                 "Write a JSON object for each measurement to this file (-: standard output)");
  constexpr double no_timeout = 0.0;
  const auto measure = [&](communicator& comm) {
    if (ranks != 0 && comm.size() != ranks) {
      throw std::runtime_error(format("%d ranks were asked for, MPI sees %d", ranks, comm.size()));
    }
    s.tune = !default_plan;
    run(comm, s);
  };
  // With MPI_THREAD_MULTIPLE, MPI's own sums block inside MPI; with SERIALIZED, they are started and tested.
  return examples::session::run_with_mpi(app, argc, argv, examples::launched_processes(), no_timeout, measure,
                                         pf::mpi::thread_level::multiple);
}
