// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gpu::late_failure`: what went wrong where nobody could catch it.

#include <exception>
#include <mutex>
#include <utility>

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// A host function in a stream, or a thread beside it, has no caller to throw to: it leaves its failure here,
/// and the next call of the host that looks (context::begin_step, context::synchronize, step_graph::run)
/// throws it. Any thread may use it.
class late_failure {
 public:
  /// The first failure counts until it is thrown. One that `lasts` (what it belongs to is gone) is thrown
  /// again by every later look.
  void post(std::exception_ptr failure, bool lasts = false) {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (lasts_) return;
    if (lasts || !failure_) failure_ = std::move(failure);
    lasts_ = lasts;
  }

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
