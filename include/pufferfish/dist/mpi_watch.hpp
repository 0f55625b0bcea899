// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: waits of an `mpi::communicator` that end, and find out who has not come.
///
/// MPI waits for ever, and knows nothing of ranks that hang. So a watched wait polls. When its time is over
/// the rank calls the roll: it sends every other rank a message, and every rank that waits, or begins to,
/// answers with messages of its own. Who has not answered within half the time has not arrived. A message a
/// rank is all that this costs, and only then.

#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <pufferfish/dist/communicator.hpp>
#include <pufferfish/dist/waiting.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace mpi::detail {

class watch {
 public:
  /// Duplicates `comm` (collective). `seconds` > 0.
  watch(MPI_Comm comm, double seconds) : seconds_(seconds) {
    MPI_Comm_rank(comm, &rank_);
    MPI_Comm_size(comm, &size_);
    if (MPI_Comm_dup(comm, &comm_) != MPI_SUCCESS) {
      PUFFERFISH_THROW(backend_error("mpi::communicator: set_timeout: MPI_Comm_dup failed"));
    }
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  }
  watch(const watch&) = delete;
  watch& operator=(const watch&) = delete;
  ~watch() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    // After a timeout others may never come: their part of it is left alone.
    if (finalized == 0 && !broken_) MPI_Comm_free(&comm_);
  }

  /// True once a wait was given up: nothing that was started will end.
  bool broken() const { return broken_; }
  /// Who did not arrive then.
  const std::vector<int>& missing() const { return missing_; }
  double seconds() const { return seconds_; }

  /// Calls done() until it is true, less and less often if `backs_off`. Throws timeout_error when the time is
  /// over or another rank says so, and at once if that has happened before.
  template <class Done>
  void until(Done&& done, const char* what, bool backs_off) {
    if (broken_) {
      PUFFERFISH_THROW(
          timeout_error(std::string("mpi::communicator: ") + what + " after a timeout", missing_));
    }
    const clock::time_point start = clock::now();
    pufferfish::detail::back_off rest;
    for (std::uint64_t poll = 1; !done(); ++poll) {
      if (backs_off) rest.pause();
      if (poll % polls_between == 0) {
        if (since(start) > seconds_ || is_called()) call_the_roll(what, since(start));
        std::this_thread::yield();
      }
    }
  }

 private:
  using clock = std::chrono::steady_clock;
  static constexpr std::uint64_t polls_between = 64;
  static constexpr int tag = 1;

  static double since(clock::time_point start) {
    return std::chrono::duration<double>(clock::now() - start).count();
  }

  bool is_called() const {
    int called = 0;
    MPI_Iprobe(MPI_ANY_SOURCE, tag, comm_, &called, MPI_STATUS_IGNORE);
    return called != 0;
  }

  [[noreturn]] void call_the_roll(const char* what, double waited) {
    broken_ = true;
    const char here = 1;
    for (int other = 0; other < size_; ++other) {
      MPI_Request sent = MPI_REQUEST_NULL;  // eager; nobody waits for it
      if (other != rank_ && MPI_Isend(&here, 1, MPI_CHAR, other, tag, comm_, &sent) == MPI_SUCCESS) {
        MPI_Request_free(&sent);
      }
    }
    missing_ = who_does_not_answer();
    std::string text = std::string("mpi::communicator: ") + what + " did not end within " +
                       std::to_string(static_cast<long>(waited)) + " s; ";
    if (missing_.empty()) {
      text += "all ranks have answered: they wait for different things, or the network is slower than that";
    } else {
      text += missing_.size() == 1 ? "rank " : "ranks ";
      for (std::size_t i = 0; i < missing_.size(); ++i)
        text += (i > 0 ? ", " : "") + std::to_string(missing_[i]);
      text += " did not arrive";
    }
    PUFFERFISH_THROW(timeout_error(text, missing_));
  }

  std::vector<int> who_does_not_answer() const {
    std::vector<bool> answered(static_cast<std::size_t>(size_), false);
    answered[static_cast<std::size_t>(rank_)] = true;
    int open = size_ - 1;
    for (const clock::time_point start = clock::now(); open > 0 && since(start) < seconds_ / 2;) {
      int arrived = 0;
      MPI_Status status;
      MPI_Iprobe(MPI_ANY_SOURCE, tag, comm_, &arrived, &status);
      if (arrived == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      char here = 0;
      MPI_Recv(&here, 1, MPI_CHAR, status.MPI_SOURCE, tag, comm_, MPI_STATUS_IGNORE);
      if (!answered[static_cast<std::size_t>(status.MPI_SOURCE)]) --open;
      answered[static_cast<std::size_t>(status.MPI_SOURCE)] = true;
    }
    std::vector<int> missing;
    for (int rank = 0; rank < size_; ++rank) {
      if (!answered[static_cast<std::size_t>(rank)]) missing.push_back(rank);
    }
    return missing;
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  double seconds_;
  bool broken_ = false;
  std::vector<int> missing_;
};

}  // namespace mpi::detail
PUFFERFISH_NAMESPACE_END
