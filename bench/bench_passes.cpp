// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Times the passes over memory between the convolutions of a training step, and a plain copy of as many
// elements in the same run. GB/s count each byte that a pass (or the copy) must read or write once. Depthwise
// convolutions are passes over memory as well; they are also compared with the measured bandwidth.

#include <pufferfish/nn.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "../examples/common/console.hpp"
#include "../examples/common/session.hpp"
#include "common/bandwidth.hpp"

#ifndef PUFFERFISH_BENCH_FLAGS
#define PUFFERFISH_BENCH_FLAGS "unknown"
#endif

namespace pf = pufferfish;
using pf::index_t;
using view2 = pf::tensor_view<float, 2>;
using view4 = pf::tensor_view<float, 4>;

namespace {

struct pass {
  std::string name;
  double units;  ///< memory that it moves, in activations
  std::function<void()> run;
};

/// The least time of each pass, in seconds. The passes run in turns, so that disturbances affect all.
std::vector<double> time_all(const std::vector<pass>& passes, int runs) {
  std::vector<std::vector<double>> seconds(passes.size());
  for (int run = 0; run <= runs; ++run) {
    for (std::size_t i = 0; i < passes.size(); ++i) {
      const auto begin = std::chrono::steady_clock::now();
      passes[i].run();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      if (run > 0) seconds[i].push_back(took.count());  // run 0 warms up
    }
  }
  std::vector<double> least;
  for (const auto& s : seconds) least.push_back(*std::min_element(s.begin(), s.end()));
  return least;
}

/// All passes over one activation of `images` images with size x size pixels.
nlohmann::json measure(int threads, index_t images, index_t size, index_t channels, int runs) {
  pf::cpu_context ctx({threads, 1});
  const pf::extents<4> shape{images, size, size, channels};
  const pf::extents<2> rows{images * size * size, channels};
  const pf::extents<4> half{images, size / 2, size / 2, channels};
  pf::tensor<float, 4> x(shape), y(shape), dy(shape), other(shape), small(half), small_dy(half);
  pf::tensor<float, 4> means({images, 1, 1, channels});
  pf::tensor<float, 1> ones({channels}), zeros({channels}), dweight({channels}), dbias({channels});
  std::fill_n(ones.data(), channels, 1.0F);
  pf::fill_normal<float>(x.flat(), 1.0, {1, 1});
  pf::fill_normal<float>(dy.flat(), 1.0, {1, 2});
  pf::fill_normal<float>(other.flat(), 1.0, {1, 3});
  const view2 xr(x.data(), rows), yr(y.data(), rows), dyr(dy.data(), rows), otherr(other.data(), rows);
  std::vector<double> a(static_cast<std::size_t>(channels)), b(a);
  std::vector<pf::ops::relu_mask<float>::word> words(
      static_cast<std::size_t>(pf::ops::relu_mask<float>::size(rows)));
  const pf::ops::relu_mask<float> mask{words.data()};
  const auto window = pf::pool_shape::square(2, 2);
  const index_t elements = x.size();
  const auto apply = [&](const pf::tensor_view<const float, 2>& addend, bool relu) {
    pf::ops::batch_norm_apply<float>(ctx, xr, zeros.data(), ones.data(), ones.data(), zeros.data(), yr,
                                     {addend, relu, mask});
  };
  const auto norm_backward = [&](const view2& dx, const pf::ops::relu_mask<float>& m) {
    pf::ops::batch_norm_backward<float>(ctx, xr, dyr, zeros.data(), ones.data(), ones.data(),
                                        {dweight.data()}, {dbias.data()}, dx, m);
  };
  std::vector<float> velocity(static_cast<std::size_t>(elements));
  pf::SGD<float> sgd({y.flat(), std::as_const(dy).flat(), {{0, elements, true}}}, {0.9, 0, false, 1e-4});

  std::vector<pass> passes;
  passes.push_back({"copy", 2, [&] { pf::ops::copy_elements(ctx, x.data(), y.data(), elements); }});
  passes.push_back({"batch norm statistics", 1,
                    [&] { pf::ops::batch_norm_statistics<float>(ctx, xr, a.data(), b.data()); }});
  passes.push_back({"batch norm apply", 2, [&] { apply({}, false); }});
  passes.push_back({"batch norm apply, ReLU", 2, [&] { apply({}, true); }});
  passes.push_back({"batch norm apply, addend, ReLU", 3, [&] { apply(otherr, true); }});
  passes.push_back({"batch norm gradient sums", 2, [&] { norm_backward({}, {}); }});
  passes.push_back({"batch norm gradient sums, ReLU", 2, [&] { norm_backward({}, mask); }});
  passes.push_back({"batch norm backward (both passes)", 5, [&] { norm_backward(yr, {}); }});
  passes.push_back({"batch norm backward, ReLU", 5, [&] { norm_backward(yr, mask); }});
  passes.push_back({"batch norm backward, ReLU, in place", 5, [&] { norm_backward(dyr, mask); }});
  passes.push_back({"masked copy", 2, [&] { pf::ops::masked_copy<float>(ctx, xr, mask, yr); }});
  passes.push_back({"masked add", 3, [&] { pf::ops::masked_add<float>(ctx, xr, mask, yr); }});
  passes.push_back({"ReLU", 2, [&] { pf::ops::relu_forward<float>(ctx, x.flat(), y.flat()); }});
  passes.push_back(
      {"ReLU backward", 3, [&] { pf::ops::relu_backward<float>(ctx, x.flat(), other.flat(), y.flat()); }});
  passes.push_back({"add", 3, [&] { pf::ops::add<float>(ctx, x.flat(), y.flat()); }});
  passes.push_back({"add, ReLU", 3, [&] { pf::ops::add_relu<float>(ctx, x.flat(), y.flat()); }});
  if (size >= 2) {
    passes.push_back(
        {"max pool 2x2", 1.25, [&] { pf::ops::max_pool_forward<float>(ctx, window, x, small.view()); }});
    passes.push_back({"max pool 2x2 backward", 2.5,
                      [&] { pf::ops::max_pool_backward<float>(ctx, window, x, small, small_dy, y.view()); }});
    passes.push_back({"average pool 2x2", 1.25,
                      [&] { pf::ops::average_pool_forward<float>(ctx, window, true, x, small.view()); }});
    passes.push_back({"average pool 2x2 backward", 1.25,
                      [&] { pf::ops::average_pool_backward<float>(ctx, window, true, small_dy, y.view()); }});
  }
  passes.push_back(
      {"global average", 1, [&] { pf::ops::global_average_forward<float>(ctx, x, means.view()); }});
  passes.push_back(
      {"global average backward", 1, [&] { pf::ops::global_average_backward<float>(ctx, means, y.view()); }});
  passes.push_back({"SGD, momentum, decay", 5, [&] { sgd.step(ctx, 1e-6); }});
  passes.push_back({"gradient norm", 1, [&] { pf::gradient_norm<float>(ctx, x.flat()); }});

  const std::vector<double> seconds = time_all(passes, runs);
  const double bytes = static_cast<double>(elements) * sizeof(float);
  const double copy = 2.0 * bytes / seconds[0];
  nlohmann::json result{{"threads", threads}, {"shape", shape}, {"mib", bytes / (1 << 20)}};
  for (std::size_t i = 0; i < passes.size(); ++i) {
    const double speed = passes[i].units * bytes / seconds[i];
    result["passes"].push_back({{"pass", passes[i].name},
                                {"ms", seconds[i] * 1e3},
                                {"gb_per_s", speed / 1e9},
                                {"of_copy", speed / copy}});
  }
  return result;
}

/// Depthwise 3x3 convolutions over images of NHWC extents `shape`, forward and both gradients. GB/s count
/// input and output once each (for a weight gradient: both inputs).
nlohmann::json measure_depthwise(int threads, const pf::extents<4>& shape, int runs) {
  pf::cpu_context ctx({threads, 1});
  const index_t channels = shape[3];
  pf::tensor<float, 4> x(shape), y(shape), w({3, 3, 1, channels}), dw(w.shape());
  pf::fill_normal<float>(x.flat(), 1.0, {1, 1});
  pf::fill_normal<float>(y.flat(), 1.0, {1, 2});
  pf::fill_normal<float>(w.flat(), 1.0, {1, 3});
  std::vector<pass> passes;
  passes.push_back({"copy", 2, [&] { pf::ops::copy_elements(ctx, x.data(), y.data(), x.size()); }});
  for (const index_t stride : {1, 2}) {
    pf::conv_shape conv = pf::conv_shape::square(channels, channels, 3, stride, 1);
    conv.groups = channels;
    const view4 out(y.data(), conv.output(shape, "bench_passes"));
    const double units = 1.0 + static_cast<double>(out.size()) / static_cast<double>(x.size());
    const std::string name = "depthwise 3x3, stride " + std::to_string(stride);
    passes.push_back({name, units, [&ctx, &x, &w, conv, out] {
                        pf::ops::conv_forward<float>(ctx, conv, x, w.data(), nullptr, out);
                      }});
    passes.push_back({name + ", input gradient", units, [&ctx, &x, &w, conv, out] {
                        pf::ops::conv_backward_input<float>(ctx, conv, out, w.data(), x.view());
                      }});
    passes.push_back({name + ", weight gradient", units, [&ctx, &x, &dw, conv, out] {
                        pf::ops::conv_backward_weight<float>(ctx, conv, x, out, dw.data(), false);
                      }});
  }
  // The copy writes y, the input gradient x, so that the multiplied numbers stay small.
  bench::bandwidth_meter meter(threads);
  const bench::bandwidth bandwidth = meter.measure();
  const std::vector<double> seconds = time_all(passes, runs);
  const double bytes = static_cast<double>(x.size()) * sizeof(float), copy = 2.0 * bytes / seconds[0];
  nlohmann::json result{{"threads", threads},
                        {"shape", shape},
                        {"mib", bytes / (1 << 20)},
                        {"memory_gb_per_s", bandwidth.memory * 1e-9}};
  for (std::size_t i = 0; i < passes.size(); ++i) {
    const double speed = passes[i].units * bytes / seconds[i];
    result["passes"].push_back({{"pass", passes[i].name},
                                {"ms", seconds[i] * 1e3},
                                {"gb_per_s", speed / 1e9},
                                {"of_copy", speed / copy},
                                {"percent_of_memory", 100.0 * speed / bandwidth.memory}});
  }
  return result;
}

/// Softmax and cross entropy are limited by arithmetic: nanoseconds per logit.
nlohmann::json measure_loss(int threads, index_t rows, index_t classes, int runs) {
  pf::cpu_context ctx({threads, 1});
  pf::tensor<float, 2> logits({rows, classes}), gradient({rows, classes});
  pf::fill_normal<float>(logits.flat(), 3.0, {1, 4});
  const std::vector<std::int32_t> labels(static_cast<std::size_t>(rows), 1);
  const std::vector<double> seconds = time_all(
      {{"loss", 2,
        [&] { pf::ops::softmax_cross_entropy<float>(ctx, logits, labels, {0.1}, 1.0, gradient.view()); }}},
      runs);
  return {{"threads", threads},
          {"rows", rows},
          {"classes", classes},
          {"ms", seconds[0] * 1e3},
          {"ns_per_logit", seconds[0] * 1e9 / static_cast<double>(logits.size())}};
}

void print_table(const nlohmann::json& report) {
  std::printf("%s, flags %s, %s kernels\n", report["compiler"].get<std::string>().c_str(),
              report["flags"].get<std::string>().c_str(),
              report["instruction_set"].get<std::string>().c_str());
  for (const nlohmann::json& r : report["activations"]) {
    std::printf("\n%s, %.1f MiB, %d threads\n%-36s %9s %8s %8s\n", r["shape"].dump().c_str(),
                r["mib"].get<double>(), r["threads"].get<int>(), "pass", "ms", "GB/s", "of copy");
    for (const nlohmann::json& p : r["passes"]) {
      std::printf("%-36s %9.3f %8.2f %8.2f\n", p["pass"].get<std::string>().c_str(), p["ms"].get<double>(),
                  p["gb_per_s"].get<double>(), p["of_copy"].get<double>());
    }
  }
  for (const nlohmann::json& r : report["depthwise"]) {
    std::printf("\n%s, %.1f MiB, %d threads, memory %.1f GB/s\n%-40s %9s %8s %8s %8s\n",
                r["shape"].dump().c_str(), r["mib"].get<double>(), r["threads"].get<int>(),
                r["memory_gb_per_s"].get<double>(), "pass", "ms", "GB/s", "of copy", "% memory");
    for (const nlohmann::json& p : r["passes"]) {
      std::printf("%-40s %9.3f %8.2f %8.2f %8.0f\n", p["pass"].get<std::string>().c_str(),
                  p["ms"].get<double>(), p["gb_per_s"].get<double>(), p["of_copy"].get<double>(),
                  p["percent_of_memory"].get<double>());
    }
  }
  std::printf("\nsoftmax and cross entropy\n");
  for (const nlohmann::json& r : report["losses"]) {
    std::printf("%6d x %-6d %d threads %9.3f ms %8.2f ns a logit\n", r["rows"].get<int>(),
                r["classes"].get<int>(), r["threads"].get<int>(), r["ms"].get<double>(),
                r["ns_per_logit"].get<double>());
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Times the passes over memory of a training step", "bench_passes"};
  std::string json_file;
  int runs = 9, threads = 1;
  index_t batch = 128;
  std::vector<index_t> channels{64, 512};
  app.add_option("--json", json_file, "write the report as JSON to this file (- for standard output)");
  app.add_option("--runs", runs, "runs of each pass")->check(CLI::PositiveNumber);
  app.add_option("--threads", threads, "threads")->check(CLI::PositiveNumber);
  app.add_option("--batch", batch, "images")->check(CLI::PositiveNumber);
  app.add_option("--channels", channels, "of the activations; the pixels are those of ResNet-18 on 32x32")
      ->check(CLI::PositiveNumber);
  return examples::run_on_first(app, argc, argv, [&] {
    examples::check_writable(json_file);
    nlohmann::json report{{"benchmark", "passes"},
                          {"compiler", __VERSION__},
                          {"flags", PUFFERFISH_BENCH_FLAGS},
                          {"instruction_set", pf::to_string(pf::widest_isa())}};
    for (index_t c : channels) {
      const index_t size = std::max<index_t>(1, c <= 64 ? 32 : 2048 / c);
      report["activations"].push_back(measure(threads, batch, size, c, runs));
    }
    for (const pf::extents<4>& shape : {pf::extents<4>{16, 56, 56, 128}, pf::extents<4>{16, 28, 28, 256}}) {
      report["depthwise"].push_back(measure_depthwise(threads, shape, runs));
    }
    report["losses"].push_back(measure_loss(threads, batch, 10, runs));
    report["losses"].push_back(measure_loss(threads, 640, 33278, std::min(runs, 3)));

    if (json_file != "-") print_table(report);
    examples::write_json(json_file, report);
  });
}
