// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal checks at two levels. A failed check is a bug in the caller or in the library: it prints
/// a message and aborts, so that it cannot be swallowed. Bad input that a program may want to survive
/// is reported by exceptions.

#include <pufferfish/core/config.hpp>

#if PUFFERFISH_ASSERT_LEVEL > 0
#include <cstdio>
#include <cstdlib>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {
[[noreturn]] inline void assertion_failed(const char* condition, const char* text, const char* file,
                                          int line) {
  std::fprintf(stderr, "%s:%d: pufferfish assertion failed: %s (%s)\n", file, line, text, condition);
  std::abort();
}
}  // namespace detail
PUFFERFISH_NAMESPACE_END

#define PUFFERFISH_DETAIL_CHECK(condition, text) \
  ((condition) ? void(0) : ::pufferfish::detail::assertion_failed(#condition, text, __FILE__, __LINE__))
#else
#define PUFFERFISH_DETAIL_CHECK(condition, text) void(0)
#endif

/// Checks a condition at assert levels 1 and 2, and ends the program with a message that has `text` (a string
/// literal) if it is false. For checks that a function makes once per operation, not once per element. At
/// level 0 the condition is not evaluated, so it must have no side effects.
#define PUFFERFISH_ASSERT(condition, text) PUFFERFISH_DETAIL_CHECK(condition, text)

/// Checks a condition like PUFFERFISH_ASSERT, but at assert level 2 only. For checks of every element.
#if PUFFERFISH_ASSERT_LEVEL > 1
#define PUFFERFISH_ASSERT_FULL(condition, text) PUFFERFISH_DETAIL_CHECK(condition, text)
#else
#define PUFFERFISH_ASSERT_FULL(condition, text) void(0)
#endif
