// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `thread_pool`: the threads of a CPU context. Work is cut into tasks by the caller, from shapes alone;
/// which thread runs a task never matters to the result, so results are the same for any number of threads.

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A fixed set of threads (the calling one included) that run numbered tasks.
class thread_pool {
 public:
  /// `threads` >= 1, else value_error; one means that everything runs in the caller.
  explicit thread_pool(int threads) {
    if (threads < 1) {
      detail::throw_error<value_error>({"thread_pool: ", threads, " threads asked for, at least 1"});
    }
    helpers_.reserve(static_cast<std::size_t>(threads - 1));
    for (int worker = 1; worker < threads; ++worker) helpers_.emplace_back([this, worker] { serve(worker); });
  }
  thread_pool(const thread_pool&) = delete;
  thread_pool& operator=(const thread_pool&) = delete;
  ~thread_pool() {
    stopping_ = true;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  int size() const { return static_cast<int>(helpers_.size()) + 1; }

  /// Calls body(task, worker) once for each task in 0 .. tasks - 1, `worker` in 0 .. size() - 1, and returns
  /// when all are done. Calls with the same worker never overlap. The first exception of any task is rethrown
  /// here. Not reentrant: a task may not call run.
  template <class Body>
  void run(index_t tasks, Body&& body) {
    using plain = std::remove_reference_t<Body>;
    run_tasks(tasks, const_cast<void*>(static_cast<const void*>(&body)),
              [](void* object, index_t task, int worker) { (*static_cast<plain*>(object))(task, worker); });
  }

 private:
  using invoke = void (*)(void*, index_t, int);

  // Not a template: a body is compiled once, whether threads run it or the caller does.
  PUFFERFISH_NOINLINE void run_tasks(index_t tasks, void* object, invoke call) {
    if (tasks <= 0) return;
    if (helpers_.empty() || tasks == 1) {
      for (index_t task = 0; task < tasks; ++task) call(object, task, 0);
      return;
    }
    start(tasks, object, call);
    work(0);
    for (int left = active_.load(std::memory_order_acquire); left != 0;
         left = active_.load(std::memory_order_acquire)) {
      active_.wait(left, std::memory_order_acquire);
    }
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

  void start(index_t tasks, void* object, invoke call) {
    PUFFERFISH_ASSERT(active_.load() == 0, "thread_pool: a task may not start tasks");
    tasks_ = tasks;
    object_ = object;
    call_ = call;
    next_.store(0, std::memory_order_relaxed);
    active_.store(static_cast<int>(helpers_.size()), std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }

  void serve(int worker) {
    std::uint32_t seen = 0;
    for (;;) {
      generation_.wait(seen, std::memory_order_acquire);
      seen = generation_.load(std::memory_order_acquire);
      if (stopping_) return;
      work(worker);
      if (active_.fetch_sub(1, std::memory_order_acq_rel) == 1) active_.notify_one();
    }
  }

  void work(int worker) {
    try {
      for (;;) {
        const index_t task = next_.fetch_add(1, std::memory_order_relaxed);
        if (task >= tasks_) return;
        call_(object_, task, worker);
      }
    } catch (...) {
      const std::lock_guard lock(failure_mutex_);
      if (!failure_) failure_ = std::current_exception();
      next_.store(tasks_, std::memory_order_relaxed);
    }
  }

  std::vector<std::thread> helpers_;
  std::atomic<std::uint32_t> generation_{0};
  std::atomic<index_t> next_{0};
  std::atomic<int> active_{0};
  std::atomic<bool> stopping_{false};
  index_t tasks_ = 0;
  void* object_ = nullptr;
  invoke call_ = nullptr;
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};

PUFFERFISH_NAMESPACE_END
