// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: threads that prepare the items of a batch while the program computes.

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <pufferfish/core/helper_thread.hpp>
#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A pool of threads that runs batches of calls. Items of an earlier batch begin before those of a later one;
/// items of both may run at the same time. All calls of start and wait must come from one thread of the
/// program.
///
///     batch_threads threads(4);
///     auto next = std::make_shared<batch_threads::batch>();
///     next->count = 256;
///     next->run = [&](index_t i, std::size_t thread) { read(i, decoders[thread]); };
///     threads.start(next);
///     ...                   // other work of the program
///     threads.wait(*next);  // all 256 calls have returned
class batch_threads {
 public:
  /// One batch: run(i, thread) for i = 0 .. count - 1, with `thread` below the number of threads, so that
  /// each thread may use memory of its own. A batch that is started has at least one item. The program sets
  /// count and run; the pool uses the other members.
  struct batch {
    index_t count = 0;                              ///< number of items
    std::function<void(index_t, std::size_t)> run;  ///< called for each item; may throw
    index_t next = 0, finished = 0;                 ///< first item that has not begun; items that have ended
    std::exception_ptr failure;                     // the first one
  };

  /// Starts `threads` threads. Throws backend_error if the system cannot start one; those that run are ended
  /// first.
  explicit batch_threads(std::size_t threads) : threads_(threads) {
    try {
      for (std::size_t i = 0; i < threads; ++i) {
        threads_[i].start([] { return "loader: cannot start a thread that decodes images"; },
                          [this, i] { work(i); });
      }
    } catch (...) {
      stop();
      throw;
    }
  }
  batch_threads(const batch_threads&) = delete;
  batch_threads& operator=(const batch_threads&) = delete;
  /// Drops the items that have not begun, waits for those that run, and ends the threads.
  ~batch_threads() { stop(); }

  /// Queues a batch and returns at once. The pool shares the batch until its last item has ended.
  void start(std::shared_ptr<batch> started) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      waiting_.push_back(std::move(started));
    }
    wake_.notify_all();
  }

  /// Blocks until all items of the batch have ended. Rethrows the first exception of an item; the other items
  /// run all the same.
  void wait(const batch& started) {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return started.finished == started.count; });
    if (started.failure) std::rethrow_exception(started.failure);
  }

 private:
  // The loop of one thread. Counters of a batch are read and changed under the lock, its items run without.
  void work(std::size_t thread) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return ends_ || !waiting_.empty(); });
      if (ends_) return;
      const std::shared_ptr<batch> now = waiting_.front();
      const index_t item = now->next++;
      if (now->next >= now->count) waiting_.pop_front();
      lock.unlock();
      std::exception_ptr failure;
      try {
        now->run(item, thread);
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      if (failure && !now->failure) now->failure = failure;
      if (++now->finished == now->count) done_.notify_all();
    }
  }

  // Ends the threads. Items that run are completed.
  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    wake_.notify_all();
    for (helper_thread& thread : threads_) thread.join();
  }

  std::mutex mutex_;                            // guards all members below and the counters of batches
  std::condition_variable wake_, done_;         // new work or the end; a batch has ended
  std::deque<std::shared_ptr<batch>> waiting_;  // batches with items that have not begun
  bool ends_ = false;
  std::vector<helper_thread> threads_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
