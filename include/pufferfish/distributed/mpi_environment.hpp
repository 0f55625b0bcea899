// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `mpi::environment`: initialises MPI at its construction and finalizes it at its end, for programs in which
/// nothing else does so.

#include <pufferfish/distributed/mpi.hpp>

#include <cstdio>
#include <cstdlib>
#include <exception>

PUFFERFISH_NAMESPACE_BEGIN

namespace mpi {

/// MPI's levels of thread support, weakest first (MPI_THREAD_SINGLE ... MPI_THREAD_MULTIPLE).
enum class thread_level {
  single = MPI_THREAD_SINGLE,          ///< the process has one thread
  funneled = MPI_THREAD_FUNNELED,      ///< only the main thread calls MPI
  serialized = MPI_THREAD_SERIALIZED,  ///< any thread, one at a time
  multiple = MPI_THREAD_MULTIPLE       ///< any thread at any time
};

/// Initialises MPI, and finalizes it at the end of its scope. If an exception leaves the scope, MPI_Abort(1)
/// ends the whole job instead: the other ranks would wait for this one for ever, and so would MPI_Finalize.
///
/// The abort comes before any handler outside the scope, so catch inside to print what happened:
/// \code
///   int main() {
///     pufferfish::mpi::environment environment;
///     try {
///       ...
///     } catch (const std::exception& error) {
///       std::fprintf(stderr, "%s\n", error.what());
///       environment.abort(1);
///     }
///   }
/// \endcode
/// Construction and destruction are collective over all processes of the job, on the main thread. Requests
/// must be done before the end of the scope; a communicator may outlive it, but must not be used then.
class environment {
 public:
  /// Initialises MPI with a thread level. Throws state_error if MPI is or was running (it then has another
  /// owner), backend_error if it cannot start. A level below the requested one is not an error: check
  /// provided().
  explicit environment(thread_level requested = thread_level::funneled)
      : exceptions_at_start_(std::uncaught_exceptions()) {
    if (detail::is_finalized()) {
      PUFFERFISH_THROW(state_error("mpi::environment: MPI is already finalized and cannot start again"));
    }
    if (detail::is_initialized()) {
      PUFFERFISH_THROW(state_error("mpi::environment: MPI is already initialised, so it has an owner"));
    }
    int provided = 0;
    detail::check(MPI_Init_thread(nullptr, nullptr, static_cast<int>(requested), &provided),
                  "MPI_Init_thread");
    provided_ = static_cast<thread_level>(provided);
  }
  environment(const environment&) = delete;
  environment& operator=(const environment&) = delete;

  ~environment() {
    if (detail::is_finalized()) return;
    if (std::uncaught_exceptions() > exceptions_at_start_) abort(1);
    MPI_Finalize();
  }

  /// The level that MPI provides; compare with < and >=.
  thread_level provided() const { return provided_; }

  /// Ends all processes of the job; the launcher returns `code` (or another non-zero value).
  [[noreturn]] void abort(int code) const {
    std::fflush(nullptr);  // MPI_Abort kills: what the program has printed would be lost
    MPI_Abort(MPI_COMM_WORLD, code);
    std::abort();
  }

 private:
  int exceptions_at_start_ = 0;
  thread_level provided_ = thread_level::single;
};

}  // namespace mpi

PUFFERFISH_NAMESPACE_END
