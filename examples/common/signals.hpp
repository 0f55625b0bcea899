// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Records Ctrl-C and SIGTERM during training, so that the step can end and the run can be saved.

#include <signal.h>

#include <array>
#include <atomic>
#include <cstddef>

namespace examples {

/// While an object exists, the first SIGINT or SIGTERM is only recorded; the second one ends the program at
/// once. Signals that the program was started to ignore (by nohup, for example) stay ignored. An object that
/// is made while another one exists shares its record, so a program with several runs loses no signal between
/// two of them.
class signal_watch {
 public:
  signal_watch() {
    if (objects++ == 0) caught_number = 0;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      ::sigaction(numbers[i], nullptr, &before_[i]);
      if (before_[i].sa_handler == SIG_IGN) continue;
      struct sigaction action {};
      action.sa_handler = remember;
      action.sa_flags = SA_RESTART;
      ::sigaction(numbers[i], &action, nullptr);
    }
  }
  signal_watch(const signal_watch&) = delete;
  signal_watch& operator=(const signal_watch&) = delete;
  ~signal_watch() {
    for (std::size_t i = 0; i < numbers.size(); ++i) ::sigaction(numbers[i], &before_[i], nullptr);
    --objects;
  }

  /// The number of the recorded signal; 0: none.
  int caught() const { return caught_number; }

 private:
  static constexpr std::array<int, 2> numbers{SIGINT, SIGTERM};
  static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may not wait for a lock");
  inline static std::atomic<int> caught_number{0};
  inline static int objects = 0;

  static void remember(int number) {
    if (caught_number.exchange(number) == 0) return;
    // The default action, once this handler has returned.
    ::signal(number, SIG_DFL);
    ::raise(number);
  }

  std::array<struct sigaction, 2> before_{};
};

}  // namespace examples
