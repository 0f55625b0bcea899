// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the failure of an exchange after which all its steps are refused.

#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/needs_exceptions.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Text of an exception, which is not null; never empty.
inline std::string failure_text(const std::exception_ptr& failure) {
  std::string text;
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& e) {
    text = e.what();
  } catch (...) {
  }
  return text.empty() ? "unknown exception" : text;
}

/// Keeps the text of an exchange's first failure. A step that failed on one rank may have left out
/// collectives that other ranks have called; the next step's collectives would be paired with those of the
/// failed one. All later steps are refused for that reason. Any thread may call the members.
class exchange_failure {
 public:
  /// Keeps the text of `failure`, which is not null, unless the text of an earlier failure is kept.
  void keep(const std::exception_ptr& failure) {
    std::string text = failure_text(failure);
    const std::lock_guard lock(mutex_);
    if (text_.empty()) text_ = std::move(text);
  }

  /// Throws state_error, with the text of the failure, if there was one.
  void require_none() const {
    const std::lock_guard lock(mutex_);
    if (text_.empty()) return;
    throw_error<state_error>({"gradient_exchange: an earlier step failed (", text_,
                              "): the ranks may have different steps; make a new exchange on all ranks"});
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;  // of the first failure; empty: none
};

/// Throws state_error for a call in a step of which only another part is captured into a graph.
[[noreturn]] PUFFERFISH_COLD inline void refuse_half_capture() {
  throw_error<state_error>(
      {"gradient_exchange: begin, the backward pass and finish are captured into a graph together, "
       "or none of them; after a replayed backward pass, begin and finish are direct calls"});
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
