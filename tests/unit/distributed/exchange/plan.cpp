// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <limits>
#include <string>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/distributed/self.hpp>
#include <pufferfish/distributed/tune.hpp>

using namespace pufferfish;

namespace {

constexpr index_t no_end = std::numeric_limits<index_t>::max();
using algorithm = all_reduce_algorithm;

TEST_CASE("a plan says which algorithm serves a length; the default is its table") {
  const exchange_plan plan{{1, 2}, {{100, algorithm::recursive_doubling}, {5000, algorithm::ring}}, 4, 0, 0};
  CHECK(plan.algorithm_for(0) == algorithm::recursive_doubling);
  CHECK(plan.algorithm_for(100) == algorithm::recursive_doubling);
  CHECK(plan.algorithm_for(101) == algorithm::ring);
  CHECK(plan.algorithm_for(std::size_t{1} << 40) == algorithm::ring);
  CHECK(exchange_plan{}.algorithm_for(7) == algorithm::library);
  CHECK(default_plan(1).algorithm_for(1 << 30) == algorithm::library);
  for (const int ranks : {2, 4, 64}) {
    CHECK(default_plan(ranks).algorithm_for(std::size_t{16384} * static_cast<std::size_t>(ranks)) ==
          algorithm::recursive_doubling);
    CHECK(default_plan(ranks).algorithm_for(std::size_t{16385} * static_cast<std::size_t>(ranks)) ==
          algorithm::ring);
    CHECK(default_plan(ranks).ranks == ranks);
  }
}

TEST_CASE("plans survive text exactly") {
  const random_stream random(4, 4);
  for (std::uint64_t trial = 0; trial < 200; ++trial) {
    exchange_plan plan;
    plan.ranks = static_cast<int>(random.below(trial, 5000));
    plan.buckets = {static_cast<index_t>(1 + random.child("first").below(trial, 1U << 30)),
                    static_cast<index_t>(1 + random.child("bytes").below(trial, 1U << 30))};
    plan.latency = static_cast<double>(random.child("latency").below(trial, 1U << 30)) / 7e13;
    plan.bytes_per_second = static_cast<double>(random.child("rate").below(trial, 1U << 30)) * 1.1;
    for (std::uint64_t rule = 0; rule < trial % 4; ++rule) {
      const index_t up_to = rule == 2 ? no_end : static_cast<index_t>((rule + 1) * (trial + 1));
      plan.rules.push_back({up_to, static_cast<algorithm>(1 + (trial + rule) % 3)});
    }
    CHECK(plan_from_text(to_text(plan), "x") == plan);
  }
}

TEST_CASE("text that is no plan is an io_error that names its source") {
  const exchange_plan plan{{10, 20}, {{100, algorithm::library}, {no_end, algorithm::ring}}, 4, 1e-5, 1e8};
  const std::string text = to_text(plan);
  for (std::size_t cut = 0; cut + 1 < text.size(); ++cut) {
    // Cutting digits off the last number leaves another number.
    try {
      plan_from_text(text.substr(0, cut), "run.safetensors");
    } catch (const io_error& e) {
      CHECK(std::string(e.what()).find("run.safetensors") == 0);
    }
  }
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    return changed;
  };
  for (const std::string& bad : {std::string(),
                                 std::string("nonsense\n"),
                                 text + text,
                                 text + "\n",
                                 text + std::string(1, '\0'),
                                 with("up to 100", "up to 0"),
                                 with("up to 100", "up to -5"),
                                 with("up to 100", "up to 1e3"),
                                 with("up to 100", "up to 99999999999999999999"),
                                 with("library", "automatic"),
                                 with("library", "libraries"),
                                 with("library", ""),
                                 with("buckets 10", "buckets 0"),
                                 with("buckets 10", "buckets  10"),
                                 with("buckets 10 20", "buckets 10"),
                                 with("ranks 4", "ranks -1"),
                                 with("ranks 4", "ranks four"),
                                 with("measured 1e-05", "measured nan"),
                                 with("measured 1e-05", "measured inf"),
                                 with("measured 1e-05", "measured -1"),
                                 with("up to 9223372036854775807", "up to 100")}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(plan_from_text(bad, "x"), io_error);
  }
  std::string many;
  for (int i = 1; i <= 100000; ++i) many += "up to " + std::to_string(i) + " ring\n";
  CHECK_THROWS_AS(plan_from_text(many + text, "x"), io_error);
}

TEST_CASE("what is measured becomes a plan: the fastest of each length, buckets by latency") {
  const double latency = 50e-6, second_a_byte = 8e-9;
  std::vector<detail::tuned_length> lengths;
  for (index_t bytes = 1024; bytes <= 1 << 20; bytes *= 2) {
    const double t = latency + second_a_byte * static_cast<double>(bytes);
    lengths.push_back({bytes,
                       {bytes < 10000 ? t : 2 * t, bytes > 100000 ? t : 2 * t,
                        bytes > 10000 && bytes < 100000 ? t : 2 * t}});
  }
  const tune_options options;
  const exchange_plan plan = detail::plan_from(lengths, 4, options.latency_share);
  CHECK(plan.rules == std::vector<exchange_rule>{{8192 + 4096, algorithm::library},
                                                 {65536 + 32768, algorithm::recursive_doubling},
                                                 {no_end, algorithm::ring}});
  CHECK(plan.latency == doctest::Approx(latency));
  CHECK(plan.bytes_per_second == doctest::Approx(1 / second_a_byte));
  // 50 us at 125 MB/s are 6250 bytes: in buckets of 20 times that, but not of less than 256 KiB.
  CHECK(plan.buckets.bytes == 256 << 10);
  for (auto& length : lengths) {
    for (double& t : length.seconds) t += 950e-6;
  }
  const exchange_plan slow = detail::plan_from(lengths, 4, options.latency_share);
  CHECK(slow.buckets.bytes > 20 * 950e-6 / second_a_byte);
  CHECK(slow.buckets.first_bytes == 1 << 20);
  CHECK(detail::plan_from({}, 4, options.latency_share) == default_plan(4));
  // Times without a slope, and none at all.
  for (const double t : {1e-3, 0.0}) {
    const exchange_plan flat = detail::plan_from(
        {{1024, {t, t, t}}, {2048, {t, t, t}}, {4096, {t / 2, t, t}}}, 2, options.latency_share);
    CHECK(plan_from_text(to_text(flat), "x") == flat);
  }
}

TEST_CASE("one rank: nothing to measure; an exchange refuses what is no plan") {
  self comm;
  CHECK(tune(comm) == default_plan(1));
  tune_options bad;
  bad.seconds = -1.0;
  CHECK_THROWS_AS(tune(comm, bad), value_error);
  parameter_store<float> store;
  exchange_options options;
  options.plan.emplace().buckets.bytes = 0;
  using exchange = gradient_exchange<float, self>;
  CHECK_THROWS_AS(exchange(store, comm, options), value_error);
  options.plan.emplace().rules = {{5, algorithm::ring}, {5, algorithm::library}};
  CHECK_THROWS_AS(exchange(store, comm, options), value_error);
  options.plan.emplace().rules = {{5, algorithm::automatic}};
  CHECK_THROWS_AS(exchange(store, comm, options), value_error);
}

}  // namespace
