// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `mpi::communicator`: a group of MPI processes. Tried with Open MPI 4.1 and MPICH 4.0; uses MPI 3.0.
///
/// MPI belongs to the program: nothing here starts or ends it (mpi_environment.hpp helps a program that has
/// nobody else to do so). Which thread may call is what MPI was initialised for: the main thread
/// (MPI_THREAD_FUNNELED), one thread at a time (SERIALIZED), any (MULTIPLE; still one at a time a
/// communicator).

#if defined(__has_include)
#if !__has_include(<mpi.h>)
#error \
    "pufferfish: <pufferfish/dist/mpi.hpp> needs MPI's headers: compile with mpicxx or add MPI's include folder"
#endif
#endif
#include <mpi.h>
#if defined(OPEN_MPI) && defined(__has_include)
#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif
#endif

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/core/number_text.hpp>
#include <pufferfish/dist/mpi_watch.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace mpi {

namespace detail {

/// MPI's own text for an error code.
inline std::string error_text(int code) {
  std::string text(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS)
    return "error code " + std::to_string(code);
  text.resize(static_cast<std::size_t>(length));
  return text;
}

/// Throws backend_error unless `code` says success.
inline void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  PUFFERFISH_THROW(backend_error(std::string("mpi::communicator: ") + call + " failed: " + error_text(code)));
}

inline bool is_initialized() {
  int flag = 0;
  MPI_Initialized(&flag);
  return flag != 0;
}

inline bool is_finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

/// Throws state_error unless MPI runs. MPI allows these two questions at any time.
inline void check_running(const char* who) {
  if (!is_initialized()) {
    PUFFERFISH_THROW(state_error(std::string(who) + ": MPI is not initialised: call MPI_Init_thread first"));
  }
  if (is_finalized()) PUFFERFISH_THROW(state_error(std::string(who) + ": MPI is already finalized"));
}

template <class T>
MPI_Datatype datatype() {
  if constexpr (std::is_same_v<T, float>) {
    return MPI_FLOAT;
  } else if constexpr (std::is_same_v<T, double>) {
    return MPI_DOUBLE;
  } else if constexpr (std::is_signed_v<T>) {
    return sizeof(T) == 8 ? MPI_INT64_T : MPI_INT32_T;
  } else {
    return sizeof(T) == 8 ? MPI_UINT64_T : MPI_UINT32_T;
  }
}

/// Whether MPI itself says that its calls take the memory of a CUDA device. MPI runs.
inline bool takes_device_memory() {
#if defined(MPIX_CUDA_AWARE_SUPPORT)
  return MPIX_Query_cuda_support() == 1;
#elif defined(MPIX_GPU_SUPPORT_CUDA)
  int supported = 0;
  return MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA, &supported) == MPI_SUCCESS && supported != 0;
#else
  return false;  // it has no word for it
#endif
}

/// Calls f(first, length) for pieces of at most `chunk` elements: MPI counts in int.
template <class T, class F>
void for_chunks(std::span<T> values, std::size_t chunk, const F& f) {
  for (std::size_t at = 0; at < values.size(); at += chunk) {
    f(values.data() + at, static_cast<int>(std::min(chunk, values.size() - at)));
  }
}

}  // namespace detail

/// A started sum. Move-only; see `collective_request`. May outlive its communicator, but not MPI. The
/// destructor of an unfinished request waits, since MPI can neither cancel a collective nor give its memory
/// back earlier; it swallows MPI's error, which only done() and wait() report (backend_error; the elements
/// are then undefined).
class request {
 public:
  request() = default;
  request(request&& other) noexcept
      : first_(std::exchange(other.first_, MPI_REQUEST_NULL)),
        rest_(std::move(other.rest_)),
        backs_off_(other.backs_off_),
        watch_(std::move(other.watch_)) {
    other.rest_.clear();
  }
  request& operator=(request&& other) noexcept {
    if (this == &other) return *this;
    finish();
    first_ = std::exchange(other.first_, MPI_REQUEST_NULL);
    rest_ = std::exchange(other.rest_, {});
    backs_off_ = other.backs_off_;
    watch_ = std::move(other.watch_);
    return *this;
  }
  ~request() { finish(); }

  bool done() {
    int first_done = 1;
    int rest_done = 1;
    detail::check(MPI_Test(&first_, &first_done, MPI_STATUS_IGNORE), "MPI_Test");
    if (!rest_.empty()) {
      detail::check(MPI_Testall(rest_count(), rest_.data(), &rest_done, MPI_STATUSES_IGNORE), "MPI_Testall");
    }
    return first_done != 0 && rest_done != 0;
  }

  /// With a timeout (communicator::set_timeout) it throws timeout_error when that is over.
  void wait() {
    if (watch_) return watch_->until([this] { return done(); }, "a started transfer", backs_off_);
    if (backs_off_) {
      pufferfish::detail::back_off rest;
      while (!done()) rest.pause();
      return;
    }
    detail::check(MPI_Wait(&first_, MPI_STATUS_IGNORE), "MPI_Wait");
    if (rest_.empty()) return;
    detail::check(MPI_Waitall(rest_count(), rest_.data(), MPI_STATUSES_IGNORE), "MPI_Waitall");
    rest_.clear();
  }

 private:
  friend class communicator;

  int rest_count() const { return static_cast<int>(rest_.size()); }

  /// Where the next chunk's handle goes; the first needs no allocation.
  MPI_Request* next() {
    if (first_ == MPI_REQUEST_NULL && rest_.empty()) return &first_;
    rest_.push_back(MPI_REQUEST_NULL);
    return &rest_.back();
  }

  void finish() noexcept {
    if (first_ == MPI_REQUEST_NULL && rest_.empty()) return;
    if (detail::is_finalized()) return;
    if (watch_) {
      try {
        wait();
      } catch (...) {
        // What will not end is left to MPI; the memory that it may still write must stay, and does until the
        // program is aborted.
        first_ = MPI_REQUEST_NULL;
      }
      rest_.clear();
      return;
    }
    MPI_Wait(&first_, MPI_STATUS_IGNORE);
    if (!rest_.empty()) MPI_Waitall(rest_count(), rest_.data(), MPI_STATUSES_IGNORE);
    rest_.clear();
  }

  MPI_Request first_ = MPI_REQUEST_NULL;
  std::vector<MPI_Request> rest_;
  bool backs_off_ = false;
  std::shared_ptr<detail::watch> watch_;  // nullptr: waits for ever
};

/// A communicator (see the concept `pufferfish::communicator`) on a duplicate of the user's MPI communicator,
/// so that no message of ours meets one of theirs. Move-only.
///
/// Sums have the same bits on all ranks: the MPI standard asks for identical results of MPI_ALLREDUCE
/// everywhere, and the algorithms keep it, as a ring (or reduce + broadcast) computes each element on one
/// rank and copies it, and recursive doubling adds the same two partial sums on both partners, in either
/// order (IEEE addition commutes; only a NaN's payload may differ). They need not be the same bits for other
/// lengths, chunk sizes or rank counts, or started instead of blocking, because MPI then may add in another
/// order.
class communicator {
 public:
  /// Elements an MPI call transfers at most. One GiB of doubles: MPI's int counts would allow 16 times that,
  /// but implementations have computed byte counts in int as well.
  static constexpr std::size_t default_chunk = std::size_t{1} << 27;

  /// Duplicates `comm` (collective over it) and makes errors on the duplicate returnable. `chunk`: elements
  /// an MPI call transfers at most, 1 .. INT_MAX, the same on all ranks; for tests. Throws state_error if MPI
  /// does not run, value_error for MPI_COMM_NULL, an intercommunicator or a bad chunk, backend_error if MPI
  /// fails (with `comm`'s default handler MPI ends the program instead).
  explicit communicator(MPI_Comm comm, std::size_t chunk = default_chunk) : chunk_(chunk) {
    detail::check_running("mpi::communicator");
    if (comm == MPI_COMM_NULL) PUFFERFISH_THROW(value_error("mpi::communicator: MPI_COMM_NULL given"));
    if (chunk < 1 || chunk > std::size_t{INT_MAX}) {
      PUFFERFISH_THROW(value_error(std::string("mpi::communicator: chunk of ") + std::to_string(chunk) +
                                   " elements is outside 1 .. " + std::to_string(INT_MAX)));
    }
    int inter = 0;
    detail::check(MPI_Comm_test_inter(comm, &inter), "MPI_Comm_test_inter");
    if (inter != 0)
      PUFFERFISH_THROW(value_error("mpi::communicator: an intercommunicator has two groups; merge it"));
    detail::check(MPI_Comm_dup(comm, &comm_), "MPI_Comm_dup");
    configure();
  }

  communicator(communicator&& other) noexcept
      : comm_(std::exchange(other.comm_, MPI_COMM_NULL)),
        chunk_(other.chunk_),
        rank_(other.rank_),
        size_(other.size_),
        backs_off_(other.backs_off_),
        watch_(std::move(other.watch_)) {}
  communicator& operator=(communicator&& other) noexcept {
    std::swap(comm_, other.comm_);
    std::swap(chunk_, other.chunk_);
    std::swap(rank_, other.rank_);
    std::swap(size_, other.size_);
    std::swap(backs_off_, other.backs_off_);
    std::swap(watch_, other.watch_);
    return *this;
  }

  /// Frees the duplicate (collective in MPI's words, local in practice), unless MPI has been finalized.
  ~communicator() { release(); }

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// True if a thread other than the main one may call, as long as it is one at a time (MPI_THREAD_SERIALIZED
  /// or more).
  bool usable_from_threads() const {
    int provided = MPI_THREAD_SINGLE;
    detail::check(MPI_Query_thread(&provided), "MPI_Query_thread");
    return provided >= MPI_THREAD_SERIALIZED;
  }

  /// Whether MPI says, on this rank, that its blocking calls take the memory of a CUDA device
  /// (exchange_memory::device). False where it cannot say.
  bool takes_device_memory() const { return detail::takes_device_memory(); }

  /// From now on no call, and no request that is started, waits longer than `seconds` for other ranks (0: for
  /// ever, as at first). When that time is over on one rank, all that wait throw timeout_error, which names
  /// the ranks that have not answered within half of it again; what was under way will not end, so a program
  /// can then save what it has by itself (parameters are the same on all ranks) and abort(). A rank that
  /// computes for so long counts as one that hangs: choose several times the longest step. Sums may then be
  /// added in another order than MPI's blocking ones. Collective, while nothing is under way; the same number
  /// on all ranks. Throws value_error for a negative number, timeout_error after a timeout.
  void set_timeout(double seconds) {
    if (!(seconds >= 0.0)) {
      PUFFERFISH_THROW(value_error(
          "mpi::communicator: set_timeout: " + pufferfish::detail::shortest_number(seconds) + " s"));
    }
    if (watch_ && watch_->broken()) {
      PUFFERFISH_THROW(timeout_error("mpi::communicator: set_timeout after a timeout"));
    }
    if (seconds > 0.0) {
      watch_ = std::make_shared<detail::watch>(comm_, seconds);
    } else {
      watch_.reset();
    }
  }

  /// Whether requests wait by looking again and again, less and less often, and leave the core to others in
  /// between (true, as at first), or in MPI's own way, which keeps a core busy. Blocking collectives always
  /// wait in MPI's way: those that could back off take up to twice as long in Open MPI. Local.
  void set_back_off(bool backs_off) { backs_off_ = backs_off; }

  /// Seconds that a call may wait; 0: for ever.
  double timeout() const { return watch_ ? watch_->seconds() : 0.0; }

  /// Ends all ranks' programs, with this exit status where the launcher passes it on. Local.
  [[noreturn]] void abort(int status) {
    MPI_Abort(comm_, status);
    std::abort();
  }

  /// The duplicate, for collectives that this class does not offer. Stays owned by this object.
  MPI_Comm handle() const { return comm_; }

  template <class T>
  void all_reduce_sum(std::span<T> values) {
    all_reduce(values, MPI_SUM);
  }
  template <class T>
  void all_reduce_min(std::span<T> values) {
    compare(values, MPI_MIN);
  }
  template <class T>
  void all_reduce_max(std::span<T> values) {
    compare(values, MPI_MAX);
  }

  /// Neither Open MPI nor MPICH makes progress by itself: call done() now and then while computing.
  template <class T>
  [[nodiscard]] request start_all_reduce_sum(std::span<T> values) {
    pufferfish::detail::check_reducible<T>();
    request started = new_request();
    detail::for_chunks(values, chunk_, [&](T* first, int length) {
      detail::check(
          MPI_Iallreduce(MPI_IN_PLACE, first, length, detail::datatype<T>(), MPI_SUM, comm_, started.next()),
          "MPI_Iallreduce");
    });
    return started;
  }

  /// Copies the bytes; all machines of the group must represent T alike.
  template <class T>
  void broadcast(std::span<T> values, int root) {
    pufferfish::detail::check_broadcastable<T>();
    broadcast_bytes(std::as_writable_bytes(values), root);
  }
  void broadcast_bytes(std::span<std::byte> bytes, int root) {
    pufferfish::detail::check_root("mpi::communicator: broadcast", root, size_);
    detail::for_chunks(bytes, chunk_, [&](std::byte* first, int length) {
      if (watch_) {
        request started = new_request();
        detail::check(MPI_Ibcast(first, length, MPI_BYTE, root, comm_, started.next()), "MPI_Ibcast");
        started.wait();
      } else {
        detail::check(MPI_Bcast(first, length, MPI_BYTE, root, comm_), "MPI_Bcast");
      }
    });
  }

  template <class T>
  std::vector<T> all_gather(const T& value) {
    pufferfish::detail::check_gatherable<T>();
    constexpr int bytes = static_cast<int>(sizeof(T));
    std::vector<T> all(static_cast<std::size_t>(size_), value);
    if (watch_) {
      request started = new_request();
      detail::check(
          MPI_Iallgather(&value, bytes, MPI_BYTE, all.data(), bytes, MPI_BYTE, comm_, started.next()),
          "MPI_Iallgather");
      started.wait();
    } else {
      detail::check(MPI_Allgather(&value, bytes, MPI_BYTE, all.data(), bytes, MPI_BYTE, comm_),
                    "MPI_Allgather");
    }
    return all;
  }

  void barrier() {
    if (!watch_) return detail::check(MPI_Barrier(comm_), "MPI_Barrier");
    request started = new_request();
    detail::check(MPI_Ibarrier(comm_, started.next()), "MPI_Ibarrier");
    started.wait();
  }

  /// A message to another rank, or from it (see `messenger`). Messages from one rank to another arrive in the
  /// order in which they are started, into as many bytes.
  template <class T>
  [[nodiscard]] request start_send(std::span<const T> values, int to) {
    pufferfish::detail::check_root("mpi::communicator: start_send", to, size_);
    request started = new_request();
    detail::for_chunks(std::as_bytes(values), chunk_, [&](const std::byte* first, int length) {
      detail::check(MPI_Isend(first, length, MPI_BYTE, to, message_tag, comm_, started.next()), "MPI_Isend");
    });
    return started;
  }
  template <class T>
  [[nodiscard]] request start_receive(std::span<T> values, int from) {
    pufferfish::detail::check_broadcastable<T>();
    pufferfish::detail::check_root("mpi::communicator: start_receive", from, size_);
    request started = new_request();
    detail::for_chunks(std::as_writable_bytes(values), chunk_, [&](std::byte* first, int length) {
      detail::check(MPI_Irecv(first, length, MPI_BYTE, from, message_tag, comm_, started.next()),
                    "MPI_Irecv");
    });
    return started;
  }

 private:
  static constexpr int message_tag = 1;

  /// Reads rank and size off the fresh duplicate; frees it again if that fails.
  void configure() {
    int code = MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    if (code == MPI_SUCCESS) code = MPI_Comm_rank(comm_, &rank_);
    if (code == MPI_SUCCESS) code = MPI_Comm_size(comm_, &size_);
    if (code == MPI_SUCCESS) return;
    release();
    detail::check(code, "setting up the duplicate");
  }

  void release() noexcept {
    if (comm_ != MPI_COMM_NULL && !detail::is_finalized()) MPI_Comm_free(&comm_);
  }

  request new_request() const {
    if (watch_ && watch_->broken())
      PUFFERFISH_THROW(timeout_error("mpi::communicator: a call after a timeout", watch_->missing()));
    request started;
    started.backs_off_ = backs_off_;
    started.watch_ = watch_;
    return started;
  }

  template <class T>
  void all_reduce(std::span<T> values, MPI_Op operation) {
    pufferfish::detail::check_reducible<T>();
    detail::for_chunks(values, chunk_, [&](T* first, int length) {
      if (watch_) {
        request started = new_request();
        detail::check(MPI_Iallreduce(MPI_IN_PLACE, first, length, detail::datatype<T>(), operation, comm_,
                                     started.next()),
                      "MPI_Iallreduce");
        return started.wait();
      }
      detail::check(MPI_Allreduce(MPI_IN_PLACE, first, length, detail::datatype<T>(), operation, comm_),
                    "MPI_Allreduce");
    });
  }

  /// Minimum or maximum. MPICH 4.0.2 compares unsigned integers as signed ones (its issue 6083; Open
  /// MPI 4.1.4 does so for unsigned long), so these go as signed ones: with the top bit flipped both have the
  /// same order.
  template <class T>
  void compare(std::span<T> values, MPI_Op operation) {
    pufferfish::detail::check_reducible<T>();
    if constexpr (std::is_unsigned_v<T>) {
      const auto flip = [](T value) { return static_cast<T>(value ^ (T{1} << (8 * sizeof(T) - 1))); };
      std::transform(values.begin(), values.end(), values.begin(), flip);
      // The signed type of an unsigned one may alias it.
      using signed_type = std::make_signed_t<T>;
      all_reduce(std::span(reinterpret_cast<signed_type*>(values.data()), values.size()), operation);
      std::transform(values.begin(), values.end(), values.begin(), flip);
    } else {
      all_reduce(values, operation);
    }
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  std::size_t chunk_ = default_chunk;
  int rank_ = 0;
  int size_ = 1;
  bool backs_off_ = true;
  std::shared_ptr<detail::watch> watch_;  // nullptr: waits for ever
};

static_assert(pufferfish::communicator<communicator>);

}  // namespace mpi

PUFFERFISH_NAMESPACE_END
