// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `helper_thread`, a thread that reports a failed start as backend_error and whose owner can be
/// destroyed in a forked process, where the thread does not exist.

#include <atomic>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include <pufferfish/core/message.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Number of forks between the start of the program and this process.
inline std::uint32_t fork_count() {
  static std::atomic<std::uint32_t> count{0};
#if defined(__unix__) || defined(__APPLE__)
  // A counter costs one load; getpid() would cost a system call in every pass.
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1); });
  static_cast<void>(registered);
#endif
  return count.load(std::memory_order_relaxed);
}

/// Owns one thread, or none before start(). start() may be called only while no thread is running. The
/// destructor waits for the thread. An object must not be used by several threads at once.
///
///     helper_thread thread;
///     thread.start([] { return "reader: its thread cannot be started"; }, [&] { read(); });
///     thread.join();
class helper_thread {
 public:
  helper_thread() = default;
  helper_thread(helper_thread&&) noexcept = default;
  helper_thread& operator=(helper_thread&&) = delete;
  ~helper_thread() { join(); }

  /// Runs body() in a new thread. `body` must not throw. Throws backend_error if the system cannot start a
  /// thread; its text begins with the result of what(), which is called only then.
  template <class What, class Body>
  void start(What&& what, Body&& body) {
    forks_ = fork_count();
    PUFFERFISH_DETAIL_TRY { thread_ = std::thread(std::forward<Body>(body)); }
    PUFFERFISH_DETAIL_CATCH(std::system_error, failure) {
      throw_error<backend_error>({what(), " (", failure.what(),
                                  "): ask for fewer threads, or raise this process's limits on threads and "
                                  "memory (ulimit -u, ulimit -v)"});
    }
  }

  /// Whether a thread was started and not joined; also true for a thread that has ended by itself.
  bool running() const { return thread_.joinable(); }
  /// Whether this process was forked after the thread was started: the thread does not exist in the fork.
  bool is_lost() const { return running() && forks_ != fork_count(); }

  /// Waits for the thread to end. A lost thread is dropped without waiting.
  void join() {
    if (!running()) return;
    // A lost thread can be neither joined nor detached, and std::thread's destructor would end the program.
    if (is_lost()) {
      ::new (static_cast<void*>(&thread_)) std::thread;
    } else {
      thread_.join();
    }
  }

 private:
  std::thread thread_;
  std::uint32_t forks_ = 0;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
