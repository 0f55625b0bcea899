// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the owner of an NCCL communicator, with a thread that aborts it when it fails or hangs.

#if defined(__has_include)
#if !__has_include(<nccl.h>)
#error "pufferfish: <pufferfish/gpu/nccl.hpp> needs NCCL's header: add its include folder"
#endif
#endif
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <pufferfish/core/helper_thread.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/distributed/waiting.hpp>
#include <pufferfish/gpu/runtime/error.hpp>
#include <pufferfish/gpu/runtime/failure.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Number of operations on the device, counted by host functions in the stream.
struct open_operations {
  std::atomic<int> count{0};
  std::atomic<std::int64_t> since{0};  // time of the last begin or end

  /// Makes one that is never destroyed: the driver may report an operation after the communicator's end.
  static open_operations& make() {
    static std::mutex mutex;
    static auto* const all = new std::deque<open_operations>;
    const std::lock_guard<std::mutex> locked(mutex);
    return all->emplace_back();
  }
};

/// Aborts a communicator. Its kernels return at once, but then NCCL waits for the end of graphs with its
/// work, whose owner may be waiting for the caller. So a separate thread makes the call.
class nccl_abortion {
 public:
  /// Returns before the abortion is done; see wait().
  void begin(ncclComm_t comm) noexcept {
    const auto done = done_;
    done->store(false);
    try {
      std::thread([comm, done] {
        static_cast<void>(ncclCommAbort(comm));
        done->store(true);
      }).detach();
    } catch (...) {  // no thread can be started
      static_cast<void>(ncclCommAbort(comm));
      done->store(true);
    }
  }
  /// Waits for the end of the abortion, for at most 5 s. It takes longer if a graph outlives the
  /// communicator; the thread then goes on by itself. Returns at once if nothing was aborted.
  void wait() const noexcept {
    constexpr double patience = 5.0;
    const auto start = std::chrono::steady_clock::now();
    pufferfish::detail::back_off rest;
    while (!done_->load() &&
           std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < patience) {
      rest.pause();
    }
  }

 private:
  std::shared_ptr<std::atomic<bool>> done_ = std::make_shared<std::atomic<bool>>(true);
};

/// A rank that waits for a sum on the device waits in a kernel; if another rank is lost, the kernel never
/// ends. So a thread of the host, asleep most of the time, checks NCCL's own errors and, with a timeout, the
/// time since work on the device last began or ended. On a failure it aborts the communicator. The kernels
/// return (their results are invalid), and every later call throws.
///
/// With a timeout NCCL's calls do not block, so that the thread can get the lock between them. Locks: mutex_
/// guards the communicator, the failure and the list of reports; sleep_ guards the flag that ends the thread.
/// The functions that the driver calls (begun, ended) take no lock.
class nccl_handle {
 public:
  /// Joins `size` ranks that have the same id. All ranks call it, each with its device current. Throws
  /// backend_error, timeout_error. `timeout`: seconds, 0: no limit (NCCL's calls then block). Starts the
  /// thread.
  nccl_handle(const ncclUniqueId& id, int rank, int size, double timeout) : timeout_(timeout) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = timeout > 0.0 ? 0 : 1;
    {
      std::unique_lock<std::mutex> locked(mutex_);
      try {
        settle(ncclCommInitRankConfig(&comm_, size, id, rank, &config), "ncclCommInitRankConfig", locked);
        const auto what = [] {
          return "gpu::nccl: the thread that watches over the device cannot be started";
        };
        thread_.start(what, [this] { watch(); });
      } catch (...) {
        break_off(std::current_exception());
        throw;
      }
    }
  }
  nccl_handle(const nccl_handle&) = delete;
  nccl_handle& operator=(const nccl_handle&) = delete;
  ~nccl_handle() {
    {
      const std::lock_guard<std::mutex> locked(sleep_);
      stopping_ = true;
    }
    wake_.notify_one();
    thread_.join();
    leave();
  }

  double timeout() const { return timeout_; }

  /// Calls call(communicator), which returns NCCL's result. Throws backend_error or timeout_error, or an
  /// earlier failure that has broken the communicator. `what` names the operation in error texts. A failed
  /// call breaks the communicator. Waits until NCCL has accepted the call, not until the device has executed
  /// it.
  template <class Call>
  void run(const char* what, Call&& call) {
    std::unique_lock<std::mutex> locked(mutex_);
    require_sound();
    try {
      settle(call(comm_), what, locked);
    } catch (...) {
      break_off(std::current_exception());
      throw;
    }
  }
  /// Runs a group of NCCL calls: call(add) calls add(f) for each of them, with f(communicator).
  template <class Call>
  void run_group(const char* what, Call&& call) {
    run(what, [&](ncclComm_t comm) {
      ncclResult_t first = ncclGroupStart();
      if (first != ncclSuccess) return first;
      call([&](auto&& one) {
        const ncclResult_t result = one(comm);
        if (first == ncclSuccess && result != ncclInProgress) first = result;
      });
      const ncclResult_t end = ncclGroupEnd();
      return first == ncclSuccess ? end : first;
    });
  }

  /// Throws the failure that has broken the communicator, if any; asks NCCL for errors first. Throws
  /// backend_error or timeout_error.
  void check() {
    run("an earlier operation", [](ncclComm_t comm) {
      ncclResult_t error = ncclSuccess;
      const ncclResult_t asked = ncclCommGetAsyncError(comm, &error);
      return asked == ncclSuccess ? error : asked;
    });
  }

  /// Marks the begin of this communicator's work on a stream, for the timeout, by a host function that is
  /// submitted to the stream. Without a timeout it does nothing.
  void mark_begin(cudaStream_t stream) { mark(stream, &nccl_handle::begun); }
  /// Marks the end of the work that mark_begin has marked on the stream.
  void mark_end(cudaStream_t stream) { mark(stream, &nccl_handle::ended); }

  /// Also posts failures, past and future ones, to `failures`. Failures are posted as lasting ones. The
  /// object keeps `failures` alive.
  void report_to(const std::shared_ptr<late_failure>& failures) {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (failure_) failures->post(failure_, true);
    if (std::find(told_.begin(), told_.end(), failures) == told_.end()) told_.push_back(failures);
  }

 private:
  using clock = std::chrono::steady_clock;

  static std::int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(clock::now().time_since_epoch()).count();
  }

  void require_sound() const {
    if (failure_) std::rethrow_exception(failure_);
  }

  // Waits for a non-blocking call of NCCL. Releases the lock while it pauses.
  void settle(ncclResult_t result, const char* what, std::unique_lock<std::mutex>& locked) {
    const clock::time_point start = clock::now();
    pufferfish::detail::back_off rest;
    while (result == ncclInProgress) {
      locked.unlock();
      rest.pause();
      locked.lock();
      require_sound();
      const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result);
      if (asked != ncclSuccess) result = asked;
      if (result == ncclInProgress && timeout_ > 0.0 &&
          std::chrono::duration<double>(clock::now() - start).count() > timeout_) {
        PUFFERFISH_THROW(timeout_error(not_in_time(what)));
      }
    }
    if (result != ncclSuccess) PUFFERFISH_THROW(backend_error(text_of(result, what)));
  }

  // Needs the lock, because it asks NCCL for its last error.
  std::string text_of(ncclResult_t result, const char* what) const {
    std::string text = std::string("gpu::nccl: ") + what + ": " + ncclGetErrorString(result);
    const char* const more = ncclGetLastError(comm_);
    if (more != nullptr && *more != '\0') text.append(" (").append(more).append(")");
    return text;
  }
  std::string not_in_time(const char* what) const {
    return pufferfish::detail::message(
        {"gpu::nccl: ", what, " did not end within ", timeout_, " s; some rank did not take part"});
  }

  // Needs the lock. Aborts the communicator, so that its kernels on the device return.
  void break_off(const std::exception_ptr& failure) noexcept {
    if (failure_) return;
    failure_ = failure;
    for (const auto& failures : told_) failures->post(failure, true);
    give_up();
  }

  // Starts the abortion of the communicator; nothing uses comm_ afterwards.
  void give_up() noexcept {
    if (comm_ != nullptr) abortion_.begin(comm_);
    comm_ = nullptr;
  }

  // Ends the communicator. Waits for work of other ranks, unless an exception is being thrown on this rank.
  void leave() noexcept {
    if (std::uncaught_exceptions() > exceptions_) give_up();
    std::unique_lock<std::mutex> locked(mutex_);
    try {
      if (comm_ != nullptr) {
        settle(ncclCommFinalize(comm_), "ncclCommFinalize", locked);
        static_cast<void>(ncclCommDestroy(comm_));
      }
    } catch (...) {
      give_up();
    }
    abortion_.wait();
  }

  // The driver calls `call` and must not wait: no lock in these functions.
  void mark(cudaStream_t stream, void (*call)(void*)) {
    if (timeout_ > 0.0) gpu::check(cudaLaunchHostFunc(stream, call, &open_), "cudaLaunchHostFunc");
  }
  static void begun(void* object) {
    auto& open = *static_cast<open_operations*>(object);
    open.since.store(now(), std::memory_order_relaxed);
    open.count.fetch_add(1, std::memory_order_release);
  }
  static void ended(void* object) {
    auto& open = *static_cast<open_operations*>(object);
    open.since.store(now(), std::memory_order_relaxed);
    open.count.fetch_sub(1, std::memory_order_release);
  }

  // The thread's loop: looks at the communicator every timeout / 8 seconds (1 ms to 1 s), or every second
  // without a timeout, until the destructor stops it.
  void watch() {
    const double seconds = timeout_ > 0.0 ? std::clamp(timeout_ / 8.0, 1e-3, 1.0) : 1.0;
    const auto period = std::chrono::duration<double>(seconds);
    std::unique_lock<std::mutex> asleep(sleep_);
    while (!wake_.wait_for(asleep, period, [this] { return stopping_; })) {
      asleep.unlock();
      look();
      asleep.lock();
    }
  }
  // One look at the communicator: breaks it off if NCCL reports an error, or if work on the device has
  // neither begun nor ended for longer than the timeout.
  void look() noexcept {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (failure_) return;
    try {
      ncclResult_t error = ncclSuccess;
      const ncclResult_t asked = ncclCommGetAsyncError(comm_, &error);
      if (asked == ncclSuccess && error != ncclSuccess && error != ncclInProgress) {
        PUFFERFISH_THROW(backend_error(text_of(error, "on its way")));
      }
      const std::int64_t passed = now() - open_.since.load(std::memory_order_relaxed);
      if (open_.count.load(std::memory_order_acquire) > 0 && static_cast<double>(passed) * 1e-9 > timeout_) {
        PUFFERFISH_THROW(timeout_error(not_in_time("work on the device")));
      }
    } catch (...) {
      break_off(std::current_exception());
    }
  }

  double timeout_;
  int exceptions_ = std::uncaught_exceptions();
  std::mutex mutex_;  // guards the communicator
  ncclComm_t comm_ = nullptr;
  std::exception_ptr failure_;
  std::vector<std::shared_ptr<late_failure>> told_;
  nccl_abortion abortion_;
  open_operations& open_ = open_operations::make();
  std::mutex sleep_;
  std::condition_variable wake_;
  bool stopping_ = false;
  pufferfish::detail::helper_thread thread_;
};

}  // namespace gpu::detail
PUFFERFISH_NAMESPACE_END
