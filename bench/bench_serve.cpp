// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// This library's side of bench/compare: answers requests for single measurements (common/line_server.hpp).

#include <CLI/CLI.hpp>

#include <pufferfish/ops/linear/linear.hpp>

#include <fstream>
#include <memory>

#include "../examples/common/session.hpp"
#include "common/conv_case.hpp"
#include "common/line_server.hpp"
#include "common/networks.hpp"
#include "common/svd_matrices.hpp"

namespace {

using namespace bench;

class services {
 public:
  explicit services(int threads) : threads_(threads), ctx_({threads, 1}), meter_(threads) {}

  answer peak(const request&) { return {{"gflops", measure_peak(threads_)}}; }

  answer memory_bandwidth(const request&) {
    const bandwidth b = meter_.measure();
    return {{"memory_gbs", b.memory * 1e-9}, {"cache_gbs", b.cache * 1e-9}};
  }

  /// A training step of a network.
  answer step(const request& asked) {
    if (asked.at("network") != network_) steps_.clear();
    network_ = asked.at("network").get<std::string>();
    const auto mode = asked.at("mode").get<std::string>();
    const index_t batch = asked.at("batch");
    auto& step = steps_[mode + std::to_string(batch)];
    if (step == nullptr) {
      step = make_training_step(network_, mode, batch, threads_);
      step->run();
      step->run();
    }
    answer reply = timed(asked, [&] { step->run(); });
    reply["bound_ms"] = step->least_seconds(measure_peak(threads_), meter_.measure(1)) * 1e3;
    reply["parameters"] = step->parameters();
    reply["items"] = step->items();
    reply["tokens"] = step->tokens();
    return reply;
  }

  /// Inference of a network.
  answer infer(const request& asked) {
    const std::string key = asked.at("network").get<std::string>() + asked.at("mode").get<std::string>() +
                            "-" + asked.at("form").get<std::string>() + "-" +
                            std::to_string(asked.at("batch").get<index_t>());
    auto& net = inferences_[key];
    if (net == nullptr) {
      net = make_inference(asked.at("network"), asked.at("mode"), asked.at("form"), asked.at("batch"),
                           threads_);
    }
    answer reply = timed(asked, [&] { net->run(); });
    reply["bound_ms"] = net->least_seconds(measure_peak(threads_), meter_.measure(1)) * 1e3;
    reply["parameters"] = net->parameters();
    return reply;
  }

  /// Forward and backward of a convolution, or forward alone.
  answer conv(const request& asked) {
    const convolution c(asked);
    const conv_shape shape = conv_shape::square(c.in, c.out, c.kernel, c.stride, c.padding);
    const extents<4> input{c.batch, c.pixels, c.pixels, c.in};
    const auto layer = c.rank > 0 ? dynamic_case(ctx_, shape, c.rank, input, c.bf16)
                                  : dense_case(ctx_, shape, input, c.bf16);
    const bool backward = asked.value("directions", "all") != "forward";
    // A backward pass is prepared by the forward pass itself.
    answer reply = timed(asked, [&] {
      layer->forward();
      if (backward) layer->backward();
    });
    if (c.bf16) return reply;  // the bound is that of floats
    const work cost = backward ? layer->cost().forward() + layer->cost().backward() : layer->cost().forward();
    reply["bound_ms"] = cost.least_seconds(measure_peak(threads_), meter_.measure(1)) * 1e3;
    return reply;
  }

  answer gemm(const request& asked) {
    return wants_bf16(asked) ? multiply<pf::bfloat16>(asked) : multiply<float>(asked);
  }

  /// The 14 decompositions of ResNet-18 without the rest of factorize().
  answer svd(const request& asked) {
    const auto& weights = matrices();
    std::vector<pf::svd_result> results(weights.size());
    answer reply = timed(asked, [&] {
      for (std::size_t i = 0; i < weights.size(); ++i) {
        pf::svd_options options;
        options.max_rank = svd_layers[i].rank;
        results[i] = pf::svd(weights[i].view(), options);
      }
    });
    double worst = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const double best = least_squared_error(weights[i], svd_layers[i], pf::svd_method::gram);
      worst = std::max(worst, squared_error(weights[i], results[i]) / best - 1);
    }
    reply["excess_error"] = worst;
    return reply;
  }

  /// Writes the same matrices to a file: for each rows, columns, rank (32-bit), then the elements row by row.
  answer dump_svd(const request& asked) {
    std::ofstream file(asked.at("path").get<std::string>(), std::ios::binary);
    const auto& weights = matrices();
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const svd_layer& l = svd_layers[i];
      const std::int32_t header[] = {static_cast<std::int32_t>(l.rows), static_cast<std::int32_t>(l.columns),
                                     static_cast<std::int32_t>(l.rank)};
      file.write(reinterpret_cast<const char*>(header), sizeof header);
      file.write(
          reinterpret_cast<const char*>(weights[i].data()),
          static_cast<std::streamsize>(weights[i].size()) * static_cast<std::streamsize>(sizeof(float)));
    }
    file.close();
    if (!file) throw std::runtime_error("cannot write the matrices");
    return {{"matrices", weights.size()}};
  }

  /// factorize() of the whole network.
  answer factorize(const request& asked) {
    const auto network = asked.at("network").get<std::string>();
    std::vector<double> ms;
    for (int i = 0; i < asked.value("samples", 3); ++i) ms.push_back(switch_seconds(network, threads_) * 1e3);
    return {{"ms", ms}};
  }

 private:
  template <class T>
  answer multiply(const request& asked) {
    const product p(asked);
    const pf::extents<2> a_shape = p.transposed ? pf::extents<2>{p.k, p.m} : pf::extents<2>{p.m, p.k};
    pf::tensor<T, 2> a(a_shape), b({p.k, p.n});
    pf::fill_normal(a.flat(), 1.0, pf::random_stream(1, 1));
    pf::fill_normal(b.flat(), 1.0, pf::random_stream(1, 2));
    const pf::tensor_view<const T, 2> left = a, right = b;
    if (p.transposed) {
      pf::tensor<float, 2> c({p.m, p.n});
      return timed(asked, [&] { pf::ops::linear_backward_weight<T>(ctx_, left, right, c.view(), false); });
    }
    pf::tensor<T, 2> c({p.m, p.n});
    return timed(asked, [&] { pf::ops::linear_forward<T>(ctx_, left, right, nullptr, c.view()); });
  }

  const std::vector<pf::tensor<float, 2>>& matrices() {
    if (matrices_.empty()) {
      for (const svd_layer& l : svd_layers) matrices_.push_back(make_weights(l, matrices_.size()));
    }
    return matrices_;
  }

  int threads_;
  pf::cpu_context ctx_;
  bandwidth_meter meter_;
  std::string network_;
  std::map<std::string, std::unique_ptr<training_step>> steps_;
  std::map<std::string, std::unique_ptr<inference>> inferences_;
  std::vector<pf::tensor<float, 2>> matrices_;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Answers requests of bench/compare, one a line", "bench_serve"};
  int threads = 1;
  app.add_option("--threads", threads, "Threads")->check(CLI::Range(1, 4096));
  return examples::run_on_first(app, argc, argv, [&] {
    services s(threads);
    serve({{"peak", [&s](const request& r) { return s.peak(r); }},
           {"bandwidth", [&s](const request& r) { return s.memory_bandwidth(r); }},
           {"step", [&s](const request& r) { return s.step(r); }},
           {"infer", [&s](const request& r) { return s.infer(r); }},
           {"conv", [&s](const request& r) { return s.conv(r); }},
           {"gemm", [&s](const request& r) { return s.gemm(r); }},
           {"svd", [&s](const request& r) { return s.svd(r); }},
           {"dump_svd", [&s](const request& r) { return s.dump_svd(r); }},
           {"factorize", [&s](const request& r) { return s.factorize(r); }}});
  });
}
