// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Times the truncated SVDs that turn a dense ResNet-18 (CIFAR) into a factorized one: 14 weight matrices,
// rank a quarter of the output channels. One thread. With PUFFERFISH_BENCH_EIGEN (and bench_svd_eigen.cpp in
// the program) Eigen's BDCSVD runs on the same matrices.

#include <pufferfish/linalg/svd.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "bench_svd.hpp"

#ifndef PUFFERFISH_BENCH_FLAGS
#define PUFFERFISH_BENCH_FLAGS "unknown"
#endif

namespace pf = pufferfish;
using pf::index_t;

namespace {

struct layer {
  const char* name;
  index_t rows;
  index_t columns;
  index_t rank;
};

constexpr layer layers[] = {{"block1.1.conv1", 64, 576, 16},    {"block1.1.conv2", 64, 576, 16},
                            {"block2.0.conv1", 128, 576, 32},   {"block2.0.conv2", 128, 1152, 32},
                            {"block2.1.conv1", 128, 1152, 32},  {"block2.1.conv2", 128, 1152, 32},
                            {"block3.0.conv1", 256, 1152, 64},  {"block3.0.conv2", 256, 2304, 64},
                            {"block3.1.conv1", 256, 2304, 64},  {"block3.1.conv2", 256, 2304, 64},
                            {"block4.0.conv1", 512, 2304, 128}, {"block4.0.conv2", 512, 4608, 128},
                            {"block4.1.conv1", 512, 4608, 128}, {"block4.1.conv2", 512, 4608, 128}};

/// Stands in for trained weights: noise on top of a spectrum that falls off, as training leaves it.
pf::tensor<float, 2> make_weights(const layer& l, std::uint64_t seed) {
  pf::detail::start_values random(seed);
  pf::tensor<double, 2> left({l.rank, l.rows});
  pf::tensor<double, 2> right({l.rank, l.columns});
  pf::tensor<double, 2> sum({l.rows, l.columns});
  for (index_t k = 0; k < l.rank; ++k) {
    for (index_t i = 0; i < l.rows; ++i) left(k, i) = random.next() / (1.0 + 0.1 * static_cast<double>(k));
    for (index_t j = 0; j < l.columns; ++j) right(k, j) = random.next();
  }
  for (double& value : sum.flat()) value = random.next();
  const pf::tensor_view<const double, 2> a = left;
  const pf::tensor_view<const double, 2> b = right;
  pf::detail::add_product_tn(a, b, sum.view());
  pf::tensor<float, 2> weights({l.rows, l.columns});
  for (index_t i = 0; i < sum.size(); ++i) weights.data()[i] = static_cast<float>(0.02 * sum.data()[i]);
  return weights;
}

/// ||A - U S V^T||_F^2.
double squared_error(const pf::tensor<float, 2>& a, const pf::svd_result& s) {
  const index_t rank = s.u.extent(1);
  pf::tensor<double, 2> scaled({rank, a.extent(0)});
  pf::tensor<double, 2> right({rank, a.extent(1)});
  pf::tensor<double, 2> rest({a.extent(0), a.extent(1)});
  for (index_t k = 0; k < rank; ++k) {
    for (index_t i = 0; i < a.extent(0); ++i) {
      scaled(k, i) = -s.u(i, k) * s.singular_values[static_cast<std::size_t>(k)];
    }
    for (index_t j = 0; j < a.extent(1); ++j) right(k, j) = s.v(j, k);
  }
  const pf::tensor_view<const double, 2> left_view = scaled;
  const pf::tensor_view<const double, 2> right_view = right;
  pf::copy(a.view(), rest.view());
  pf::detail::add_product_tn(left_view, right_view, rest.view());
  double total = 0;
  for (double value : rest.flat()) total += value * value;
  return total;
}

struct timing {
  double median = 0;
  double least = 0;
  double most = 0;
};

timing summarize(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.front(), seconds.back()};
}

using solver = std::function<pf::svd_result(const pf::tensor_view<const float, 2>&, index_t)>;

/// All layers `runs` times. What each run's sum of all layers was, and each layer's times.
nlohmann::json time_solver(const std::string& name, const std::vector<pf::tensor<float, 2>>& weights,
                           const std::vector<double>& best, int runs, const solver& solve) {
  std::vector<std::vector<double>> seconds(weights.size());
  std::vector<double> sums;
  std::vector<double> excess(weights.size());
  for (int run = 0; run < runs; ++run) {
    double sum = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const auto begin = std::chrono::steady_clock::now();
      const pf::svd_result result = solve(weights[i].view(), layers[i].rank);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      seconds[i].push_back(took.count());
      sum += took.count();
      if (run == 0) excess[i] = squared_error(weights[i], result) / best[i] - 1;
    }
    sums.push_back(sum);
  }
  const auto to_json = [](const timing& t) {
    return nlohmann::json{{"median_s", t.median}, {"min_s", t.least}, {"max_s", t.most}};
  };
  nlohmann::json report{{"solver", name}, {"runs", runs}, {"total", to_json(summarize(sums))}};
  report["max_excess_error"] = *std::max_element(excess.begin(), excess.end());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    nlohmann::json entry = to_json(summarize(seconds[i]));
    entry["layer"] = layers[i].name;
    entry["shape"] = {layers[i].rows, layers[i].columns};
    entry["rank"] = layers[i].rank;
    entry["excess_error"] = excess[i];
    report["layers"].push_back(entry);
  }
  return report;
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

void print_table(const nlohmann::json& report) {
  std::printf("%s, %s, flags %s, %s loops\n", report["cpu"].get<std::string>().c_str(),
              report["compiler"].get<std::string>().c_str(), report["flags"].get<std::string>().c_str(),
              report["instruction_set"].get<std::string>().c_str());
  std::printf(
      "14 matrices of ResNet-18, float, one thread; excess: truncation error over the best, less one\n");
  std::printf("%-22s %10s %10s %10s %12s\n", "", "median s", "min s", "max s", "excess");
  for (const nlohmann::json& s : report["solvers"]) {
    const nlohmann::json& t = s["total"];
    std::printf("%-22s %10.4f %10.4f %10.4f %12.1e\n", s["solver"].get<std::string>().c_str(),
                t["median_s"].get<double>(), t["min_s"].get<double>(), t["max_s"].get<double>(),
                s["max_excess_error"].get<double>());
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Times the SVDs that factorize ResNet-18"};
  std::string json_file;
  int runs = 5;
  bool with_jacobi = false;
  app.add_option("--json", json_file, "write the report as JSON to this file (- for standard output)");
  app.add_option("--runs", runs, "runs over all matrices")->check(CLI::PositiveNumber);
  app.add_flag("--jacobi", with_jacobi, "also time one-sided Jacobi (seconds a run)");
  CLI11_PARSE(app, argc, argv);

  std::vector<pf::tensor<float, 2>> weights;
  std::vector<double> best;
  for (const layer& l : layers) {
    weights.push_back(make_weights(l, weights.size()));
    // The reference for the error: discarded energy by the method that keeps the most digits, or by the Gram
    // spectrum (good to 1e-13 of the whole) where that would take too long.
    pf::svd_options options;
    options.method = with_jacobi ? pf::svd_method::jacobi : pf::svd_method::gram;
    options.max_rank = 1;
    const std::vector<double> values =
        pf::svd(pf::tensor_view<const float, 2>(weights.back()), options).singular_values;
    double discarded = 0;
    for (std::size_t k = static_cast<std::size_t>(l.rank); k < values.size(); ++k)
      discarded += values[k] * values[k];
    best.push_back(discarded);
  }

  nlohmann::json report;
  report["benchmark"] = "svd_resnet18";
  report["cpu"] = processor_name();
  report["compiler"] = __VERSION__;
  report["flags"] = PUFFERFISH_BENCH_FLAGS;
  report["instruction_set"] = pf::to_string(pf::widest_isa());
  const auto run = [&](const std::string& name, pf::svd_method method) {
    report["solvers"].push_back(time_solver(name, weights, best, runs,
                                            [method](const pf::tensor_view<const float, 2>& a, index_t rank) {
                                              pf::svd_options options;
                                              options.method = method;
                                              options.max_rank = rank;
                                              return pf::svd(a, options);
                                            }));
  };
  run("automatic", pf::svd_method::automatic);
  run("randomized", pf::svd_method::randomized);
  if (with_jacobi) run("jacobi", pf::svd_method::jacobi);
#ifdef PUFFERFISH_BENCH_EIGEN
  report["solvers"].push_back(time_solver("Eigen BDCSVD (double)", weights, best, runs, eigen_svd_double));
  report["solvers"].push_back(time_solver("Eigen BDCSVD (float)", weights, best, runs, eigen_svd_float));
#endif

  if (json_file == "-") {
    std::printf("%s\n", report.dump(2).c_str());
  } else {
    if (!json_file.empty()) std::ofstream(json_file) << report.dump(2) << '\n';
    print_table(report);
  }
  return 0;
}
