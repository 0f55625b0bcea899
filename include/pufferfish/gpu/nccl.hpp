// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gpu::nccl`: collectives of a group of processes on the memory of their devices by NCCL, without the host.
/// Programs that include this header link libnccl; <pufferfish/gpu.hpp> does not include it.

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/gpu/comm/nccl_handle.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <pufferfish/distributed/communicator.hpp>
#include <pufferfish/gpu/kernels/comm/exchange.hpp>
#include <pufferfish/gpu/runtime/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// NCCL's name for an element type.
template <class T>
constexpr ncclDataType_t nccl_type() {
  if constexpr (std::is_same_v<T, float>) {
    return ncclFloat32;
  } else if constexpr (std::is_same_v<T, double>) {
    return ncclFloat64;
  } else if constexpr (std::is_signed_v<T>) {
    return sizeof(T) == 8 ? ncclInt64 : ncclInt32;
  } else {
    return sizeof(T) == 8 ? ncclUint64 : ncclUint32;
  }
}

}  // namespace detail

/// A communicator that executes collectives on host memory by `Host` (any communicator: mpi::communicator),
/// and collectives on device memory by NCCL. It is a `communicator` itself, so it can stand in for one.
///
///     mpi::communicator hosts(MPI_COMM_WORLD);
///     gpu_context ctx({.device = local_rank});
///     gpu::nccl comm(hosts);                              // each rank with a device of its own
///     comm.broadcast(net.store().values(), 0, ctx.stream());
///     gradient_exchange<float, gpu::nccl<mpi::communicator>, device::gpu> exchange(net.store(), comm);
///
/// Collectives with a stream argument are submitted to that stream, and may be captured into a graph. All
/// ranks must call them in the same order, on any streams. NCCL computes the sums: all ranks get the same
/// bits, in an order of summation that depends on the machines, NCCL's version and environment. Only sums in
/// NVLink switches (NVLS) have no fixed order (NVIDIA/nccl issue 1497): a deterministic context needs
/// NCCL_NVLS_ENABLE=0 in the environment.
///
/// A thread of the object notices failures (see detail::nccl_handle). It aborts NCCL's communicator, so that
/// kernels that wait on the device return. From then on every call throws. context::synchronize and
/// step_graph::run throw, too, if report_to has been called for their context.
///
/// A gradient_exchange on device::gpu with this communicator sends buckets from the gradient arena, on a
/// stream of its own, during the backward pass. It differs from the exchange through the host in these
/// points:
/// - Work that is submitted to the context's stream after finish, or in a call of `arrived`, sees the means.
///   The host waits only to check a nonfinite_policy or, with a timeout, the other ranks, and in begin of a
///   direct step after captured ones. The times in report() are zero.
/// - Any step can be captured. skip() is written only if exchange_options::nonfinite is not `ignore`; else
///   the flag stays 0.
/// - NCCL chooses the algorithm: the constructor throws value_error if the options name an algorithm of this
///   library. There is no exchange thread.
/// - Most compressors work on the host: the constructor throws value_error for them. The exception is
///   compact_sum without TernGrad, whose result is the mean of a fixed set of elements, which are gathered on
///   the device. For other compressors make the exchange with host().
/// - begin also throws NCCL failures since the previous call of the exchange, and the errors of
///   require_deterministic.
/// - The context's device is current in all calls. The exchange must outlive graphs that have captured its
///   calls; its destructor waits for the device if a step is unfinished or was captured.
///
/// The object cannot be moved. Destroy it while MPI still runs, before the context, and after the graphs that
/// have captured its calls (step_graph::drop): NCCL waits for the end of these graphs. One thread at a time
/// calls the functions. With one rank no NCCL communicator is made and the functions for device memory do
/// nothing.
template <class Host>
class nccl {
 public:
  /// Collective over `host`, which must outlive this object; the rank's device must be current. `timeout`:
  /// most seconds for a call of NCCL, and for work begun on the device; 0: no limit. By default the timeout
  /// that the host communicator was set to, if any. Throws on all ranks if one fails: backend_error with the
  /// rank and NCCL's message (such as two ranks on one device); value_error for a negative timeout. The
  /// device is the one that is current in the thread. The destructor waits for work of other ranks on the
  /// communicator, unless an exception is being thrown or a failure has broken the communicator.
  explicit nccl(Host& host, std::optional<double> timeout = {}) : host_(&host) {
    pufferfish::detail::check_communicator<Host>();
    const double seconds = timeout ? *timeout : timeout_of(host);
    pufferfish::detail::all_or_none(host, "gpu::nccl", [seconds] {
      if (seconds >= 0.0) return;
      pufferfish::detail::throw_error<value_error>({"gpu::nccl: a timeout of ", seconds, " s"});
    });
    if (size() > 1) join(seconds);
  }
  nccl(const nccl&) = delete;
  nccl& operator=(const nccl&) = delete;

  Host& host() const { return *host_; }
  int rank() const { return host_->rank(); }
  int size() const { return host_->size(); }
  /// Seconds; 0: no limit, also with one rank.
  double timeout() const { return handle_ ? handle_->timeout() : 0.0; }

  // Memory of the device ------------------------------------------------------------------------------------

  /// In place, in the order of the stream: element i becomes the sum (the smallest) of all ranks' elements i.
  /// T: float, double and integers of 4 or 8 bytes. `values` is device memory of the same length on all
  /// ranks, valid until the stream has executed the call. Does not wait for the device. Collective. Throws
  /// backend_error, timeout_error, and an earlier failure that has broken the communicator.
  template <class T>
  void all_reduce_sum(std::span<T> values, cudaStream_t stream) {
    watched(stream, [&] { start_sum(values, stream); });
  }
  template <class T>
  void all_reduce_min(std::span<T> values, cudaStream_t stream) {
    watched(stream, [&] { start_min(values, stream); });
  }
  /// Copies root's elements to all ranks. T: trivially copyable. Otherwise as all_reduce_sum; also throws
  /// value_error for a root outside the group.
  template <class T>
  void broadcast(std::span<T> values, int root, cudaStream_t stream) {
    pufferfish::detail::check_broadcastable<T>();
    pufferfish::detail::check_root("gpu::nccl: broadcast", root, size());
    if (!handle_ || values.empty()) return;
    watched(stream, [&] {
      handle_->run("ncclBroadcast", [&](ncclComm_t comm) {
        return ncclBroadcast(values.data(), values.data(), values.size_bytes(), ncclInt8, root, comm, stream);
      });
    });
  }

  /// Throws the failure that has broken the communicator, if there is one. Asks NCCL for errors of its own as
  /// well. Not collective.
  void check() {
    if (handle_) handle_->check();
  }
  /// Makes calls of a context throw such a failure as well. Failures are posted to ctx.failures() and thrown
  /// by every later begin_step, synchronize and step_graph::run of the context. Repeated calls have no
  /// further effect.
  void report_to(const gpu_context& ctx) {
    if (handle_) handle_->report_to(ctx.failures());
  }

  /// Throws value_error if NCCL's sums may differ from run to run and the context is deterministic.
  void require_deterministic(const gpu_context& ctx) const {
    if (size() == 1 || !ctx.deterministic()) return;
    const char* switches = std::getenv("NCCL_NVLS_ENABLE");
    if (switches != nullptr && std::string_view(switches) == "0") return;
    PUFFERFISH_THROW(value_error(
        "gpu::nccl: sums in NVLink switches may differ from run to run; set NCCL_NVLS_ENABLE=0, or "
        "context_options::deterministic = false"));
  }

  // Parts of a longer operation. Mark its begin and end: the timeout holds for the whole operation.

  /// Marks the begin of a longer operation on the stream: if the communicator has a timeout, submits a host
  /// function that starts the clock; without a timeout does nothing. Each mark_begin must be followed by a
  /// mark_end.
  void mark_begin(cudaStream_t stream) {
    if (handle_) handle_->mark_begin(stream);
  }
  /// Marks the end of the operation that the last mark_begin on the stream has begun.
  void mark_end(cudaStream_t stream) {
    if (handle_) handle_->mark_end(stream);
  }
  /// Sums `values` over all ranks in place, like all_reduce_sum, but sets no marks for the timeout.
  template <class T>
  void start_sum(std::span<T> values, cudaStream_t stream) {
    reduce(values, ncclSum, stream);
  }
  /// Computes the minimum of `values` over all ranks in place, like all_reduce_min, without marks for the
  /// timeout.
  template <class T>
  void start_min(std::span<T> values, cudaStream_t stream) {
    reduce(values, ncclMin, stream);
  }
  /// Messages between pairs of ranks, as one group of NCCL's. Calls each(send, receive), which may call send
  /// and receive for every other rank; that rank must receive and send as many numbers.
  ///   send(std::span<const std::uint16_t>, rank), receive(std::span<std::uint16_t>, rank)
  /// Spans are device memory, valid until the stream has executed the call. Collective for the ranks that
  /// send or receive. Throws the errors of all_reduce_sum.
  template <class Each>
  void start_messages(Each&& each, cudaStream_t stream) {
    if (!handle_) return;
    handle_->run_group("messages", [&](auto&& add) {
      const auto send = [&](std::span<const std::uint16_t> values, int to) {
        if (values.empty()) return;
        add([&](ncclComm_t comm) {
          return ncclSend(values.data(), values.size_bytes(), ncclInt8, to, comm, stream);
        });
      };
      const auto receive = [&](std::span<std::uint16_t> values, int from) {
        if (values.empty()) return;
        add([&](ncclComm_t comm) {
          return ncclRecv(values.data(), values.size_bytes(), ncclInt8, from, comm, stream);
        });
      };
      each(send, receive);
    });
  }

  // Memory of the host: Host's ------------------------------------------------------------------------------

  /// The following functions are those of host(): collectives and messages on host memory.
  template <class T>
  void all_reduce_sum(std::span<T> values) {
    host_->all_reduce_sum(values);
  }
  template <class T>
  void all_reduce_min(std::span<T> values) {
    host_->all_reduce_min(values);
  }
  template <class T>
  void all_reduce_max(std::span<T> values) {
    host_->all_reduce_max(values);
  }
  template <class T>
  [[nodiscard]] auto start_all_reduce_sum(std::span<T> values) {
    return host_->start_all_reduce_sum(values);
  }
  template <class T>
  void broadcast(std::span<T> values, int root) {
    host_->broadcast(values, root);
  }
  void broadcast_bytes(std::span<std::byte> bytes, int root) { host_->broadcast_bytes(bytes, root); }
  template <class T>
  std::vector<T> all_gather(const T& value) {
    return host_->all_gather(value);
  }
  void barrier() { host_->barrier(); }
  template <class T>
  [[nodiscard]] auto start_send(std::span<const T> values, int to) {
    return host_->start_send(values, to);
  }
  template <class T>
  [[nodiscard]] auto start_receive(std::span<T> values, int from) {
    return host_->start_receive(values, from);
  }
  /// Whether another thread may use the host communicator; false for a communicator without this function.
  bool usable_from_threads() const {
    if constexpr (requires { host_->usable_from_threads(); }) return host_->usable_from_threads();
    return false;
  }

 private:
  static double timeout_of(const Host& host) {
    // Not the default timeout of a host: with a timeout every step waits for the device.
    if constexpr (requires { host.timeout(); }) {
      if (pufferfish::detail::may_lose_ranks(host)) return host.timeout();
    }
    return 0.0;
  }

  // Joins with rank 0's id, which all ranks receive, and agrees with the other ranks on success.
  void join(double timeout) {
    struct invitation {
      ncclUniqueId id;
      std::int32_t result;
    };
    std::array<invitation, 1> shared{};
    if (rank() == 0) shared[0].result = ncclGetUniqueId(&shared[0].id);
    host_->broadcast_bytes(std::as_writable_bytes(std::span<invitation>(shared)), 0);
    std::string problem;
    if (shared[0].result != ncclSuccess) {
      problem = std::string("gpu::nccl: ncclGetUniqueId on rank 0: ") +
                ncclGetErrorString(static_cast<ncclResult_t>(shared[0].result));
    } else {
      try {
        handle_.emplace(shared[0].id, rank(), size(), timeout);
      } catch (const std::exception& e) {
        problem = e.what();
      }
    }
    agree_on_success(problem);
  }
  void agree_on_success(const std::string& problem) {
    const auto failed = host_->all_gather(static_cast<std::uint64_t>(problem.empty() ? 0 : 1));
    for (std::size_t bad = 0; bad < failed.size(); ++bad) {
      if (failed[bad] == 0) continue;
      const std::string text = pufferfish::detail::broadcast_text(*host_, problem, static_cast<int>(bad));
      handle_.reset();
      PUFFERFISH_THROW(backend_error("rank " + std::to_string(bad) + ": " + text));
    }
  }

  template <class Work>
  void watched(cudaStream_t stream, Work&& work) {
    mark_begin(stream);
    work();
    mark_end(stream);
  }

  template <class T>
  void reduce(std::span<T> values, ncclRedOp_t operation, cudaStream_t stream) {
    pufferfish::detail::check_reducible<T>();
    if (!handle_ || values.empty()) return;
    handle_->run("ncclAllReduce", [&](ncclComm_t comm) {
      return ncclAllReduce(values.data(), values.data(), values.size(), detail::nccl_type<T>(), operation,
                           comm, stream);
    });
  }

  Host* host_;
  std::optional<detail::nccl_handle> handle_;
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END

#include <pufferfish/gpu/comm/nccl_driver.hpp>
