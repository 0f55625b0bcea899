// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `mpi::communicator`: a group of MPI processes. Tested with Open MPI 4.1 and MPICH 4.0; uses MPI 3.0.
///
/// The program owns MPI: nothing in this header initialises or finalizes it (mpi_environment.hpp does so for
/// programs that have no other owner). The level at which MPI was initialised decides which threads may call:
/// the main thread (MPI_THREAD_FUNNELED), one thread at a time (SERIALIZED), any (MULTIPLE). At SERIALIZED
/// the library takes turns by a lock that the program's own MPI calls must hold, too (call_lock). At all
/// levels one thread at a time uses a communicator.

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <pufferfish/core/number_text.hpp>
#include <pufferfish/distributed/mpi_request.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace mpi {

/// A communicator (see the concept `pufferfish::communicator`) on a duplicate of the user's MPI communicator,
/// so that its messages never match the user's. Its waits end after default_timeout, see set_timeout.
/// Move-only.
///
/// Sums have the same bits on all ranks: the MPI standard asks for identical results of MPI_ALLREDUCE
/// everywhere, and the algorithms keep it: a ring (or reduce + broadcast) computes each element on one
/// rank and copies it, and recursive doubling adds the same two partial sums on both partners, in either
/// order (IEEE addition commutes; only a NaN's payload may differ). The bits may differ for other lengths,
/// chunk sizes or rank counts, and between started and blocking sums, because MPI may then add in another
/// order.
/// \code
///   mpi::environment environment(mpi::thread_level::serialized);
///   mpi::communicator comm(MPI_COMM_WORLD);
///   comm.set_timeout(60.0);
///   std::vector<double> values(10, comm.rank() + 1.0);
///   comm.all_reduce_sum(std::span<double>(values));  // on all ranks
/// \endcode
///
/// Collective: the constructor, all_reduce_sum, _min, _max, start_all_reduce_sum, broadcast, broadcast_bytes,
/// all_gather and barrier. The other members are local. Arguments are as the concept says. Collectives and
/// messages throw backend_error if MPI fails and timeout_error after a timeout or, if blocking, when the time
/// limit is exceeded; elements are then undefined. While there is a time limit, as initially, or threads take
/// turns (call_lock), elements of blocking collectives are copied to memory of the communicator and back, in
/// pieces of at most 16 MiB.
class communicator {
 public:
  /// Largest number of elements per MPI call. One GiB of doubles: MPI's int counts would allow 16 times that,
  /// but implementations have computed byte counts in int as well.
  static constexpr std::size_t default_chunk = std::size_t{1} << 27;

  /// Duplicates `comm` (collective over it) and makes errors on the duplicate returnable. `chunk`: largest
  /// number of elements per MPI call, 1 .. INT_MAX, the same on all ranks; for tests. Throws state_error if
  /// MPI is not running, value_error for MPI_COMM_NULL, an intercommunicator or a bad chunk (on all ranks, if
  /// it is bad on one), backend_error if MPI fails (with `comm`'s default handler MPI ends the program
  /// instead), timeout_error if not all ranks of `comm` call this within default_timeout seconds.
  explicit communicator(MPI_Comm comm, std::size_t chunk = default_chunk) {
    detail::check_running("mpi::communicator");
    if (comm == MPI_COMM_NULL) PUFFERFISH_THROW(value_error("mpi::communicator: MPI_COMM_NULL given"));
    int inter = 0;
    detail::call("MPI_Comm_test_inter", [&] { return MPI_Comm_test_inter(comm, &inter); });
    if (inter != 0)
      PUFFERFISH_THROW(value_error("mpi::communicator: an intercommunicator has two groups; merge it"));
    watch_ = std::make_shared<detail::watch>(comm);
    pufferfish::detail::all_or_none(*this, "mpi::communicator", [&] {
      if (chunk < 1 || chunk > std::size_t{INT_MAX}) {
        PUFFERFISH_THROW(value_error(std::string("mpi::communicator: chunk of ") + std::to_string(chunk) +
                                     " elements is outside 1 .. " + std::to_string(INT_MAX)));
      }
    });
    chunk_ = chunk;
  }

  /// The duplicate is freed with the communicator and the last of its requests (collective in MPI's words,
  /// local in practice), unless MPI has been finalized. A moved-from object is rank 0 of 1 and has
  /// MPI_COMM_NULL, so that its calls throw backend_error if the error handler of MPI_COMM_WORLD returns;
  /// MPI's default handler ends the program.
  communicator(communicator&& other) noexcept = default;
  communicator& operator=(communicator&& other) noexcept = default;

  int rank() const { return watch_ ? watch_->rank() : 0; }
  int size() const { return watch_ ? watch_->size() : 1; }

  /// Whether threads other than the main one may call the communicator, one at a time (MPI_THREAD_SERIALIZED
  /// or more).
  bool usable_from_threads() const { return detail::thread_level() >= MPI_THREAD_SERIALIZED; }

  /// Whether MPI reports, on this rank, that its blocking calls accept memory of a CUDA device
  /// (exchange_memory::device). False if MPI has no such query.
  bool takes_device_memory() const { return detail::takes_device_memory(); }

  /// Limits every wait of calls and requests for other ranks to `seconds`. 0: no limit. Initially the limit
  /// is default_timeout, ten minutes. When it is exceeded on one rank, all ranks that wait throw
  /// timeout_error, which names the ranks that have not answered within another half of `seconds`, at most a
  /// minute. A rank that computes, factorizes, evaluates or writes a file for so long counts as hanging:
  /// choose several times the longest of these.
  ///
  /// After a timeout, transfers under way never end, and the communicator is unusable. The memory of a
  /// started request must live as long as the process, since a late rank's message may still be written to
  /// it. Blocking calls use memory of the communicator, and exchanges keep gradients and buffers alive, so
  /// that a program can unwind, save its own state and abort().
  ///
  /// A call with `seconds` > 0 also declares that the program uses a rank's state after a timeout: see
  /// may_lose_ranks. Local; call it while nothing is under way, with the same number on all ranks. With 0,
  /// unless threads take turns (call_lock), calls wait in MPI's blocking functions; sums may then be added in
  /// another order. Throws value_error for a negative number or NaN, state_error for a moved-from object,
  /// timeout_error after a timeout.
  void set_timeout(double seconds) {
    if (!(seconds >= 0.0)) {
      PUFFERFISH_THROW(value_error(
          "mpi::communicator: set_timeout: " + pufferfish::detail::shortest_number(seconds) + " s"));
    }
    if (!watch_) PUFFERFISH_THROW(state_error("mpi::communicator: set_timeout of a moved-from object"));
    if (watch_->broken()) {
      PUFFERFISH_THROW(timeout_error("mpi::communicator: set_timeout after a timeout", watch_->missing()));
    }
    watch_->set_seconds(seconds);
    may_lose_ranks_ = seconds > 0.0;
  }

  /// Seconds that a call may wait; 0: for ever.
  double timeout() const { return watch_ ? watch_->seconds() : 0.0; }

  /// Whether the program has set a timeout. Training runs then update parameters only when all gradients have
  /// come, so that parameters are always those of a whole step. Under the default timeout they do not.
  bool may_lose_ranks() const { return may_lose_ranks_; }

  /// True after a timeout: collectives and messages then throw timeout_error.
  bool broken() const { return watch_ && watch_->broken(); }

  /// Ends the programs of all ranks, with this exit status if the launcher passes it on. Local. Does not take
  /// call_lock, so that no thread can delay it.
  [[noreturn]] void abort(int status) {
    MPI_Abort(handle(), status);
    std::abort();
  }

  /// The duplicate, for collectives that this class does not offer; see call_lock. Stays owned by this
  /// object.
  MPI_Comm handle() const { return watch_ ? watch_->group() : MPI_COMM_NULL; }

  template <class T>
  void all_reduce_sum(std::span<T> values) {
    all_reduce(values, MPI_SUM);
  }
  /// Sums device memory over all ranks in place (see takes_device_memory). Uses MPI's blocking function: no
  /// timeout ends it, and if threads take turns (call_lock), no other thread gets a turn meanwhile.
  template <class T>
  void all_reduce_sum_on_device(std::span<T> values) {
    pufferfish::detail::check_reducible<T>();
    check_not_broken();
    detail::for_chunks(values, chunk_, [&](T* first, int length) {
      block(std::span<T>(first, static_cast<std::size_t>(length)), MPI_SUM);
    });
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
    return start_pieces("MPI_Iallreduce", values, [&](T* first, int length, MPI_Request* next) {
      return MPI_Iallreduce(MPI_IN_PLACE, first, length, detail::datatype<T>(), MPI_SUM, handle(), next);
    });
  }

  /// Copies the bytes of `root` to all ranks; all machines of the group must represent T alike. Throws
  /// value_error, without communicating, if there is no such root.
  template <class T>
  void broadcast(std::span<T> values, int root) {
    pufferfish::detail::check_broadcastable<T>();
    broadcast_bytes(std::as_writable_bytes(values), root);
  }
  /// Copies the bytes of `root` to all ranks, with the errors of broadcast.
  void broadcast_bytes(std::span<std::byte> bytes, int root) {
    pufferfish::detail::check_root("mpi::communicator: broadcast", root, size());
    for_pieces(bytes, [&](std::byte* first, int length) {
      const auto start = [&](std::byte* memory, MPI_Request* next) {
        return MPI_Ibcast(memory, length, MPI_BYTE, root, handle(), next);
      };
      if (polls()) return poll("MPI_Ibcast", std::span(first, static_cast<std::size_t>(length)), start);
      detail::call("MPI_Bcast", [&] { return MPI_Bcast(first, length, MPI_BYTE, root, handle()); });
    });
  }

  /// Element r of the result is rank r's value, for the same T on all ranks: a trivially copyable type of at
  /// most 4096 bytes, not bool, whose bytes are sent as they are.
  template <class T>
  std::vector<T> all_gather(const T& value) {
    pufferfish::detail::check_gatherable<T>();
    constexpr int bytes = static_cast<int>(sizeof(T));
    std::vector<T> all(static_cast<std::size_t>(size()), value);
    if (polls()) {
      const auto start = [&](std::byte* memory, MPI_Request* next) {
        return MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, memory, bytes, MPI_BYTE, handle(), next);
      };
      poll("MPI_Iallgather", std::as_writable_bytes(std::span(all)), start);
    } else {
      detail::call("MPI_Allgather", [&] {
        return MPI_Allgather(&value, bytes, MPI_BYTE, all.data(), bytes, MPI_BYTE, handle());
      });
    }
    return all;
  }

  void barrier() {
    if (!polls()) return detail::call("MPI_Barrier", [&] { return MPI_Barrier(handle()); });
    poll("MPI_Ibarrier", {}, [&](std::byte*, MPI_Request* next) { return MPI_Ibarrier(handle(), next); });
  }

  /// Starts a message to or from another rank (see `messenger`). Messages from one rank to another arrive in
  /// the order in which they are started; both sides must use the same number of bytes.
  /// The request owns the memory of `values` until it is done. Throws value_error for a rank outside the
  /// group.
  template <class T>
  [[nodiscard]] request start_send(std::span<const T> values, int to) {
    pufferfish::detail::check_root("mpi::communicator: start_send", to, size());
    const auto send = [&](const std::byte* first, int length, MPI_Request* next) {
      return MPI_Isend(first, length, MPI_BYTE, to, message_tag, handle(), next);
    };
    return start_pieces("MPI_Isend", std::as_bytes(values), send);
  }
  template <class T>
  [[nodiscard]] request start_receive(std::span<T> values, int from) {
    pufferfish::detail::check_broadcastable<T>();
    pufferfish::detail::check_root("mpi::communicator: start_receive", from, size());
    const auto receive = [&](std::byte* first, int length, MPI_Request* next) {
      return MPI_Irecv(first, length, MPI_BYTE, from, message_tag, handle(), next);
    };
    return start_pieces("MPI_Irecv", std::as_writable_bytes(values), receive);
  }

 private:
  static constexpr int message_tag = 1;
  /// Largest piece of a polled collective, in bytes. Pieces are copied; longer ones would hardly be faster.
  static constexpr std::size_t longest_piece = std::size_t{16} << 20;

  bool polls() const { return watch_ && watch_->polls(); }
  /// Throws timeout_error if an earlier wait has timed out; so does new_request.
  void check_not_broken() const {
    if (broken())
      PUFFERFISH_THROW(timeout_error("mpi::communicator: a call after a timeout", watch_->missing()));
  }
  request new_request() const {
    check_not_broken();
    return request(watch_);
  }

  /// Starts call(first, length, request) for the pieces of a message or sum. `name`: that of MPI's function.
  template <class T, class Call>
  request start_pieces(const char* name, std::span<T> values, const Call& call) {
    request started = new_request();
    detail::for_chunks(values, chunk_, [&](T* first, int length) {
      MPI_Request* const next = started.next();
      detail::call(name, [&] { return call(first, length, next); });
    });
    return started;
  }
  /// Calls f(first, length) for the pieces of a blocking collective.
  template <class T, class F>
  void for_pieces(std::span<T> values, const F& f) {
    const std::size_t piece = polls() ? std::min(chunk_, longest_piece / sizeof(T)) : chunk_;
    detail::for_chunks(values, piece, f);
  }

  /// A blocking collective by polling: start(memory, request) starts it in memory that holds a copy of
  /// `bytes`. The result is copied back to `bytes`.
  template <class Start>
  void poll(const char* name, std::span<std::byte> bytes, const Start& start) {
    request started = new_request();
    std::byte* const memory = watch_->room(bytes.size());
    if (!bytes.empty()) std::memcpy(memory, bytes.data(), bytes.size());
    MPI_Request* const next = started.next();
    detail::call(name, [&] { return start(memory, next); });
    started.wait();
    if (!bytes.empty()) std::memcpy(bytes.data(), memory, bytes.size());
  }

  /// Reduces the elements of all ranks by `operation`, in place, by polling or by MPI_Allreduce.
  template <class T>
  void all_reduce(std::span<T> values, MPI_Op operation) {
    pufferfish::detail::check_reducible<T>();
    for_pieces(values, [&](T* first, int length) {
      const auto start = [&](std::byte* memory, MPI_Request* next) {
        return MPI_Iallreduce(MPI_IN_PLACE, memory, length, detail::datatype<T>(), operation, handle(), next);
      };
      const std::span<T> piece(first, static_cast<std::size_t>(length));
      if (polls()) return poll("MPI_Iallreduce", std::as_writable_bytes(piece), start);
      block(piece, operation);
    });
  }
  template <class T>
  void block(std::span<T> values, MPI_Op operation) {
    detail::call("MPI_Allreduce", [&] {
      return MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()),
                           detail::datatype<T>(), operation, handle());
    });
  }

  /// Computes minima or maxima. MPICH 4.0.2 compares unsigned integers as signed ones (its issue 6083; Open
  /// MPI 4.1.4 does so for unsigned long). So unsigned integers are compared as signed ones with the top bit
  /// flipped, which have the same order.
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

  std::size_t chunk_ = default_chunk;
  bool may_lose_ranks_ = false;
  std::shared_ptr<detail::watch> watch_;  // nullptr: moved from
};

static_assert(pufferfish::communicator<communicator>);

}  // namespace mpi

PUFFERFISH_NAMESPACE_END
