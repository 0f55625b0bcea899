// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include <pufferfish/compress/atomo/entry_atomo.hpp>
#include <pufferfish/compress/quantize/qsgd.hpp>
#include <pufferfish/compress/sparse/dgc.hpp>
#include <pufferfish/compress/sparse/top_k.hpp>
#include <pufferfish/distributed/exchange.hpp>

#include "../../../threads/thread_ranks.hpp"
#include "../../support/compress_support.hpp"
#include "../../support/simulated_ranks.hpp"

namespace {

using namespace compress_support;
using rank_simulation::ranks_agree;
using rank_simulation::simulated_ranks;

template <class T>
using gradients_of_ranks = std::vector<std::vector<T>>;

/// What one rank has after every step of an exchange with these options, and the bytes that it has counted.
template <class T>
struct outcome {
  std::vector<std::vector<T>> results;
  std::uint64_t payload_bytes = 0;
  index_t last_payload = 0;
};

template <class T, class Options>
std::vector<outcome<T>> exchanged(int ranks, const Options& options) {
  std::vector<outcome<T>> all(static_cast<std::size_t>(ranks));
  thread_ranks::run(ranks, [&](thread_ranks::communicator& comm) {
    outcome<T>& mine = all[static_cast<std::size_t>(comm.rank())];
    odd_parameters<T> net;
    cpu_context ctx;
    gradient_exchange<T, thread_ranks::communicator> exchange(net.store, comm, {},
                                                              new_compressor(net.store, options));
    for (std::uint64_t step = 0; step < 6; ++step) {
      exchange.begin(ctx);
      set_gradients(net.store, comm.rank(), step);
      if (step == 4) std::fill(net.store.gradients().begin(), net.store.gradients().end(), T(0));
      exchange.finish(ctx);
      mine.results.emplace_back(net.store.gradients().begin(), net.store.gradients().end());
    }
    mine.payload_bytes = exchange.report().payload_bytes;
    mine.last_payload = exchange.payload_bytes();
  });
  return all;
}

/// Options by a gather; the test sets the other route.
template <class Options>
void check_route(Options options, bool fixed_count) {
  using T = float;
  for (int ranks = 1; ranks <= 5; ++ranks) {
    CAPTURE(ranks);
    options.route = code_route::gather;
    const auto gathered = exchanged<T>(ranks, options);
    options.route = code_route::sparse;
    CAPTURE(describe(options));
    const auto summed = exchanged<T>(ranks, options);
    for (std::size_t step = 0; step < summed[0].results.size(); ++step) {
      gradients_of_ranks<T> results;
      for (const auto& one : summed) results.push_back(one.results[step]);
      CHECK(ranks_agree(results));
      const std::vector<T>& wanted = gathered[0].results[step];
      CHECK(largest_difference<T>(results[0], {wanted.begin(), wanted.end()}) < 1e-5);
      const bool none = std::all_of(results[0].begin(), results[0].end(), [](T x) { return x == T(0); });
      CHECK((!none || step == 4));
    }
    if (ranks == 1) continue;
    // A header more; and the dense form, where it is shorter.
    const std::uint64_t by_gather = gathered[0].payload_bytes, by_sum = summed[0].payload_bytes;
    CHECK(by_sum <= by_gather + 6 * sizeof(std::uint64_t));
    if (!fixed_count) continue;
    CHECK(by_sum == by_gather + 6 * sizeof(std::uint64_t));
    CHECK(summed[0].last_payload == gathered[0].last_payload + 8);
  }
}

TEST_CASE("by a sparse sum: what a gather gives, to rounding, and the same bits on all of 1 to 5 ranks") {
  check_route(top_k_options{.ratio = 0.1}, true);
  check_route(top_k_options{.ratio = 0.02, .scope = top_k_scope::arena, .memory = code_memory::none}, true);
  check_route(top_k_options{.ratio = 0.2, .memory = code_memory::rescaled_error_feedback}, true);
  check_route(top_k_options{.ratio = 0.9}, false);  // all streams are dense
  check_route(entry_atomo_options{.ratio = 0.1}, false);
  check_route(entry_atomo_options{.ratio = 0.3, .memory = code_memory::error_feedback}, false);
  check_route(dgc_options{.ratio = 0.1}, true);
  check_route(dgc_options{.ratio = 0.05, .nesterov = true, .factor_masking = false}, true);
  check_route(dgc_options{.ratio = 0.9}, false);
  check_route(dgc_options{.ratio = 0.05, .sampled = true}, false);
}

TEST_CASE("by a sparse sum: bytes") {
  const odd_parameters<float> net;
  const auto size = static_cast<index_t>(net.store.values().size());
  const auto bytes = [&](auto options) {
    options.route = code_route::sparse;
    return new_compressor(net.store, options).payload_bytes();
  };
  CHECK(bytes(top_k_options{.ratio = 0.9}) == 8 + 4 * size);
  CHECK(bytes(dgc_options{.ratio = 0.1}) ==
        new_compressor(net.store, dgc_options{.ratio = 0.1}).payload_bytes() + 8);
  const auto dense = exchanged<float>(3, top_k_options{.ratio = 0.9, .route = code_route::sparse});
  CHECK(dense[1].last_payload == 8 + 4 * size);
  CHECK(dense[1].payload_bytes == static_cast<std::uint64_t>(6 * (8 + 4 * size)));
}

TEST_CASE_TEMPLATE("by a sparse sum: 50 steps, threads change no bit, and nothing is lost", T, float,
                   double) {
  const odd_parameters<T> net;
  cpu_context one, three({3, 0});
  const top_k_options options{.ratio = 0.05, .route = code_route::sparse};
  for (const int ranks : {2, 3, 4}) {
    const auto make = [&](int) { return new_compressor(net.store, options); };
    simulated_ranks<any_compressor<T>> a(ranks, make), b(ranks, make);
    std::vector<double> given(net.store.values().size(), 0.0), taken = given;
    for (std::uint64_t step = 0; step < 50; ++step) {
      gradients_of_ranks<T> x;
      for (int w = 0; w < ranks; ++w) {
        const std::vector<double> values = gradients_of(net.store, w, step);
        x.emplace_back(values.begin(), values.end());
        for (std::size_t i = 0; i < given.size(); ++i) given[i] += static_cast<double>(x.back()[i]) / ranks;
      }
      auto y = x;
      a.step(one, x);
      b.step(three, y);
      CHECK(x == y);
      CHECK(ranks_agree(x));
      CHECK(a.payload_bytes(0) == static_cast<std::size_t>(a[0].payload_bytes()));
      for (std::size_t i = 0; i < taken.size(); ++i) taken[i] += static_cast<double>(x[0][i]);
    }
    for (std::size_t w = 0; w < a.size(); ++w) {
      const auto left = a[w].states()[0].values;
      for (std::size_t i = 0; i < taken.size(); ++i) taken[i] += static_cast<double>(left[i]) / ranks;
    }
    double worst = 0.0;
    for (std::size_t i = 0; i < given.size(); ++i) worst = std::max(worst, std::abs(taken[i] - given[i]));
    CHECK(worst < (sizeof(T) == 4 ? 1e-4 : 1e-11));
  }
}

TEST_CASE("routes that codes cannot take are refused, and lines name the others") {
  const odd_parameters<float> net;
  CHECK_THROWS_WITH_AS(new_compressor(net.store, qsgd_options{.route = code_route::sparse}),
                       doctest::Contains("codes cannot travel by sparse sum"), value_error);
  CHECK_THROWS_WITH_AS(new_compressor(net.store, entry_atomo_options{.route = code_route::two_hop}),
                       doctest::Contains("codes cannot travel by two hops"), value_error);
  CHECK_THROWS_WITH_AS(new_compressor(net.store, dgc_options{.route = code_route::two_hop}),
                       doctest::Contains("two hops"), value_error);
  CHECK_THROWS_WITH_AS(
      new_compressor(net.store, dgc_options{.half_values = true, .route = code_route::sparse}),
      doctest::Contains("half values"), value_error);
  const top_k_options top{.route = code_route::sparse};
  CHECK(describe(top) == "top-k, ratio 0.01, per tensor, error feedback, sparse sum");
  CHECK(new_compressor(net.store, top).describe() == describe(top));
  CHECK(new_compressor(net.store, top_k_options{.route = code_route::two_hop}).describe() ==
        "top-k, ratio 0.01, per tensor, two hops, error feedback at both");
  const entry_atomo_options atomo{.route = code_route::sparse};
  CHECK(describe(atomo) == "ATOMO, entries, ratio 0.01, seed 1, no memory, sparse sum");
  CHECK(new_compressor(net.store, atomo).describe() == describe(atomo));
  CHECK(describe(dgc_options{.route = code_route::sparse}) ==
        "DGC, ratio 0.001, momentum 0.9, factor masking, sparse sum");
}

}  // namespace
