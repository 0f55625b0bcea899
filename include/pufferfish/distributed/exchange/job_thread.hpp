// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: a thread that runs numbered jobs as they are released.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include <pufferfish/core/config.hpp>
#include <pufferfish/core/helper_thread.hpp>
#include <pufferfish/core/message.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A thread that runs released jobs in order, one after the other. It sleeps between jobs; threads that wait
/// for a job sleep, too. Numbers of jobs are counted since the start and wrap around at 2^32. The destructor
/// stops the thread and drops the jobs that are not done.
///
///     job_thread thread;
///     thread.start(3, [&](std::size_t place) { work(place); });  // places 0, 1, 2, 0, 1, ...
///     thread.add(2);                                             // work(0) and work(1) may run
///     thread.await(thread.added());                              // both have returned
class job_thread {
 public:
  job_thread() = default;
  job_thread(const job_thread&) = delete;
  job_thread& operator=(const job_thread&) = delete;
  ~job_thread() { stop(); }

  /// Whether the thread was started and not stopped.
  bool running() const { return thread_.running(); }

  /// Starts the thread, which calls serve(0), serve(1), ... serve(round - 1), serve(0), ..., once for each
  /// job: the argument is the job's place in a round. `serve` must not throw. Throws backend_error if the
  /// thread cannot be started.
  template <class Serve>
  void start(std::size_t round, Serve serve) {
    const auto what = [] { return "gradient_exchange: its thread cannot be started"; };
    thread_.start(what, [this, round, serve] {
      for (std::size_t next = 0;; next = (next + 1) % round) {
        const std::uint32_t done = done_.load(std::memory_order_relaxed);
        while (added_.load(std::memory_order_acquire) == done) {
          added_.wait(done, std::memory_order_acquire);
        }
        if (stopping_) return;
        serve(next);
        done_.store(done + 1, std::memory_order_release);
        done_.notify_all();
      }
    });
  }

  /// Ends the thread after its current job; later jobs are dropped. Any other thread may call it.
  void stop() {
    if (!running()) return;
    stopping_ = true;
    add(1);
    thread_.join();
  }

  /// Releases `jobs` more jobs. Any thread may call it: no lock, no allocation.
  void add(std::uint32_t jobs) {
    added_.fetch_add(jobs, std::memory_order_release);
    added_.notify_one();
  }

  /// Number of jobs released since the start.
  std::uint32_t added() const { return added_.load(std::memory_order_acquire); }

  /// Waits until `count` jobs since the start are done. Throws state_error in a forked process.
  void await(std::uint32_t count) const {
    if (thread_.is_lost()) {
      throw_error<state_error>(
          {"gradient_exchange: this process was forked after the exchange started its "
           "thread, which does not exist here: make a new exchange after fork"});
    }
    for (std::uint32_t done = done_.load(std::memory_order_acquire);
         static_cast<std::int32_t>(count - done) > 0; done = done_.load(std::memory_order_acquire)) {
      done_.wait(done, std::memory_order_acquire);
    }
  }

 private:
  std::atomic<std::uint32_t> added_{0}, done_{0};
  std::atomic<bool> stopping_{false};
  helper_thread thread_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
