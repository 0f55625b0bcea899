// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the exchanges of a rare_exchange's fragments: at once, or under way while ranks take local
/// steps.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/core/tensor.hpp>
#include <pufferfish/distributed/exchange/gradient_reducer.hpp>
#include <pufferfish/distributed/exchange/job_thread.hpp>
#include <pufferfish/distributed/rare_exchange_options.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Holds the change D_w of this rank's parameters for every fragment of a rare_exchange, and replaces D_w by
/// its mean D over the ranks: at once by reduce(), or between start() and complete(). Meanwhile a thread
/// works if threads may use the communicator, or a started sum progresses; all other exchanges are made in
/// complete(). Exchanges are completed in the order in which they were started.
///
///     exchanges.start({.fragment = 0, .number = 7}, due);  // after change(0) was written
///     ...                                                  // local steps
///     if (exchanges.any_due(clock)) exchanges.complete(ctx);  // change(0) is now the mean
template <class T, class Comm>
class fragment_exchanges {
 public:
  /// An exchange of a fragment, with the numbers that compressors get.
  struct job {
    std::size_t fragment = 0;    ///< index in `fragments`
    std::uint64_t number = 0;    ///< number of this exchange among all
    index_t epoch = 0;           ///< epoch of the training run
    double learning_rate = 0.0;  ///< learning rate of the local steps
  };

  gradient_reducer<T, Comm> reducer;       ///< makes the means
  std::vector<gradient_bucket> fragments;  ///< ranges of the arena, set by prepare()
  index_t slots;                           ///< number of elements that are sent with a fragment after its own

  /// Checks the options; a call of prepare() must follow. Collective. Throws the errors of gradient_reducer.
  fragment_exchanges(const parameter_store<T>& store, Comm& comm, const rare_exchange_options& options,
                     std::optional<any_compressor<T>> compressor)
      : reducer(store, comm, options.exchange, std::move(compressor)),
        slots(options.measure_spread ? 1 : 0),
        outer_rate_(options.outer_rate),
        may_start_thread_(options.delay > 0 && options.exchange.progress != exchange_progress::calls) {}
  fragment_exchanges(const fragment_exchanges&) = delete;
  fragment_exchanges& operator=(const fragment_exchanges&) = delete;
  /// Completes the jobs of the thread. After a timeout, MPI may still write to the changes, so that their
  /// memory is never released.
  ~fragment_exchanges() {
    finish_thread();
    if (gave_up(reducer.comm())) keep_for_good(changes_);
  }

  /// Allocates the memory of the fragments, which cut an arena of `elements` elements. Local.
  void prepare(std::vector<gradient_bucket> cut, index_t elements) {
    fragments = std::move(cut);
    changes_ = std::make_shared<aligned_buffer<T>>(elements + slots * static_cast<index_t>(fragments.size()));
    queue_.assign(fragments.size(), {});
  }
  /// Starts the thread if exchanges are to be made by one. Collective.
  void start_thread() {
    if (!may_start_thread_ || fragments.empty() || reducer.comm().size() == 1 || !reducer.may_have_thread()) {
      return;
    }
    all_or_none(reducer.comm(), "rare_exchange", [this] {
      worker_ = std::make_unique<cpu_context>();
      jobs_.start(queue_.size(), [this](std::size_t place) { serve(place); });
    });
  }

  /// D_w of a fragment, after its exchange D.
  std::span<T> change(std::size_t fragment) const { return all_of(fragment).first(size_of(fragment)); }
  /// change(fragment), followed by the elements that are sent with it (`slots`).
  std::span<T> all_of(std::size_t fragment) const {
    const auto extra = static_cast<std::size_t>(slots);
    return changes_->span().subspan(static_cast<std::size_t>(fragments[fragment].offset) + extra * fragment,
                                    size_of(fragment) + extra);
  }

  /// Replaces D_w by D, on the exchange's thread or the caller's.
  void reduce(context<device::cpu>& ctx, const job& what) {
    const std::size_t f = what.fragment;
    reducer.counts().set_steps(what.number);
    reducer.set_epoch(what.epoch, what.learning_rate);
    reducer.set_rate(outer_rate_);
    if (reducer.has_compressor() && fragments.size() == 1) {
      reducer.close(ctx, change(f));
    } else if (reducer.has_compressor() || reducer.comm().size() > 1) {
      reducer.reduce(f, all_of(f));
    }
  }

  // The following members make exchanges that are under way during local steps.

  /// Starts an exchange. any_due(clock) reports it for clocks from `due` on.
  void start(const job& what, std::uint64_t due) {
    pending_exchange& one = pending_.emplace_back();
    one.what = what;
    one.due = due;
    const std::span<T> values = all_of(what.fragment);
    if (jobs_.running()) {
      queue_[next_job_] = what;
      next_job_ = (next_job_ + 1) % queue_.size();
      jobs_.add(1);
      one.jobs = jobs_.added();
    } else if (reducer.comm().size() > 1 && reducer.starts(values)) {
      one.sum = reducer.comm().start_all_reduce_sum(values);
      one.started = true;
    }
  }
  /// Whether an exchange was started and is not completed.
  bool any() const { return !pending_.empty(); }
  /// Whether an exchange of this fragment was started and is not completed.
  bool any_of(std::size_t fragment) const {
    return std::any_of(pending_.begin(), pending_.end(),
                       [=](const pending_exchange& one) { return one.what.fragment == fragment; });
  }
  /// Whether the oldest exchange is to be completed at this clock.
  bool any_due(std::uint64_t clock) const { return any() && pending_.front().due <= clock; }
  /// Lets started sums progress.
  void progress() {
    for (pending_exchange& one : pending_) {
      if (one.started) one.sum.done();
    }
  }
  /// Waits for all exchanges that were started or given to the thread, so that no message is under way.
  void await() {
    for (pending_exchange& one : pending_) await(one);
  }
  /// Ends the oldest exchange, whose D is then in change(). Returns its fragment.
  std::size_t complete(context<device::cpu>& ctx) {
    pending_exchange& one = pending_.front();
    await(one);
    if (!one.done) reduce(ctx, one.what);
    const std::size_t f = one.what.fragment;
    pending_.pop_front();
    return f;
  }
  /// Time of the thread in its jobs since the last call, in ms. Only if no exchange is under way.
  double take_busy_ms() { return std::exchange(busy_ms_, 0.0); }

 private:
  using request = decltype(std::declval<Comm&>().start_all_reduce_sum(std::span<T>()));

  // An exchange that was started and is not completed.
  struct pending_exchange {
    job what;                // its fragment and numbers
    std::uint64_t due = 0;   // clock from which it is to be completed
    std::uint32_t jobs = 0;  // number of the thread's jobs that are done then
    bool started = false;    // the sum has been started
    bool done = false;       // the mean is in changes_
    request sum{};           // the started sum
  };

  // Number of elements of a fragment.
  std::size_t size_of(std::size_t fragment) const {
    return static_cast<std::size_t>(fragments[fragment].size);
  }

  // Waits for an exchange that was started or given to the thread; others are made in complete().
  void await(pending_exchange& one) {
    if (one.done) return;
    if (jobs_.running()) {
      jobs_.await(one.jobs);
      if (failed_.load(std::memory_order_acquire)) std::rethrow_exception(thrown_);
      one.done = true;
    } else if (one.started) {
      one.sum.wait();
      scale_values(all_of(one.what.fragment), reducer.mean_factor());
      one.done = true;
    }
  }

  // Jobs that were added are completed first, since other ranks wait for them, unless ranks are lost.
  void finish_thread() {
    if (!jobs_.running()) return;
    try {
      jobs_.await(jobs_.added());
    } catch (const error&) {  // a forked process
    }
    jobs_.stop();
  }
  // A job of the thread: the exchange at queue_[place]. Nothing after a failure.
  void serve(std::size_t place) {
    if (failed_.load(std::memory_order_relaxed)) return;
    const auto start = std::chrono::steady_clock::now();
    try {
      reduce(*worker_, queue_[place]);
    } catch (...) {
      thrown_ = std::current_exception();
      failed_.store(true, std::memory_order_release);
    }
    busy_ms_ += milliseconds_since(start);
  }

  double outer_rate_;
  bool may_start_thread_;
  std::shared_ptr<aligned_buffer<T>> changes_;  // D_w, then D, of all fragments, with their slots
  std::deque<pending_exchange> pending_;        // the oldest first
  // Members that the thread uses.
  std::vector<job> queue_;     // of the thread's jobs, by place
  std::size_t next_job_ = 0;   // place of the next job
  std::exception_ptr thrown_;  // by the first job that has failed; later jobs do nothing
  std::atomic<bool> failed_{false};
  double busy_ms_ = 0.0;
  std::unique_ptr<cpu_context> worker_;
  job_thread jobs_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
