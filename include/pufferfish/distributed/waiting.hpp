// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: clocks of wall and processor time in milliseconds, and pauses between polls for messages.

#include <chrono>
#include <cstdint>
#include <ctime>
#include <thread>

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Wall-clock time since `start` in milliseconds.
inline double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

/// Processor time of the calling thread in milliseconds; 0 where the system has no such clock.
inline double thread_processor_ms() {
#if defined(CLOCK_THREAD_CPUTIME_ID)
  std::timespec time{};
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) != 0) return 0.0;
  return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
#else
  return 0.0;
#endif
}

/// Pause between two polls. The first polls have none, since a message is often there within microseconds;
/// then the thread yields the core to others; then it sleeps, for longer and longer times up to `longest`.
///
///     for (back_off rest; !request.done();) rest.pause();
class back_off {
 public:
  static constexpr std::uint32_t busy_polls = 200;  ///< some tens of microseconds of MPI_Test
  /// Number of polls after which the thread yields.
  static constexpr std::uint32_t yields = 100;
  static constexpr std::chrono::microseconds longest{50};  ///< longest sleep

  /// Pauses after a poll that has found nothing.
  void pause() {
    ++polls_;
    if (polls_ <= busy_polls) return;
    if (polls_ <= busy_polls + yields) return std::this_thread::yield();
    std::this_thread::sleep_for(sleep_);
    if (sleep_ < longest) sleep_ += sleep_ / 2 + std::chrono::microseconds(1);
  }

 private:
  std::uint32_t polls_ = 0;
  std::chrono::microseconds sleep_{2};
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
