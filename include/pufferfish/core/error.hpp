// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The exceptions of the library. All derive from `pufferfish::error`. Their texts name the layer or file and
/// the numbers that do not fit. The library throws them through PUFFERFISH_THROW.
///
/// Whether a function throws one of them is part of its comment. A failed allocation is std::bad_alloc, and a
/// broken precondition that is stated as an assertion ends the program (core/assert.hpp).
///
/// \code
/// try {
///   auto layer = svd_factorize(dense, fixed_rank{64}, {"conv3"});
/// } catch (const rank_error& e) {
///   std::fprintf(stderr, "%s\n", e.what());  // names conv3, its size and the rank
/// }
/// \endcode

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/config.hpp>

PUFFERFISH_STABLE_NAMESPACE_BEGIN
#if !PUFFERFISH_RTTI
// Without RTTI, virtual tables name no types. The linker must not merge them with tables that name types.
inline namespace nortti {
#endif

/// Base of all exceptions of this library.
class error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Extents that do not fit each other or the layer.
class shape_error : public error {
 public:
  using error::error;
};

/// A factorization rank outside 1 .. min(rows, cols).
class rank_error : public error {
 public:
  using error::error;
};

/// A value that is not usable: a non-finite number, an option out of its range.
class value_error : public error {
 public:
  using error::error;
};

/// Training whose loss has not been finite for several steps in a row, or weights that are not finite at the
/// switch to low rank.
class divergence_error : public value_error {
 public:
  using value_error::value_error;
};

/// An object used out of order: a stale generation, a backward pass without its forward pass.
class state_error : public error {
 public:
  using error::error;
};

/// A file that cannot be read or written, or whose contents are invalid.
class io_error : public error {
 public:
  using error::error;
};

/// MPI, CUDA or another library used by this one reported a failure.
class backend_error : public error {
 public:
  using error::error;
};

/// A wait for other ranks has exceeded its time limit.
class timeout_error : public error {
 public:
  using error::error;
  timeout_error(const std::string& text, std::vector<int> missing)
      : error(text), missing_(std::move(missing)) {}

  /// The ranks that did not arrive, in ascending order; empty if they are unknown.
  const std::vector<int>& missing() const noexcept { return missing_; }

 private:
  std::vector<int> missing_;
};

#if !PUFFERFISH_RTTI
}
#endif
PUFFERFISH_STABLE_NAMESPACE_END

#if !PUFFERFISH_EXCEPTIONS
PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Replaces `throw` in builds without exceptions.
[[noreturn]] PUFFERFISH_COLD inline void print_and_abort(const std::exception& failure) {
  std::fprintf(stderr, "pufferfish: %s\n", failure.what());
  std::abort();
}

/// Type-checks the exception object of a handler that never runs.
template <class E>
[[noreturn]] const E& not_caught() {
  std::abort();
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
#endif
