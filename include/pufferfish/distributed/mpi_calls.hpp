// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `mpi::call_lock`: the lock around MPI calls of a process whose threads may call MPI one at a time; and how
/// the library makes its own calls.

#if defined(__has_include)
#if !__has_include(<mpi.h>)
#error \
    "pufferfish: <pufferfish/distributed/mpi.hpp> needs MPI's headers: compile with mpicxx or add MPI's include folder"
#endif
#endif
#include <mpi.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>
#include <utility>

#include <pufferfish/core/config.hpp>
#include <pufferfish/core/error.hpp>

PUFFERFISH_STABLE_NAMESPACE_BEGIN

/// Internal: one object per process, regardless of the flags that its translation units were compiled with.
namespace mpi_process {

inline std::mutex call_mutex;
/// The level that MPI was initialised for; -1: not queried yet.
inline std::atomic<int> thread_level{-1};

}  // namespace mpi_process

PUFFERFISH_STABLE_NAMESPACE_END

PUFFERFISH_NAMESPACE_BEGIN

namespace mpi {

namespace detail {

// MPI allows is_initialized and is_finalized to be called at any time, from any thread.
inline bool is_initialized() {
  int flag = 0;
  MPI_Initialized(&flag);
  return flag != 0;
}
/// Whether MPI_Finalize was called, after which no other function of MPI may be.
inline bool is_finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

/// Thread level of MPI, MPI_THREAD_SINGLE ... MPI_THREAD_MULTIPLE (MPI_Query_thread); SINGLE before MPI is
/// initialised.
inline int thread_level() {
  const int known = mpi_process::thread_level.load(std::memory_order_relaxed);
  if (known >= 0) return known;
  if (!is_initialized()) return MPI_THREAD_SINGLE;
  // Until the level is known it may be SERIALIZED, which requires the lock.
  const std::lock_guard hold(mpi_process::call_mutex);
  int level = MPI_THREAD_SINGLE;
  if (MPI_Query_thread(&level) != MPI_SUCCESS) return MPI_THREAD_SINGLE;
  mpi_process::thread_level.store(level, std::memory_order_relaxed);
  return level;
}

/// Whether threads call MPI in turns.
inline bool takes_turns() { return thread_level() == MPI_THREAD_SERIALIZED; }

/// MPI's own text for an error code.
inline std::string error_text(int code) {
  std::string text(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS)
    return "error code " + std::to_string(code);
  text.resize(static_cast<std::size_t>(length));
  return text;
}

}  // namespace detail

/// Waits for the right to call MPI and returns a lock that holds it. At MPI_THREAD_SERIALIZED threads may
/// call MPI one at a time. A process has one such lock, and every MPI call of the library holds it. A program
/// whose own threads call MPI while an exchange exists must hold the lock during each call: \code
///   {
///     const auto turn = pufferfish::mpi::call_lock();
///     MPI_Isend(...);
///   }
/// \endcode
/// Hold it for one call that returns by itself (MPI_Isend, MPI_Test, ...). Under the lock a call that waits
/// for other ranks (MPI_Recv, MPI_Allreduce, ...) keeps an exchange of this process from answering them, and
/// all of them from going on: start such a transfer (MPI_Irecv, MPI_Iallreduce, ...), then test it in a loop
/// that holds the lock for each MPI_Test. A thread that holds it must not call this library's communicators.
///
/// At other levels the returned lock holds nothing: below SERIALIZED only one thread calls MPI, and at
/// MPI_THREAD_MULTIPLE MPI itself puts calls in order.
[[nodiscard]] inline std::unique_lock<std::mutex> call_lock() {
  if (!detail::takes_turns()) return {};
  return std::unique_lock<std::mutex>(mpi_process::call_mutex);
}

/// Returns f(), called under call_lock().
/// `f` is one MPI call, or several that return by themselves.
template <class F>
decltype(auto) serialized(F&& f) {
  const auto turn = call_lock();
  return std::forward<F>(f)();
}

namespace detail {

/// Throws backend_error that names the MPI function `call`, with MPI's text.
[[noreturn]] PUFFERFISH_COLD inline void throw_failure(const char* call, const std::string& text) {
  PUFFERFISH_THROW(backend_error(std::string("mpi::communicator: ") + call + " failed: " + text));
}

/// Throws backend_error, naming the MPI function `call`, unless `code` is MPI_SUCCESS.
inline void check(int code, const char* call) {
  if (code != MPI_SUCCESS) throw_failure(call, error_text(code));
}

/// Makes an MPI call, `f`, in this thread's turn. Throws backend_error, with the name of the call, unless it
/// returns MPI_SUCCESS.
template <class F>
void call(const char* name, F&& f) {
  std::string text;
  {
    const auto turn = call_lock();
    const int code = f();
    if (code == MPI_SUCCESS) return;
    text = error_text(code);
  }
  throw_failure(name, text);
}

/// Throws state_error, naming `who`, unless MPI is initialised and not finalized.
inline void check_running(const char* who) {
  if (!is_initialized()) {
    PUFFERFISH_THROW(state_error(std::string(who) + ": MPI is not initialised: call MPI_Init_thread first"));
  }
  if (is_finalized()) PUFFERFISH_THROW(state_error(std::string(who) + ": MPI is already finalized"));
}

}  // namespace detail

}  // namespace mpi

PUFFERFISH_NAMESPACE_END
