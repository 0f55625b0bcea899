// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <pufferfish/core/error.hpp>
#include <pufferfish/distributed/exchange/exchange_failure.hpp>
#include <pufferfish/distributed/exchange/job_thread.hpp>

#include "../../support/child_process.hpp"

namespace pf = pufferfish;
using pf::detail::job_thread;

TEST_CASE("job_thread: jobs are done in order, round after round, when they may be") {
  std::vector<std::size_t> done;
  job_thread jobs;
  CHECK_FALSE(jobs.running());
  jobs.start(3, [&](std::size_t job) { done.push_back(job); });
  CHECK(jobs.running());
  jobs.await(0);
  jobs.add(2);
  jobs.await(2);
  CHECK(done == std::vector<std::size_t>{0, 1});
  jobs.add(1);
  jobs.add(4);
  CHECK(jobs.added() == 7);
  jobs.await(7);
  CHECK(done == std::vector<std::size_t>{0, 1, 2, 0, 1, 2, 0});
  jobs.await(3);  // long ago
  jobs.stop();
  CHECK_FALSE(jobs.running());
  jobs.stop();
}

TEST_CASE("job_thread: many threads tell it, several wait; its end leaves the rest undone") {
  constexpr std::uint32_t tellers = 3, each = 500;
  std::atomic<std::uint32_t> sum{0};
  {
    job_thread jobs;
    jobs.start(5, [&](std::size_t) { ++sum; });
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < tellers; ++t) {
      threads.emplace_back([&] {
        for (std::uint32_t i = 0; i < each; ++i) jobs.add(1);
        jobs.await(each);
      });
    }
    jobs.await(tellers * each);
    CHECK(sum == tellers * each);
    for (std::thread& thread : threads) thread.join();
  }
  std::atomic<bool> go{false};
  sum = 0;
  job_thread jobs;
  jobs.start(1, [&](std::size_t) {
    go.wait(false);
    ++sum;
  });
  jobs.add(1000);
  std::thread([&] {
    go = true;
    go.notify_all();
  }).join();
  jobs.await(1);
  jobs.stop();
  CHECK(sum >= 1);
  CHECK(sum <= 1001);
}

TEST_CASE("job_thread: in a forked process waiting is an error, and its end does not wait") {
  std::optional<job_thread> jobs(std::in_place);
  std::atomic<int> done{0};
  jobs->start(1, [&](std::size_t) { ++done; });
  jobs->add(1);
  jobs->await(1);
  const std::string text = text_of_child([&] {
    std::string told = "nothing was thrown";
    jobs->add(1);
    try {
      jobs->await(2);
    } catch (const pf::state_error& e) {
      told = e.what();
    }
    jobs.reset();
    return told;
  });
  CHECK(text ==
        "gradient_exchange: this process was forked after the exchange started its thread, which does not "
        "exist "
        "here: make a new exchange after fork");
  jobs->add(1);
  jobs->await(2);
  CHECK(done == 2);
}

TEST_CASE("exchange_failure: the first failure is kept, also one whose exception has no text") {
  pf::detail::exchange_failure failure;
  failure.require_none();
  for (const std::exception_ptr& thrown :
       {std::make_exception_ptr(std::runtime_error("")), std::make_exception_ptr(7)}) {
    pf::detail::exchange_failure fresh;
    fresh.keep(thrown);
    CHECK_THROWS_WITH_AS(fresh.require_none(), doctest::Contains("(unknown exception)"), pf::state_error);
    fresh.keep(std::make_exception_ptr(std::runtime_error("later")));
    CHECK_THROWS_WITH_AS(fresh.require_none(), doctest::Contains("(unknown exception)"), pf::state_error);
  }
}
