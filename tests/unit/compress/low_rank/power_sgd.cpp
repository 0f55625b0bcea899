// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include <pufferfish/compress/low_rank/power_sgd.hpp>

#include "../../support/compress_support.hpp"
#include "../../support/simulated_ranks.hpp"

namespace {

using namespace compress_support;
using rank_simulation::ranks_agree;
using rank_simulation::simulated_ranks;

template <class T>
using gradients_of_ranks = std::vector<std::vector<T>>;

template <class T>
simulated_ranks<any_compressor<T>> ranks_with(const parameter_store<T>& store, int ranks,
                                              const power_sgd_options& options) {
  return {ranks, [&](int) { return new_compressor(store, options); }};
}

template <class T>
gradients_of_ranks<T> random_gradients(const parameter_store<T>& store, std::size_t ranks,
                                       std::uint64_t step) {
  gradients_of_ranks<T> all;
  for (std::size_t w = 0; w < ranks; ++w) {
    const std::vector<double> values = gradients_of(store, static_cast<int>(w), step);
    all.emplace_back(values.begin(), values.end());
  }
  return all;
}

TEST_CASE_TEMPLATE("PowerSGD before its first step: means, and then as if the steps had not been", T, float,
                   double) {
  const odd_parameters<T> net;
  cpu_context ctx;
  const std::size_t whole = net.store.values().size() * sizeof(T);
  for (const error_feedback feedback : {error_feedback::local, error_feedback::aggregated}) {
    for (const int ranks : {1, 2, 3}) {
      power_sgd_options options{2, feedback};
      auto fresh = ranks_with(net.store, ranks, options);
      options.start_step = 4;
      auto late = ranks_with(net.store, ranks, options);
      CHECK(late[0].payload_bytes() == static_cast<index_t>(whole));
      for (std::uint64_t step = 0; step < 12; ++step) {
        auto gradients = random_gradients(net.store, late.size(), step), copies = gradients;
        late.step(ctx, gradients);
        CHECK(ranks_agree(gradients));
        for (std::size_t w = 0; w < late.size(); ++w) {
          CHECK(late.payload_bytes(w) == static_cast<std::size_t>(late[w].payload_bytes()));
        }
        if (step < 4) {
          CHECK(late.payload_bytes(0) == whole);
          std::vector<T> mean = copies[0];
          for (std::size_t w = 1; w < copies.size(); ++w) {
            for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += copies[w][i];
          }
          for (T& value : mean) value *= T(1) / static_cast<T>(ranks);
          CHECK(gradients[0] == mean);
          const auto memory = late[0].states()[0].values;
          CHECK(std::all_of(memory.begin(), memory.end(), [](T left) { return left == T(0); }));
        } else {
          fresh.step(ctx, copies);
          CHECK(gradients == copies);
          CHECK(late.payload_bytes(0) == fresh.payload_bytes(0));
        }
      }
    }
  }
}

TEST_CASE("PowerSGD: lines name what is not at its default") {
  power_sgd_options options;
  const std::string common = "PowerSGD, rank 2, local error feedback, least saving 1, seed 1";
  CHECK(describe(options) == common);
  options.start_step = 100;
  CHECK(describe(options) == common + ", from step 100");
  options.rescale_memory = true;
  CHECK(describe(options) == common + ", from step 100, memory rescaled");
}

}  // namespace
