// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `thread_pool`: the threads of a CPU context. Work is cut into tasks by the caller, from shapes alone;
/// which thread runs a task never matters to the result, so results are the same for any number of threads.
///
/// The threads are OpenMP's where the unit is compiled with it (-fopenmp), so that a program that uses OpenMP
/// elsewhere does not run two sets of them; otherwise a pool has its own.

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

/// Numbered tasks that workers take one after the other, and the first exception of any.
class task_list {
 public:
  using invoke = void (*)(void*, index_t, int);

  void start(index_t tasks, void* object, invoke call) {
    tasks_ = tasks;
    object_ = object;
    call_ = call;
    next_.store(0, std::memory_order_relaxed);
  }

  /// Runs tasks until none is left.
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

  void rethrow() {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

  /// Whether the calling thread is in a task of this list.
  bool in_task() const { return current_ == this; }

  /// Marks the calling thread as one that runs tasks of a list.
  class scope {
   public:
    explicit scope(const task_list* list) : before_(std::exchange(current_, list)) {}
    scope(const scope&) = delete;
    scope& operator=(const scope&) = delete;
    ~scope() { current_ = before_; }

   private:
    const task_list* before_;
  };

 private:
  static inline thread_local const task_list* current_ = nullptr;
  std::atomic<index_t> next_{0};
  index_t tasks_ = 0;
  void* object_ = nullptr;
  invoke call_ = nullptr;
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};

#if defined(_OPENMP)

/// Teams of OpenMP's threads.
class thread_team {
 public:
  static constexpr const char* advice =
      "fork before the first pass, since OpenMP starts its threads only once";

  explicit thread_team(int threads) : threads_(threads) {}
  int size() const { return threads_; }
  /// Whether this process is a fork of one whose OpenMP threads we used: the runtime would wait for them.
  static bool is_lost() {
    return first_use_.load(std::memory_order_relaxed) > 0 && first_use_ != fork_count() + 1;
  }
  // The team may be smaller than asked for (in a parallel region of the caller, say): tasks are taken, not
  // dealt.
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

/// Threads of our own, which sleep between runs.
class thread_team {
 public:
  static constexpr const char* advice = "make a new one after fork";

  // Delegates, so that the destructor ends the threads that run if one cannot be started.
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

  int size() const { return static_cast<int>(helpers_.size()) + 1; }
  /// Whether this process is a fork of the one that started the threads, which do not exist here.
  bool is_lost() const { return !helpers_.empty() && helpers_.front().is_lost(); }

  void run(task_list& list) {
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

  void wake() {
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }

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

/// A fixed number of threads (the calling one included) that run numbered tasks.
class thread_pool {
 public:
  /// `threads` >= 1, else value_error; one means that everything runs in the caller. Throws backend_error if
  /// a thread cannot be started.
  explicit thread_pool(int threads) : team_(checked(threads)) {}

  int size() const { return team_.size(); }

  /// Calls body(task, worker) once for each task in 0 .. tasks - 1, `worker` in 0 .. size() - 1, and returns
  /// when all are done. Calls with the same worker never overlap. The first exception of any task is rethrown
  /// here. Throws state_error if a task of this pool calls it, if two threads call it at once, and in a
  /// forked process if several threads would be needed: the parent's do not exist there.
  template <class Body>
  void run(index_t tasks, Body&& body) {
    using plain = std::remove_reference_t<Body>;
    run_tasks(tasks, const_cast<void*>(static_cast<const void*>(&body)),
              [](void* object, index_t task, int worker) { (*static_cast<plain*>(object))(task, worker); });
  }

 private:
  static int checked(int threads) {
    if (threads < 1) {
      detail::throw_error<value_error>({"thread_pool: ", threads, " threads asked for, at least 1"});
    }
    return threads;
  }

  // Not a template: a body is compiled once, whether threads run it or the caller does.
  PUFFERFISH_NOINLINE void run_tasks(index_t tasks, void* object, detail::task_list::invoke call) {
    if (tasks <= 0) return;
    const bool alone = size() == 1 || tasks == 1, nested = list_.in_task();
    if (nested && !alone) {
      detail::throw_error<state_error>(
          {"thread_pool: a task started tasks on the context (or pool) that runs it; use another one there"});
    }
    const bool lost = team_.is_lost();
    const use in_use(in_use_, nested || lost);  // the fork may have come while another thread held the flag
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

  // Refuses a second thread. A task that runs everything in its own thread may go on.
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
