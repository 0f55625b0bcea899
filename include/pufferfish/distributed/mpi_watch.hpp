// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: waits of an `mpi::communicator` that end after a limit and find out which ranks did not arrive.
///
/// MPI waits without a limit and does not notice ranks that hang. So a watched wait polls. When its time is
/// over, the rank calls the roll: it sends every other rank a message, and every rank that waits, or begins
/// to wait, does the same. A rank whose message has not come within half the time, at most a minute, has not
/// arrived. The cost is one message per pair of ranks, only after a timeout.
///
/// Transfers that were started stay with MPI: they can neither be completed nor, if collective, be cancelled,
/// and a late rank's message may be written at any time until the process ends. So their memory is never
/// freed after a timeout.

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <pufferfish/distributed/communicator.hpp>
#include <pufferfish/distributed/mpi_calls.hpp>
#include <pufferfish/distributed/waiting.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace mpi {

/// Seconds that calls of a communicator wait for other ranks unless set_timeout says otherwise.
inline constexpr double default_timeout = 600.0;

namespace detail {

/// Duplicates `comm`; MPI returns errors on the result instead of ending the program. Collective over `comm`;
/// polls, so that other threads can call MPI meanwhile. Throws backend_error, and timeout_error after
/// default_timeout.
inline MPI_Comm duplicate(MPI_Comm comm) {
  struct pending {
    MPI_Comm made = MPI_COMM_NULL;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  const auto state = std::make_shared<pending>();
  call("MPI_Comm_idup", [&] { return MPI_Comm_idup(comm, &state->made, &state->request); });
  const auto start = std::chrono::steady_clock::now();
  pufferfish::detail::back_off rest;
  for (int done = 0; done == 0;) {
    call("MPI_Test", [&] { return MPI_Test(&state->request, &done, MPI_STATUS_IGNORE); });
    if (done != 0) break;
    rest.pause();
    if (std::chrono::steady_clock::now() - start > std::chrono::duration<double>(default_timeout)) {
      pufferfish::detail::keep_for_good(state);
      PUFFERFISH_THROW(
          timeout_error("mpi::communicator: duplicating the given communicator, which all of its "
                        "ranks must do, did not end within " +
                        std::to_string(static_cast<long>(default_timeout)) + " s"));
    }
  }
  call("MPI_Comm_set_errhandler", [&] { return MPI_Comm_set_errhandler(state->made, MPI_ERRORS_RETURN); });
  return state->made;
}

/// A duplicate of an MPI communicator, freed with the object unless MPI has been finalized.
class owned_handle {
 public:
  /// Duplicates `comm`. Collective; throws the errors of duplicate.
  explicit owned_handle(MPI_Comm comm) : comm_(duplicate(comm)) {}
  owned_handle(const owned_handle&) = delete;
  owned_handle& operator=(const owned_handle&) = delete;
  ~owned_handle() {
    if (is_finalized()) return;
    const auto turn = call_lock();
    MPI_Comm_free(&comm_);
  }
  /// Handle of the duplicate. The object still owns the handle, which the caller must not free.
  MPI_Comm get() const { return comm_; }

 private:
  MPI_Comm comm_;
};

/// Owns the duplicates of an MPI communicator on which mpi::communicator calls MPI. Every request shares the
/// object: if a communicator is freed before a started collective has ended, Open MPI 4.1 accesses freed
/// memory. After a timeout the object, its duplicates and its message buffer (`room`) are never freed.
class watch : public std::enable_shared_from_this<watch> {
 public:
  /// Duplicates `comm` twice (collective).
  explicit watch(MPI_Comm comm) : takes_turns_(takes_turns()), group_(comm), roll_(group_.get()) {
    call("MPI_Comm_rank", [&] { return MPI_Comm_rank(group(), &rank_); });
    call("MPI_Comm_size", [&] { return MPI_Comm_size(group(), &size_); });
  }
  watch(const watch&) = delete;
  watch& operator=(const watch&) = delete;

  /// The duplicate of the MPI communicator for messages and collectives.
  MPI_Comm group() const { return group_.get(); }
  /// This rank, and the number of ranks.
  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Seconds that a wait may take; 0: for ever.
  double seconds() const { return seconds_; }
  /// Sets the limit of later waits, in seconds; 0: none.
  void set_seconds(double seconds) { seconds_ = seconds; }

  /// Whether waits test their requests repeatedly (MPI_Test) instead of calling MPI's blocking functions. A
  /// wait polls if it has a time limit, or if several threads take turns in calling MPI, because a blocking
  /// call would then keep the other threads from their turn.
  bool polls() const { return seconds_ > 0.0 || takes_turns_; }

  /// True after a timeout: transfers under way never end.
  bool broken() const { return broken_; }
  /// The ranks that had not arrived at the timeout.
  const std::vector<int>& missing() const { return missing_; }

  /// Memory for the elements of a blocking collective. After a timeout MPI keeps using this memory instead of
  /// the caller's, which may be on a stack that unwinds.
  std::byte* room(std::size_t bytes) {
    if (bytes > room_size_) {
      room_.reset();
      room_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
      room_size_ = bytes;
    }
    return room_.get();
  }

  /// Calls done() until it returns true, less and less often. Throws timeout_error if the time
  /// is over or another rank calls the roll, and at once after an earlier timeout.
  template <class Done>
  void until(Done&& done, const char* what) {
    if (broken_) {
      PUFFERFISH_THROW(
          timeout_error(std::string("mpi::communicator: ") + what + " after a timeout", missing_));
    }
    const clock::time_point start = clock::now();
    pufferfish::detail::back_off rest;
    for (std::uint64_t poll = 1; !done(); ++poll) {
      rest.pause();
      if (poll % polls_between == 0 && seconds_ > 0.0) {
        if (since(start) > seconds_ || is_called()) call_the_roll(what, since(start));
        std::this_thread::yield();
      }
    }
  }

 private:
  using clock = std::chrono::steady_clock;
  // Number of polls between two looks at the clock; limit of the roll in seconds; tag and content of its
  // messages.
  static constexpr std::uint64_t polls_between = 64;
  static constexpr double longest_roll = 60.0;
  static constexpr int tag = 1;
  static constexpr char here = 1;

  static double since(clock::time_point start) {
    return std::chrono::duration<double>(clock::now() - start).count();
  }

  // Text of a time in seconds, with one decimal place.
  static std::string seconds_text(double seconds) {
    const long tenths = std::lround(10.0 * seconds);
    return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10);
  }

  // Whether another rank has called the roll: a message is waiting on `roll_`. Errors of MPI count as no.
  bool is_called() const {
    int called = 0;
    const auto turn = call_lock();
    MPI_Iprobe(MPI_ANY_SOURCE, tag, roll_.get(), &called, MPI_STATUS_IGNORE);
    return called != 0;
  }

  // Sends this rank's message to all others, collects theirs, and throws timeout_error with the missing
  // ranks. `waited` is in seconds.
  [[noreturn]] void call_the_roll(const char* what, double waited) {
    broken_ = true;
    pufferfish::detail::keep_for_good(this->shared_from_this());
    for (int other = 0; other < size_; ++other) {
      const auto turn = call_lock();
      MPI_Request sent = MPI_REQUEST_NULL;  // eager; nothing waits for it
      if (other != rank_ && MPI_Isend(&here, 1, MPI_CHAR, other, tag, roll_.get(), &sent) == MPI_SUCCESS) {
        MPI_Request_free(&sent);
      }
    }
    missing_ = find_missing();
    std::string text =
        std::string("mpi::communicator: ") + what + " did not end within " + seconds_text(waited) + " s; ";
    if (missing_.empty()) {
      text += "all ranks have answered: they wait for different things, or the network is slower than that";
    } else {
      text += missing_.size() == 1 ? "rank " : "ranks ";
      for (std::size_t i = 0; i < missing_.size(); ++i)
        text += (i > 0 ? ", " : "") + std::to_string(missing_[i]);
      text += " did not arrive";
    }
    PUFFERFISH_THROW(timeout_error(
        text + " (a rank may have failed alone, or need more time: set_timeout changes the limit)",
        missing_));
  }

  // Receives an answer and returns its rank; -1 if there is none.
  int next_answer() const {
    int arrived = 0;
    MPI_Status status;
    const auto turn = call_lock();
    MPI_Iprobe(MPI_ANY_SOURCE, tag, roll_.get(), &arrived, &status);
    if (arrived == 0) return -1;
    char answer = 0;
    MPI_Recv(&answer, 1, MPI_CHAR, status.MPI_SOURCE, tag, roll_.get(), MPI_STATUS_IGNORE);  // it is there
    return status.MPI_SOURCE;
  }

  // Ranks without an answer after half the time limit, at most `longest_roll` seconds; ascending.
  std::vector<int> find_missing() const {
    std::vector<bool> answered(static_cast<std::size_t>(size_), false);
    answered[static_cast<std::size_t>(rank_)] = true;
    int open = size_ - 1;
    const double limit = std::min(seconds_ / 2, longest_roll);
    for (const clock::time_point start = clock::now(); open > 0 && since(start) < limit;) {
      const int rank = next_answer();
      if (rank < 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      if (!answered[static_cast<std::size_t>(rank)]) --open;
      answered[static_cast<std::size_t>(rank)] = true;
    }
    std::vector<int> missing;
    for (int rank = 0; rank < size_; ++rank) {
      if (!answered[static_cast<std::size_t>(rank)]) missing.push_back(rank);
    }
    return missing;
  }

  bool takes_turns_;    // whether threads call MPI one at a time
  owned_handle group_;  // for messages and collectives
  owned_handle roll_;   // for rolls only, so that their messages match no others
  int rank_ = 0, size_ = 1;
  double seconds_ = default_timeout;
  bool broken_ = false;
  std::vector<int> missing_;
  std::unique_ptr<std::byte[]> room_;
  std::size_t room_size_ = 0;
};

}  // namespace detail
}  // namespace mpi
PUFFERFISH_NAMESPACE_END
