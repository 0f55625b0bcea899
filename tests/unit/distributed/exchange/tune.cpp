// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/distributed/tune.hpp>

#include "../../support/delayed_ranks.hpp"

using namespace pufferfish;

namespace {

using algorithm = all_reduce_algorithm;
using delayed_ranks::simulated_clock;
using delayed_ranks::simulated_link;

constexpr index_t no_end = std::numeric_limits<index_t>::max();

struct outcome {
  exchange_plan plan;
  double seconds = 0.0;  ///< simulated
  std::string calls;
};

/// tune over simulated links. `speed`: of rank 1's clock. Requires equal plans and calls on all ranks; ranks
/// that take different decisions wait for each other until the test's timeout.
outcome tuned(int ranks, const simulated_link& cable, const tune_options& options = {}, double speed = 1.0) {
  std::mutex adding;
  std::vector<outcome> all;
  delayed_ranks::run(ranks, cable, [&](delayed_ranks::communicator& comm) {
    if (comm.rank() == 1) simulated_clock::speed = speed;
    const exchange_plan plan = detail::tune_by_clock<simulated_clock>(comm, options);
    const std::lock_guard hold(adding);
    all.push_back({plan, static_cast<double>(simulated_clock::nanoseconds) * 1e-9, comm.calls()});
  });
  REQUIRE(all.size() == static_cast<std::size_t>(ranks));
  for (const outcome& one : all) {
    REQUIRE(one.plan == all[0].plan);
    REQUIRE(one.calls == all[0].calls);
  }
  return all[0];
}

TEST_CASE("tune at 100 ms of delay: long buckets, since the latency is that of 1.25 or 12.5 MB") {
  for (const double rate : {12.5e6, 125e6}) {
    for (const bool slow_start : {false, true}) {
      CAPTURE(rate);
      CAPTURE(slow_start);
      const outcome got = tuned(2, {.delay = 0.1, .bytes_per_second = rate, .slow_start = slow_start});
      CHECK(got.plan.buckets.bytes >= 8 << 20);
      CHECK(got.plan.latency == doctest::Approx(0.1).epsilon(0.1));
      CHECK(got.plan.bytes_per_second > 1e6);
      // The ring needs two messages, one after the other, for as many bytes.
      CHECK(got.plan.algorithm_for(16 << 20) != algorithm::ring);
      CHECK(got.seconds > 3.0);
      CHECK(got.seconds < 15.0);
    }
  }
}

TEST_CASE("tune on distant links compares the algorithms at a long length too") {
  const outcome fast =
      tuned(2, {.delay = 0.1, .bytes_per_second = 12.5e6, .library_delay = 2.0, .library_transfer = 0.3});
  CHECK(fast.plan.algorithm_for(1024) == algorithm::recursive_doubling);
  CHECK(fast.plan.algorithm_for(16 << 20) == algorithm::library);
  const outcome slow =
      tuned(2, {.delay = 0.1, .bytes_per_second = 12.5e6, .library_delay = 0.5, .library_transfer = 3.0});
  CHECK(slow.plan.algorithm_for(1024) == algorithm::library);
  CHECK(slow.plan.algorithm_for(16 << 20) == algorithm::recursive_doubling);
}

TEST_CASE("tune with more ranks and delay: recursive doubling, and the ring where its fewer bytes pay") {
  // Four ranks: the ring is faster above 8 delay rate, 1.6 MB.
  const outcome got = tuned(4, {.delay = 0.02, .bytes_per_second = 10e6, .library_transfer = 3.0},
                            {.largest_bytes = index_t{4} << 20});
  CHECK(got.plan.algorithm_for(1024) == algorithm::recursive_doubling);
  CHECK(got.plan.algorithm_for(256 << 10) == algorithm::recursive_doubling);
  CHECK(got.plan.algorithm_for(16 << 20) == algorithm::ring);
  CHECK(got.plan.buckets.bytes >= 3 << 20);
}

TEST_CASE("tune on a fast link measures every length, within its time") {
  tune_options options;
  options.largest_bytes = 1 << 20;
  const outcome got = tuned(2, {.delay = 50e-6, .bytes_per_second = 125e6, .library_transfer = 3.0}, options);
  CHECK(got.seconds < 3.0);
  for (index_t bytes = 1024; bytes <= options.largest_bytes; bytes *= 2) {
    const std::string call = "sum " + std::to_string(bytes) + "\n";
    int runs = 0;
    for (std::size_t at = got.calls.find(call); at != std::string::npos; at = got.calls.find(call, at + 1))
      ++runs;
    CHECK(runs == 1 + options.repeats);
  }
  CHECK(got.plan.latency == doctest::Approx(50e-6).epsilon(0.05));
  CHECK(got.plan.bytes_per_second == doctest::Approx(125e6).epsilon(0.05));
  CHECK(got.plan.buckets.bytes == 256 << 10);
}

TEST_CASE("tune on a slow link without delay: the time bounds the longest length") {
  const outcome got = tuned(2, {.delay = 1e-4, .bytes_per_second = 1e6});
  CHECK(got.seconds < 4.0);
  CHECK(got.plan.bytes_per_second == doctest::Approx(1e6).epsilon(0.1));
  CHECK(got.plan.buckets.bytes == 256 << 10);
}

TEST_CASE("tune with clocks of different speed makes the same calls on all ranks") {
  const simulated_link cable{.delay = 0.01, .bytes_per_second = 10e6};
  for (const double speed : {0.5, 1.0, 2.0})
    CHECK(tuned(3, cable, {.largest_bytes = 1 << 20}, speed).plan.ranks == 3);
}

TEST_CASE("tune with one length measures nothing and makes the default plan") {
  const outcome got = tuned(2, {.delay = 0.1}, {.largest_bytes = 2047});
  CHECK(got.plan == default_plan(2));
  CHECK(got.calls.find("sum") == std::string::npos);
}

TEST_CASE("a plan from one length is the default plan; times without a slope give long buckets") {
  constexpr double none = std::numeric_limits<double>::infinity();
  CHECK(detail::plan_from({{1024, {0.1, 0.2, 0.1}}}, 2, 0.05) == default_plan(2));
  const exchange_plan flat =
      detail::plan_from({{1024, {none, none, 0.1}}, {32768, {none, none, 0.1}}}, 2, 0.05);
  CHECK(flat.latency == doctest::Approx(0.1).epsilon(0.06));
  CHECK(flat.bytes_per_second == doctest::Approx(20 * 32768 / 0.1));
  CHECK(flat.buckets.bytes > 10 << 20);
  CHECK(flat.rules == std::vector<exchange_rule>{{no_end, algorithm::recursive_doubling}});
  const exchange_plan noise =
      detail::plan_from({{1024, {none, none, 0.12}}, {32768, {none, none, 0.1}}}, 2, 0.05);
  CHECK(noise.buckets.bytes > 10 << 20);
}

TEST_CASE("rules of lengths that were not compared follow from the line of recursive doubling") {
  constexpr double none = std::numeric_limits<double>::infinity();
  // Four ranks, two messages: 2 (a + b n) with a = 10 ms, b = 100 ns. Equal to the ring at n = 8 a / b.
  const auto at = [](index_t bytes) { return 2.0 * (0.01 + 1e-7 * static_cast<double>(bytes)); };
  std::vector<detail::tuned_length> lengths;
  for (const index_t bytes : {1024, 32768, 1 << 20}) lengths.push_back({bytes, {none, none, at(bytes)}});
  exchange_plan plan = detail::plan_from(lengths, 4, 0.05);
  REQUIRE(plan.rules.size() == 2);
  CHECK(plan.rules[0].algorithm == algorithm::recursive_doubling);
  CHECK(static_cast<double>(plan.rules[0].up_to_bytes) == doctest::Approx(800e3).epsilon(0.001));
  CHECK(plan.rules[1] == exchange_rule{no_end, algorithm::ring});
  // A comparison at 1 KiB, in the latency, says nothing about long messages.
  lengths[0].seconds = {at(1024) * 0.9, 0.1, at(1024)};
  plan = detail::plan_from(lengths, 4, 0.05);
  REQUIRE(plan.rules.size() == 3);
  CHECK(plan.rules[0] == exchange_rule{1536, algorithm::library});
  CHECK(plan.rules[1].algorithm == algorithm::recursive_doubling);
  CHECK(plan.rules[2] == exchange_rule{no_end, algorithm::ring});
  // A comparison at a length whose time is mostly transfer decides for longer messages.
  lengths[2].seconds = {0.05, 0.3, at(1 << 20)};
  plan = detail::plan_from(lengths, 4, 0.05);
  CHECK(plan.rules == std::vector<exchange_rule>{{no_end, algorithm::library}});
}

TEST_CASE("the ring is faster above a length that the number of ranks decides") {
  const detail::transfer_line line{0.02, 2e-7};
  CHECK(detail::doubling_messages(2) == 1);
  CHECK(detail::doubling_messages(3) == 3);
  CHECK(detail::doubling_messages(8) == 3);
  CHECK(detail::doubling_messages(9) == 5);
  CHECK(detail::ring_above(line, 2) == std::numeric_limits<double>::infinity());
  CHECK(detail::ring_above(line, 3) == doctest::Approx(0.6e5));
  CHECK(detail::ring_above(line, 4) == doctest::Approx(8e5));
  CHECK(detail::ring_above(line, 8) == doctest::Approx(8.8e5));
}

}  // namespace
