// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Times the truncated SVDs that turn a dense ResNet-18 (CIFAR) into a factorized one: 14 weight matrices,
// rank a quarter of the output channels. One thread. With PUFFERFISH_BENCH_EIGEN (and bench_svd_eigen.cpp in
// the program) Eigen's BDCSVD runs on the same matrices.

#include <pufferfish/linalg/svd/svd.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "../examples/common/console.hpp"
#include "../examples/common/session.hpp"
#include "bench_svd.hpp"
#include "common/svd_matrices.hpp"
#include "common/timing.hpp"

namespace {

using namespace bench;

using solver = std::function<pf::svd_result(const pf::tensor_view<const float, 2>&, index_t)>;

/// Times all layers `runs` times: the sum over the layers for each run, and the times of each layer.
nlohmann::json time_solver(const std::string& name, const std::vector<pf::tensor<float, 2>>& weights,
                           const std::vector<double>& best, int runs, const solver& solve) {
  std::vector<std::vector<double>> seconds(weights.size());
  std::vector<double> sums, bounds, percents;
  std::vector<double> excess(weights.size());
  for (int run = 0; run < runs; ++run) {
    double sum = 0, operations = 0;
    const double peak = measure_peak(1);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      operations += svd_operations(svd_layers[i]);
      const auto begin = std::chrono::steady_clock::now();
      const pf::svd_result result = solve(weights[i].view(), svd_layers[i].rank);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      seconds[i].push_back(took.count());
      sum += took.count();
      if (run == 0) excess[i] = squared_error(weights[i], result) / best[i] - 1;
    }
    sums.push_back(sum);
    bounds.push_back(operations / (std::max(peak, measure_peak(1)) * 1e9));
    percents.push_back(100.0 * bounds.back() / sum);
  }
  const auto to_json = [](const spread& t) {
    return nlohmann::json{{"median_s", t.median}, {"min_s", t.least}, {"max_s", t.most}};
  };
  nlohmann::json report{{"solver", name}, {"runs", runs}, {"total", to_json(spread_of(sums))}};
  report["bound_s"] = spread_of(bounds).median;
  report["percent_of_bound"] = spread_of(percents).median;
  report["max_excess_error"] = *std::max_element(excess.begin(), excess.end());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    nlohmann::json entry = to_json(spread_of(seconds[i]));
    entry["layer"] = svd_layers[i].name;
    entry["shape"] = {svd_layers[i].rows, svd_layers[i].columns};
    entry["rank"] = svd_layers[i].rank;
    entry["excess_error"] = excess[i];
    report["layers"].push_back(entry);
  }
  return report;
}

void print_table(const nlohmann::json& report) {
  std::printf("%s, %s, flags %s, %s loops\n", report["cpu"].get<std::string>().c_str(),
              report["compiler"].get<std::string>().c_str(), report["flags"].get<std::string>().c_str(),
              report["instruction_set"].get<std::string>().c_str());
  std::printf(
      "14 matrices of ResNet-18, float, one thread; excess: truncation error over the best, less one; bound: "
      "Gram "
      "matrix and projection at the fp32 peak\n");
  std::printf("%-22s %10s %10s %10s %12s %9s\n", "", "median s", "min s", "max s", "excess", "% bound");
  for (const nlohmann::json& s : report["solvers"]) {
    const nlohmann::json& t = s["total"];
    std::printf("%-22s %10.4f %10.4f %10.4f %12.1e %9.1f\n", s["solver"].get<std::string>().c_str(),
                t["median_s"].get<double>(), t["min_s"].get<double>(), t["max_s"].get<double>(),
                s["max_excess_error"].get<double>(), s["percent_of_bound"].get<double>());
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Times the SVDs that factorize ResNet-18", "bench_svd"};
  std::string json_file;
  int runs = 5;
  bool with_jacobi = false;
  app.add_option("--json", json_file, "write the report as JSON to this file (- for standard output)");
  app.add_option("--runs", runs, "runs over all matrices")->check(CLI::PositiveNumber);
  app.add_flag("--jacobi", with_jacobi, "also time one-sided Jacobi (seconds a run)");
  return examples::run_on_first(app, argc, argv, [&] {
    examples::check_writable(json_file);
    std::vector<pf::tensor<float, 2>> weights;
    std::vector<double> best;
    for (const svd_layer& l : svd_layers) {
      weights.push_back(make_weights(l, weights.size()));
      // The reference error: the discarded energy by the most accurate method, or by the Gram spectrum
      // (accurate to 1e-13 of the whole) if that would take too long.
      best.push_back(least_squared_error(weights.back(), l,
                                         with_jacobi ? pf::svd_method::jacobi : pf::svd_method::gram));
    }

    nlohmann::json report;
    report["benchmark"] = "svd_resnet18";
    report["cpu"] = processor_name();
    report["compiler"] = __VERSION__;
    report["flags"] = PUFFERFISH_BENCH_FLAGS;
    report["instruction_set"] = pf::to_string(pf::widest_isa());
    const auto run = [&](const std::string& name, pf::svd_method method) {
      report["solvers"].push_back(time_solver(
          name, weights, best, runs, [method](const pf::tensor_view<const float, 2>& a, index_t rank) {
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

    if (json_file != "-") print_table(report);
    examples::write_json(json_file, report);
  });
}
