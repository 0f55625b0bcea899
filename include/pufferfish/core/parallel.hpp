// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `thread_pool`: the threads of a CPU context. Callers cut work into tasks by shapes alone. The result does
/// not depend on which thread runs a task, so results are the same for any number of threads.
///
/// Translation units compiled with -fopenmp use OpenMP's threads, so that a program that uses OpenMP
/// elsewhere does not run two sets of threads. Otherwise each pool starts threads of its own.

#if defined(_OPENMP)
#include <omp.h>
#endif

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/helper_thread.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace detail {

/// Numbered tasks that workers fetch one by one, and the first exception thrown by any task. A run is:
/// start(), then work() on every worker, then rethrow() on the thread that started it.
class task_list {
 public:
  /// Function that runs a task; its arguments are the object, the task and the worker.
  using invoke = void (*)(void*, index_t, int);

  /// Sets the tasks of a run: call(object, task, worker) for task = 0 .. tasks - 1.
  void start(index_t tasks, void* object, invoke call) {
    tasks_ = tasks;
    object_ = object;
    call_ = call;
    next_.store(0, std::memory_order_relaxed);
  }

  /// Runs tasks until all tasks of the list have been started. Throws nothing: after an exception no further
  /// task starts.
  void work(int worker) {
    const scope of_this_thread(this);
    PUFFERFISH_DETAIL_TRY {
      for (;;) {
        const index_t task = next_.fetch_add(1, std::memory_order_relaxed);
        if (task >= tasks_) return;
        call_(object_, task, worker);
      }
    }
    PUFFERFISH_DETAIL_CATCH_ALL {
      const std::lock_guard lock(failure_mutex_);
      if (!failure_) failure_ = std::current_exception();
      next_.store(tasks_, std::memory_order_relaxed);
    }
  }

  /// Rethrows the first exception of the run, if there was one, and forgets it.
  void rethrow() {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

  /// Whether the calling thread is running a task of this list.
  bool in_task() const { return current_ == this; }

  /// Marks the calling thread as running tasks of a list, for the lifetime of the scope.
  class scope {
   public:
    explicit scope(const task_list* list) : before_(std::exchange(current_, list)) {}
    scope(const scope&) = delete;
    scope& operator=(const scope&) = delete;
    ~scope() { current_ = before_; }

   private:
    // The list of the task that encloses the scope: a task may run the tasks of another pool.
    const task_list* before_;
  };

 private:
  // The list of which this thread is running a task; nullptr: none.
  static inline thread_local const task_list* current_ = nullptr;
  std::atomic<index_t> next_{0};
  index_t tasks_ = 0;
  void* object_ = nullptr;
  invoke call_ = nullptr;
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};

#if defined(_OPENMP)

/// Runs a task list on a team of OpenMP threads.
class thread_team {
 public:
  /// Advice at the end of the error text for runs in a forked process.
  static constexpr const char* advice =
      "fork before the first pass, since OpenMP starts its threads only once";

  /// Starts no thread: OpenMP does so in the first run.
  explicit thread_team(int threads) : threads_(threads) {}
  /// Number of threads, the calling one included.
  int size() const { return threads_; }
  /// Whether this process is a fork made after OpenMP threads were used: the runtime would wait for them.
  static bool is_lost() {
    return first_use_.load(std::memory_order_relaxed) > 0 && first_use_ != fork_count() + 1;
  }
  // The team may be smaller than requested (inside a parallel region of the caller, for example). Threads
  // therefore fetch tasks dynamically.
  void run(task_list& list) {
    first_use_.store(fork_count() + 1, std::memory_order_relaxed);
#pragma omp parallel num_threads(threads_)
    list.work(omp_get_thread_num());
  }

 private:
  static inline std::atomic<std::uint32_t> first_use_{0};  // 1 + the number of forks at that time
  int threads_;
};

#else

/// Threads that this pool starts; they sleep between runs.
class thread_team {
 public:
  /// Advice at the end of the error text for runs in a forked process.
  static constexpr const char* advice = "make a new one after fork";

  // Delegates to the default constructor, so that the destructor ends the threads already started if a later
  // thread cannot be started.
  explicit thread_team(int threads) : thread_team() {
    helpers_.reserve(static_cast<std::size_t>(threads - 1));
    for (int worker = 1; worker < threads; ++worker) {
      helpers_.emplace_back().start(
          [&] {
            return message({"thread_pool: ", threads, " threads asked for, the calling one included; ",
                            worker, " run, and the next cannot be started"});
          },
          [this, worker] { serve(worker); });
    }
  }
  thread_team(const thread_team&) = delete;
  thread_team& operator=(const thread_team&) = delete;
  ~thread_team() {
    list_ = nullptr;
    wake();
    for (helper_thread& helper : helpers_) helper.join();
  }

  /// Number of threads, the calling one included.
  int size() const { return static_cast<int>(helpers_.size()) + 1; }
  /// Whether this process was forked after the threads were started: they do not exist in the fork.
  bool is_lost() const { return !helpers_.empty() && helpers_.front().is_lost(); }

  /// Runs the list on all threads; the calling thread is worker 0. Returns when all threads are done with the
  /// list.
  void run(task_list& list) {
    // The release in wake() makes list_ visible to the helpers, and the acquire of active_ makes the results
    // of their tasks visible here.
    list_ = &list;
    active_.store(static_cast<int>(helpers_.size()), std::memory_order_relaxed);
    wake();
    list.work(0);
    for (int left = active_.load(std::memory_order_acquire); left != 0;
         left = active_.load(std::memory_order_acquire)) {
      active_.wait(left, std::memory_order_acquire);
    }
  }

 private:
  thread_team() = default;

  // Starts a generation, for which the helpers wait.
  void wake() {
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }

  // The loop of a thread: waits for the next generation, and ends when there is no list.
  void serve(int worker) {
    std::uint32_t seen = 0;
    for (;;) {
      generation_.wait(seen, std::memory_order_acquire);
      seen = generation_.load(std::memory_order_acquire);
      if (list_ == nullptr) return;
      list_->work(worker);
      if (active_.fetch_sub(1, std::memory_order_acq_rel) == 1) active_.notify_one();
    }
  }

  std::vector<helper_thread> helpers_;
  std::atomic<std::uint32_t> generation_{0};
  std::atomic<int> active_{0};
  task_list* list_ = nullptr;
};

#endif

}  // namespace detail

/// A fixed number of threads, including the calling thread, that run numbered tasks.
/// \code
/// thread_pool pool(4);  // three threads besides the calling one
/// pool.run(x.size(), [&](index_t task, int) { y(task) = 2 * x(task); });  // tensor<double, 1> x, y
/// \endcode
///
/// The threads sleep between runs. The pool is neither copyable nor movable; its destructor waits for the
/// threads. It may be destroyed in a forked process, where the threads do not exist.
class thread_pool {
 public:
  /// Makes a pool of `threads` threads, the calling one included. With one thread, all tasks run in the
  /// calling thread. Throws value_error unless threads >= 1, and backend_error if a thread cannot be started.
  explicit thread_pool(int threads) : team_(checked(threads)) {}

  /// Number of threads, the calling one included.
  int size() const { return team_.size(); }

  /// Calls body(task, worker) once for each task in 0 .. tasks - 1, with `worker` in 0 .. size() - 1, and
  /// returns when all tasks are done. Calls with the same worker never overlap. The first exception of any
  /// task is rethrown. Throws state_error if a task of this pool calls run, if two threads call run at once,
  /// and in a forked process if several threads are needed: the parent's threads do not exist there.
  /// After an exception, tasks that have not started are dropped. tasks <= 0 does nothing. A task may call
  /// run on its own pool only if that runs in the calling thread (one thread, or one task).
  template <class Body>
  void run(index_t tasks, Body&& body) {
    using plain = std::remove_reference_t<Body>;
    run_tasks(tasks, const_cast<void*>(static_cast<const void*>(&body)),
              [](void* object, index_t task, int worker) { (*static_cast<plain*>(object))(task, worker); });
  }

 private:
  // Throws value_error unless threads >= 1.
  static int checked(int threads) {
    if (threads < 1) {
      detail::throw_error<value_error>({"thread_pool: ", threads, " threads asked for, at least 1"});
    }
    return threads;
  }

  // Not a template: each body is compiled once, for both the threaded and the single-threaded path.
  PUFFERFISH_NOINLINE void run_tasks(index_t tasks, void* object, detail::task_list::invoke call) {
    if (tasks <= 0) return;
    const bool alone = size() == 1 || tasks == 1, nested = list_.in_task();
    if (nested && !alone) {
      detail::throw_error<state_error>(
          {"thread_pool: a task started tasks on the context (or pool) that runs it; use another one there"});
    }
    const bool lost = team_.is_lost();
    const use in_use(in_use_, nested || lost);  // at the fork, another thread may have held the flag
    if (alone) {
      const detail::task_list::scope of_this_thread(&list_);
      for (index_t task = 0; task < tasks; ++task) call(object, task, 0);
      return;
    }
    if (lost) {
      detail::throw_error<state_error>(
          {"thread_pool: this process was forked after the context (or pool) had started threads, and they "
           "do not "
           "exist here: ",
           detail::thread_team::advice});
    }
    list_.start(tasks, object, call);
    team_.run(list_);
    list_.rethrow();
  }

  // Throws if a second thread enters. Nested calls that run all tasks in the calling thread are not checked.
  class use {
   public:
    use(std::atomic<bool>& flag, bool unchecked) : flag_(unchecked ? nullptr : &flag) {
      if (!unchecked && flag.exchange(true, std::memory_order_acquire)) {
        detail::throw_error<state_error>(
            {"thread_pool: two threads use one context (or pool) at once; each thread needs one of its own"});
      }
    }
    use(const use&) = delete;
    use& operator=(const use&) = delete;
    ~use() {
      if (flag_ != nullptr) flag_->store(false, std::memory_order_release);
    }

   private:
    std::atomic<bool>* flag_;
  };

  std::atomic<bool> in_use_{false};
  detail::task_list list_;
  detail::thread_team team_;
};

PUFFERFISH_NAMESPACE_END
