// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gpu::late_failure`: stores an exception of code that has no caller to catch it.

#include <exception>
#include <mutex>
#include <utility>

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// Stores an exception of a host function in a stream, or of a helper thread, neither of which has a caller
/// to catch it. The host's next call that checks (context::begin_step, context::synchronize, step_graph::run)
/// throws the stored exception. Any thread may call the functions.
class late_failure {
 public:
  /// Stores a failure unless one is stored already. A failure that `lasts` (the object that failed can no
  /// longer be used) replaces one that does not, and is thrown by every later call of rethrow().
  void post(std::exception_ptr failure, bool lasts = false) {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (lasts_) return;
    if (lasts || !failure_) failure_ = std::move(failure);
    lasts_ = lasts;
  }

  /// Throws the stored exception, if there is one, and forgets it unless it lasts.
  void rethrow() {
    std::exception_ptr found;
    {
      const std::lock_guard<std::mutex> locked(mutex_);
      found = lasts_ ? failure_ : std::exchange(failure_, nullptr);
    }
    if (found) std::rethrow_exception(found);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr failure_;
  bool lasts_ = false;
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
