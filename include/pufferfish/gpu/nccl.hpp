// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gpu::nccl`: a group of processes whose devices add up their memory by NCCL, without the host. Programs
/// that include it link libnccl; <pufferfish/gpu.hpp> does not include it.

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/gpu/nccl_handle.hpp>

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

#include <pufferfish/dist/communicator.hpp>
#include <pufferfish/gpu/context.hpp>
#include <pufferfish/gpu/kernels/exchange.hpp>

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

/// A communicator for the host's memory, which is that of `Host` (any communicator: mpi::communicator), and
/// for memory of devices, which goes by NCCL. It is a `communicator` itself, so it stands wherever one is
/// asked for; a gradient_exchange on device::gpu that is given it (gpu/nccl_exchange.hpp, included below)
/// sends buckets from where backward wrote them.
///
///     mpi::communicator hosts(MPI_COMM_WORLD);
///     gpu_context ctx({.device = local_rank});
///     gpu::nccl comm(hosts);                              // each rank with a device of its own
///     comm.broadcast(net.store().values(), 0, ctx.stream());
///     gradient_exchange<float, gpu::nccl<mpi::communicator>, device::gpu> exchange(net.store(), comm);
///
/// Calls with a stream put their work into it, and may be captured into a graph; all ranks make them in the
/// same order, whatever the streams. Sums are NCCL's: all ranks get the same bits; their order follows from
/// the machines, NCCL's version and environment, except where NVLink switches add (NVLS), whose order is
/// anybody's (NVIDIA/nccl issue 1497): a deterministic context wants NCCL_NVLS_ENABLE=0 in the environment.
///
/// What fails is noticed by a thread (see detail::nccl_handle): it aborts NCCL's communicator, so that what
/// waits on the device returns, and from then on every call throws, context::synchronize and step_graph::run
/// too for contexts that have been given to report_to.
///
/// Keep it in one place, and destroy it while MPI still runs, before the context, and after graphs that have
/// captured its calls (step_graph::drop): NCCL waits for their end.
template <class Host>
class nccl {
 public:
  /// Collective over `host`, which must outlive it; with the rank's device current. `timeout`: seconds that
  /// work may take once it has begun on the device, and a call of NCCL; 0: for ever. By default the one that
  /// the host communicator was set to, if any. Throws on all ranks if one of them cannot: backend_error with
  /// the rank and NCCL's words (two ranks on one device, for instance); value_error for a negative timeout.
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
  double timeout() const { return handle_ ? handle_->timeout() : 0.0; }

  // Memory of the device ------------------------------------------------------------------------------------

  /// Element i becomes the sum (the smallest) of all ranks' elements i, in place, when the stream gets there.
  template <class T>
  void all_reduce_sum(std::span<T> values, cudaStream_t stream) {
    watched(stream, [&] { start_sum(values, stream); });
  }
  template <class T>
  void all_reduce_min(std::span<T> values, cudaStream_t stream) {
    watched(stream, [&] { start_min(values, stream); });
  }
  /// Copies root's elements to all ranks.
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

  /// Throws what has gone wrong since, if anything.
  void check() {
    if (handle_) handle_->check();
  }
  /// Lets a context's calls throw it as well.
  void report_to(const gpu_context& ctx) {
    if (handle_) handle_->report_to(ctx.failures());
  }

  /// Throws value_error where NCCL's sums may differ from run to run and the context is deterministic.
  void require_deterministic(const gpu_context& ctx) const {
    if (size() == 1 || !ctx.deterministic()) return;
    const char* switches = std::getenv("NCCL_NVLS_ENABLE");
    if (switches != nullptr && std::string_view(switches) == "0") return;
    PUFFERFISH_THROW(value_error(
        "gpu::nccl: sums in NVLink switches may differ from run to run; set NCCL_NVLS_ENABLE=0, or "
        "context_options::deterministic = false"));
  }

  // Parts of a longer piece of work, which is watched as a whole: between mark_begin and mark_end.

  void mark_begin(cudaStream_t stream) {
    if (handle_) handle_->mark_begin(stream);
  }
  void mark_end(cudaStream_t stream) {
    if (handle_) handle_->mark_end(stream);
  }
  template <class T>
  void start_sum(std::span<T> values, cudaStream_t stream) {
    reduce(values, ncclSum, stream);
  }
  template <class T>
  void start_min(std::span<T> values, cudaStream_t stream) {
    reduce(values, ncclMin, stream);
  }
  /// Messages between pairs of ranks, all at once: `each(send, receive)` is called for every other rank,
  /// which has to receive and send as much.
  ///   send(std::span<const std::uint16_t>, rank), receive(std::span<std::uint16_t>, rank)
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
  bool usable_from_threads() const {
    if constexpr (requires { host_->usable_from_threads(); }) return host_->usable_from_threads();
    return false;
  }

 private:
  static double timeout_of(const Host& host) {
    // Not its default: work on the device would be waited for in every step.
    if constexpr (requires { host.timeout(); }) {
      if (pufferfish::detail::may_lose_ranks(host)) return host.timeout();
    }
    return 0.0;
  }

  // Rank 0's id for all, and what became of it on each.
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

#include <pufferfish/gpu/nccl_exchange.hpp>
