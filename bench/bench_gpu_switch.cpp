// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Times the switch, factorize() with the paper's choice of layers, on the processor and on a device in turns,
// there with each eigensolver: the paper's networks with random weights. Also reports the bytes copied
// between host and device, and the difference between the truncation errors of device and processor.
//
// Link with -Wl,--wrap=cudaMemcpy,--wrap=cudaMemcpyAsync, which makes copies countable.

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/gpu.hpp>
#ifdef PUFFERFISH_BENCH_CUSOLVER
#include <pufferfish/gpu/cusolver.hpp>
#endif
#include <pufferfish/models/imagenet_resnet.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/resnet.hpp>
#include <pufferfish/models/transformer.hpp>
#include <pufferfish/models/vgg.hpp>
#include <pufferfish/nn.hpp>

#include "common/report.hpp"
#include "common/timing.hpp"

namespace {

using namespace bench;
namespace pf = pufferfish;
using pf::index_t;
using pf::device::cpu;
using pf::device::gpu;

// ---------------------------------------------------------------------------------------------------------
// Copies

struct copy_counts {
  std::size_t to_host = 0, to_device = 0;  // bytes

  void add(std::size_t bytes, cudaMemcpyKind direction) {
    if (direction == cudaMemcpyDeviceToHost) to_host += bytes;
    if (direction == cudaMemcpyHostToDevice) to_device += bytes;
  }
};

copy_counts copied;

}  // namespace

// The linker redirects the program's calls of cudaMemcpy to these functions.
extern "C" {
cudaError_t __real_cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind direction);
cudaError_t __real_cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind direction,
                                   cudaStream_t stream);

cudaError_t __wrap_cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind direction) {
  copied.add(bytes, direction);
  return __real_cudaMemcpy(to, from, bytes, direction);
}
cudaError_t __wrap_cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind direction,
                                   cudaStream_t stream) {
  copied.add(bytes, direction);
  return __real_cudaMemcpyAsync(to, from, bytes, direction, stream);
}
}

namespace {

// ---------------------------------------------------------------------------------------------------------
// Settings

struct settings {
  std::vector<std::string> models;   // none: all
  std::vector<std::string> solvers;  // none: all that the program has
  index_t shrink = 1;
  int threads = 1;
  int runs = 5;
  std::string json_file;
};

/// An eigensolver, and the options that choose it.
struct solver {
  std::string name;
  pf::gpu::svd_settings how;
};

std::vector<std::string> solver_names() {
  std::vector<std::string> names{"host"};
#ifdef PUFFERFISH_BENCH_CUSOLVER
  names.push_back("cusolver");
#endif
  return names;
}

/// The solvers that the user asked for.
class solvers {
 public:
  explicit solvers(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      pf::gpu::svd_settings how;
#ifdef PUFFERFISH_BENCH_CUSOLVER
      if (name == "cusolver") how.solver = &cusolver_.emplace();
#endif
      all_.push_back({name, how});
    }
  }
  solvers(const solvers&) = delete;
  solvers& operator=(const solvers&) = delete;

  const std::vector<solver>& all() const { return all_; }

 private:
#ifdef PUFFERFISH_BENCH_CUSOLVER
  std::optional<pf::gpu::cusolver_eigensolver> cusolver_;
#endif
  std::vector<solver> all_;
};

// ---------------------------------------------------------------------------------------------------------
// Measuring

/// One way to switch a network.
struct candidate {
  std::string name;
  std::vector<double> seconds;
  pf::factorization result;
  copy_counts copies;  // of one switch
};

/// sqrt(sum of ||A - up down||^2 / sum of ||A||^2) over all factorized matrices.
double relative_error(const pf::factorization& of) {
  double lost = 0, all = 0;
  for (const pf::factor_report& layer : of.layers) {
    lost += layer.truncation_error * layer.truncation_error;
    all += layer.squared_norm;
  }
  return all > 0 ? std::sqrt(lost / all) : 0;
}

/// The largest difference of the relative truncation errors of any matrix. Throws if the two results
/// differ in layers or ranks.
double error_difference(const pf::factorization& a, const pf::factorization& b) {
  if (a.low_rank != b.low_rank || a.kept_dense != b.kept_dense || a.layers.size() != b.layers.size()) {
    throw std::runtime_error("the device has chosen other layers or ranks than the processor");
  }
  double most = 0;
  for (std::size_t i = 0; i < a.layers.size(); ++i) {
    most = std::max(most, std::abs(a.layers[i].relative_error - b.layers[i].relative_error));
  }
  return most;
}

/// Number of elements of the decomposed weights.
index_t weight_elements(const pf::factorization& of) {
  index_t sum = 0;
  for (const pf::factor_report& layer : of.layers) sum += layer.parameters_before;
  return sum;
}

class model_report {
 public:
  model_report(reporter& out, const settings& s, std::string model)
      : out_(out),
        settings_(s),
        model_(std::move(model)),
        table_({model_, "ms", "min..max", "speedup", "KiB to host", "KiB to device", "truncation error",
                "difference"}) {}

  void add(const candidate& one, const candidate& of_processor, bool on_device) {
    const spread time = spread_of(one.seconds), reference = spread_of(of_processor.seconds);
    const double difference = error_difference(one.result, of_processor.result);
    const pf::factorization& r = one.result;
    out_.record({{"kind", "switch"},
                 {"model", model_},
                 {"where", on_device ? "device" : "cpu"},
                 {"solver", one.name},
                 {"threads", settings_.threads},
                 {"shrink", settings_.shrink},
                 {"runs", one.seconds.size()},
                 {"ms", rounded(time.median * 1e3)},
                 {"ms_min", rounded(time.least * 1e3)},
                 {"ms_max", rounded(time.most * 1e3)},
                 {"layers", r.low_rank.size()},
                 {"matrices", r.layers.size()},
                 {"parameters_before", r.parameters_before},
                 {"parameters_after", r.parameters_after},
                 {"weight_bytes", weight_elements(r) * static_cast<index_t>(sizeof(float))},
                 {"bytes_to_host", one.copies.to_host},
                 {"bytes_to_device", one.copies.to_device},
                 {"relative_error", relative_error(r)},
                 {"error_difference", difference}});
    const auto kib = [&](std::size_t bytes) {
      return on_device ? format("%.1f", static_cast<double>(bytes) / 1024) : std::string("-");
    };
    table_.add({one.name, format("%.1f", time.median * 1e3),
                format("%.1f..%.1f", time.least * 1e3, time.most * 1e3),
                format("%.2f", reference.median / time.median), kib(one.copies.to_host),
                kib(one.copies.to_device), format("%.6f", relative_error(r)), format("%.1e", difference)});
  }

  void print(const pf::factorization& r) const {
    out_.text(table_.str() + format("%s of %s parameters left; %zu matrices, %.1f MiB\n\n",
                                    grouped(r.parameters_after).c_str(), grouped(r.parameters_before).c_str(),
                                    r.layers.size(),
                                    4.0 / (1 << 20) * static_cast<double>(weight_elements(r))));
  }

 private:
  reporter& out_;
  const settings& settings_;
  std::string model_;
  text_table table_;
};

/// `make<Device>()` returns the network on a device.
template <class Make>
void measure(reporter& out, const settings& s, const std::string& name, pf::factorize_policy policy,
             Make make) {
  policy.threads = s.threads;
  auto host_net = make.template operator()<cpu>();
  auto device_net = make.template operator()<gpu>();
  host_net.initialize(1);
  pf::copy_state(host_net, device_net);
  pf::gpu_context ctx;
  const solvers ways(s.solvers);

  candidate on_host{format("processor, %d thread%s", s.threads, s.threads == 1 ? "" : "s"), {}, {}, {}};
  std::vector<candidate> on_device;
  for (const solver& way : ways.all()) on_device.push_back({way.name, {}, {}, {}});
  // The first round is not timed: it allocates memory and loads kernels.
  for (int run = 0; run <= s.runs; ++run) {
    const auto time = [&](candidate& one, auto&& work) {
      const auto start = clock::now();
      one.result = work();
      const double seconds = seconds_since(start);
      if (run > 0) one.seconds.push_back(seconds);
    };
    {
      auto net = host_net;
      time(on_host, [&] { return pf::factorize(net, policy); });
    }
    for (std::size_t i = 0; i < on_device.size(); ++i) {
      auto net = device_net;
      copied = {};
      time(on_device[i], [&] {
        pf::factorization result = pf::factorize(net, policy, ctx, ways.all()[i].how);
        ctx.synchronize();
        return result;
      });
      on_device[i].copies = copied;
    }
  }

  model_report report(out, s, name);
  report.add(on_host, on_host, false);
  for (const candidate& one : on_device) report.add(one, on_host, true);
  report.print(on_host.result);
}

// ---------------------------------------------------------------------------------------------------------
// Networks

index_t part(index_t size, index_t shrink) { return std::max<index_t>(1, size / shrink); }

template <class Options>
Options narrowed(index_t shrink) {
  Options options;
  options.width = part(options.width, shrink);
  return options;
}

pf::lstm_lm_options narrowed_lstm(index_t shrink) {
  auto options = narrowed<pf::lstm_lm_options>(shrink);
  options.vocabulary = part(options.vocabulary, shrink);
  return options;
}

pf::transformer_options narrowed_transformer(index_t shrink) {
  auto options = narrowed<pf::transformer_options>(shrink);
  options.vocabulary = part(options.vocabulary, shrink);
  options.hidden = part(options.hidden, shrink);
  options.key = part(options.key, shrink);
  options.value = part(options.value, shrink);
  return options;
}

/// The names in the paper's order.
std::vector<std::string> model_names() {
  return {"vgg19", "resnet18", "resnet50", "wide_resnet50_2", "lstm", "transformer"};
}

void measure_models(reporter& out, const settings& s) {
  const auto one = [&](const std::string& name, const pf::factorize_policy& policy, auto make) {
    if (std::find(s.models.begin(), s.models.end(), name) == s.models.end()) return;
    measure(out, s, name, policy, make);
  };
  one("vgg19", pf::vgg19_policy(),
      [&]<class Device>() { return pf::vgg19<float, Device>(narrowed<pf::vgg19_options>(s.shrink)); });
  one("resnet18", pf::resnet18_policy(),
      [&]<class Device>() { return pf::resnet18<float, Device>(narrowed<pf::resnet18_options>(s.shrink)); });
  const auto imagenet = narrowed<pf::imagenet_resnet_options>(s.shrink);
  one("resnet50", pf::resnet50_policy(),
      [&]<class Device>() { return pf::resnet50<float, Device>(imagenet); });
  one("wide_resnet50_2", pf::wide_resnet50_2_policy(),
      [&]<class Device>() { return pf::wide_resnet50_2<float, Device>(imagenet); });
  one("lstm", pf::lstm_lm_policy(), [&]<class Device>() {
    using root = pf::lstm_lm<float, Device>;
    return pf::model<root, Device>{root(narrowed_lstm(s.shrink))};
  });
  one("transformer", pf::transformer_policy(), [&]<class Device>() {
    using root = pf::transformer<float, Device>;
    return pf::model<root, Device>{root(narrowed_transformer(s.shrink))};
  });
}

// ---------------------------------------------------------------------------------------------------------

std::string device_name() {
  cudaDeviceProp properties{};
  pf::gpu::check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  return properties.name;
}

void run(const settings& s) {
  reporter out(s.json_file);
  const std::string device = device_name();
  json machine = describe_machine();
  machine["kind"] = "machine";
  machine["device"] = device;
  out.record(machine);
  out.machine(s.threads);
  out.text(format("device: %s; random weights, fp32; a switch, median of %d runs%s\n\n", device.c_str(),
                  s.runs, s.shrink > 1 ? format("; networks %td times narrower", s.shrink).c_str() : ""));
  measure_models(out, s);
  out.text(
      "Speedup: of the median over the processor's. Truncation error: relative, of all factorized matrices "
      "together;\ndifference: of one matrix's from the processor's, the largest.\n");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Times the switch to low rank on a device and on the processor"};
  settings s;
  s.models = model_names();
  s.solvers = solver_names();
  app.option_defaults()->always_capture_default();
  app.add_option("--models", s.models, "Networks")->check(CLI::IsMember(model_names()));
  app.add_option("--solvers", s.solvers, "Eigensolvers of the device's factorize")
      ->check(CLI::IsMember(solver_names()));
  app.add_option("--shrink", s.shrink, "Factor by which the networks are narrower")->check(CLI::Range(1, 64));
  app.add_option("--threads", s.threads, "Threads of the processor")->check(CLI::Range(1, 4096));
  app.add_option("--runs", s.runs, "Timed switches of each network")->check(CLI::Range(1, 100000));
  app.add_option("--json", s.json_file,
                 "Write a JSON object for each network and solver to this file (-: standard output)");
  CLI11_PARSE(app, argc, argv);
  try {
    if (pf::gpu::device_count() == 0) {
      std::fputs("bench_gpu_switch: no CUDA device: nothing was measured\n", stderr);
      return 77;
    }
    run(s);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_gpu_switch: %s\n", e.what());
    return 1;
  }
  return 0;
}
