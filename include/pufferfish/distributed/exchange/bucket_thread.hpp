// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the thread that exchanges buckets while the backward pass computes, in direct steps and in
/// replays of captured ones.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include <pufferfish/distributed/exchange/exchange_counts.hpp>
#include <pufferfish/distributed/exchange/exchange_failure.hpp>
#include <pufferfish/distributed/exchange/gradient_staging.hpp>
#include <pufferfish/distributed/exchange/job_thread.hpp>
#include <pufferfish/distributed/waiting.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The thread that exchanges buckets. A step has a job for every bucket, and a last job that closes the step.
/// Jobs are released by the calls of notification(), which a device's stream makes for a replayed step, and
/// are done in order. `Work` is a bucket_work.
template <class Work>
class bucket_thread {
 public:
  /// `failure` keeps the failure of a replay, after which all later replays fail, too. Both arguments must
  /// outlive the object.
  bucket_thread(Work& work, exchange_failure& failure) : work_(&work), failure_(&failure) {
    for (std::uint32_t b = 0; b < work.buckets.size(); ++b) places_.push_back({this, b});
  }

  /// Starts the thread unless it runs. Throws backend_error if the system cannot start one.
  void start() {
    if (!jobs_.running()) jobs_.start(jobs_of_step(), [this](std::size_t job) { serve(job); });
  }
  /// Ends the thread after its current job.
  void stop() { jobs_.stop(); }

  /// Returns a call that releases the job of bucket b; to be made when the bucket is in the exchange's
  /// memory. `replayed`: the call is part of a replay, not of a direct step.
  host_call notification(std::size_t b, bool replayed) {
    return {replayed ? &bucket_thread::replayed_bucket_fetched : &bucket_thread::bucket_fetched, &places_[b]};
  }
  /// Returns a call that waits until bucket b is exchanged; for the last bucket, until the step is closed.
  /// For replays, after the notifications of all buckets.
  host_call wait(std::size_t b) { return {&bucket_thread::await_bucket, &places_[b]}; }

  /// Ends a direct step; all its buckets must have been fetched with their notifications. Calls take(b) for
  /// every bucket, in order, as soon as it is exchanged. Then waits until the thread no longer uses the
  /// gradients, and returns whether the step may be taken, or throws the exception of one of its jobs.
  template <class Take>
  bool finish(Take&& take) {
    // After this, all of the step's jobs have been added. If a device has failed, this throws; its jobs would
    // never be added.
    work_->staging.await(places_.size() - 1);
    const std::uint32_t all = jobs_.added();
    for (const place& p : places_) {
      jobs_.await(all - jobs_of_step() + p.bucket + 1);
      if (failed_.load(std::memory_order_relaxed)) break;
      take(p.bucket);
    }
    jobs_.await(all);
    if (const std::exception_ptr thrown = take_exception()) std::rethrow_exception(thrown);
    return usable_;
  }

 private:
  // Argument of a host function in a stream: the object, and the number of the bucket.
  struct place {
    bucket_thread* thread;
    std::uint32_t bucket;
  };

  // Number of jobs of a step: one for each bucket, and the job that closes the step.
  std::uint32_t jobs_of_step() const { return static_cast<std::uint32_t>(places_.size() + 1); }
  // Number of jobs of a step that may be done when the bucket is fetched. The last one allows the job that
  // closes the step.
  std::uint32_t jobs_up_to(std::uint32_t bucket) const {
    return bucket + 1 < places_.size() ? bucket + 1 : jobs_of_step();
  }

  // Host functions. They run on threads of the device's runtime library, or on the caller's in direct steps
  // on a CPU, and must neither block for long nor throw.
  static void bucket_fetched(void* object) { fetched(*static_cast<place*>(object), false); }
  static void replayed_bucket_fetched(void* object) { fetched(*static_cast<place*>(object), true); }
  static void fetched(const place& p, bool replayed) {
    p.thread->replayed_.store(replayed, std::memory_order_relaxed);
    p.thread->jobs_.add(p.thread->jobs_up_to(p.bucket) - p.bucket);
  }
  // Host function of a replay: blocks until the bucket is exchanged. The time counts as exposed.
  static void await_bucket(void* object) {
    const place& p = *static_cast<place*>(object);
    bucket_thread& self = *p.thread;
    const auto start = std::chrono::steady_clock::now();
    self.jobs_.await(self.jobs_.added() - self.jobs_of_step() + self.jobs_up_to(p.bucket));
    self.work_->reducer.counts().report().exposed_ms += milliseconds_since(start);
  }

  // Runs one job on the thread. After an exception the later jobs of the step do nothing; the step's last job
  // passes the exception on.
  void serve(std::size_t job) {
    const auto start = std::chrono::steady_clock::now();
    const bool replayed = replayed_.load(std::memory_order_relaxed);
    try {
      if (job == 0) begin_step(replayed);
      if (!failed_.load(std::memory_order_relaxed)) serve_unless_failed(job);
    } catch (...) {
      thrown_ = std::current_exception();
      failed_.store(true, std::memory_order_relaxed);
      work_->staging.set_usable(false);
    }
    if (job == places_.size() && replayed) leave_failure();
    count_time(start);
  }
  // Prepares a step. Direct steps have restarted the reducer themselves. A replay fails here if an earlier
  // one has failed.
  void begin_step(bool replayed) {
    work_->staging.enter_thread();
    work_->staging.set_usable(true);
    if (!replayed) return;
    work_->reducer.restart();
    failure_->require_none();
  }
  // Exchanges bucket `job`, or closes the step.
  void serve_unless_failed(std::size_t job) {
    if (job < places_.size()) {
      work_->check_finite(job);
      if (work_->reducer.by_bucket()) work_->reducer.reduce(job, work_->gradients_of(job));
    } else {
      usable_ = work_->close();
      work_->staging.set_usable(usable_);
    }
  }
  // Adds the duration of a job, and the processor time that the thread has used in it, to the report.
  void count_time(std::chrono::steady_clock::time_point start) {
    exchange_report& report = work_->reducer.counts().report();
    report.busy_ms += milliseconds_since(start);
    const double now = thread_processor_ms();
    report.processor_ms += now - std::exchange(processor_ms_, now);
  }

  // Returns the exception of the step's jobs, which are done, and clears it; nullptr: there was none.
  std::exception_ptr take_exception() {
    failed_.store(false, std::memory_order_relaxed);
    return std::exchange(thrown_, nullptr);
  }
  // Passes the thread's exception to the context. Later replays are skipped and pass a failure again.
  void leave_failure() {
    const std::exception_ptr thrown = take_exception();
    if (!thrown) return;
    if (!work_->reducer.counts().stopped()) failure_->keep(thrown);
    if constexpr (Work::on_device) work_->staging.leave_failure(thrown);
  }

  Work* work_;
  exchange_failure* failure_;
  std::vector<place> places_;  // of each bucket
  // Results of the thread: whether the step may be taken, and the exception of a job. The caller may read
  // failed_ while the thread works, and the others when all jobs of the step are done.
  bool usable_ = true;
  std::exception_ptr thrown_;
  std::atomic<bool> failed_{false}, replayed_{false};
  double processor_ms_ = 0.0;  // processor time of the thread at its last report
  job_thread jobs_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
