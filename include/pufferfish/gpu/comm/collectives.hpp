// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Collectives on memory of a device by any communicator: for parameters at the start and at the switch, and
/// for the statistics of batch norms. For gradients see gradient_exchange.

#include <span>
#include <type_traits>
#include <vector>

#include <pufferfish/distributed/communicator.hpp>
#include <pufferfish/gpu/kernels/comm/exchange.hpp>
#include <pufferfish/gpu/runtime/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// A communicator with collectives on device memory: gpu::nccl.
template <class C, class T>
concept takes_streams = requires(C& comm, std::span<T> values, cudaStream_t stream) {
  comm.broadcast(values, 0, stream);
  comm.all_reduce_sum(values, stream);
};

/// Copies device memory to the host, calls work(span) with the copy, and copies it back to the device. Waits
/// for the device. Throws backend_error, a failure of the context, and whatever `work` throws; the device's
/// memory is unchanged after an exception from `work`.
template <class T, class Work>
void by_way_of_host(gpu_context& ctx, std::span<T> values, Work&& work) {
  std::vector<T> host(values.size());
  check(
      cudaMemcpyAsync(host.data(), values.data(), values.size_bytes(), cudaMemcpyDeviceToHost, ctx.stream()),
      "cudaMemcpyAsync from the device");
  ctx.synchronize();
  work(std::span<T>(host));
  check(
      cudaMemcpyAsync(values.data(), host.data(), values.size_bytes(), cudaMemcpyHostToDevice, ctx.stream()),
      "cudaMemcpyAsync to the device");
  ctx.synchronize();
}

}  // namespace detail

/// Copies root's elements, in the memory of its device, to the devices of all ranks. Work that is submitted
/// to the context's stream later reads the copies. gpu::nccl copies in the order of the stream; other
/// communicators copy through the host, which waits. Collective. Throws the errors of the communicator, and
/// backend_error. T: trivially copyable. `values` has the same length on all ranks. Throws value_error for a
/// root outside the group. With communicators other than gpu::nccl the call must not be captured.
///
///     gpu::broadcast(ctx, comm, net.store().values(), 0);      // all ranks have rank 0's parameters
template <class Comm, class T>
void broadcast(gpu_context& ctx, Comm& comm, std::span<T> values, int root) {
  pufferfish::detail::check_communicator<Comm>();
  pufferfish::detail::check_broadcastable<T>();
  if constexpr (detail::takes_streams<Comm, T>) {
    comm.broadcast(values, root, ctx.stream());
  } else {
    pufferfish::detail::check_root("gpu::broadcast", root, comm.size());
    if (comm.size() == 1 || values.empty()) return;
    detail::by_way_of_host(ctx, values, [&](std::span<T> host) { comm.broadcast(host, root); });
  }
}

/// Replaces each element of `values`, in device memory, by its mean over all ranks: the sum times the rounded
/// 1 / size(). T is float or double. Collective; `values` has the same length on all ranks. With gpu::nccl
/// the work is submitted to the context's stream and the call returns before it has ended; other
/// communicators copy through the host, which waits, and must not be called in a capture. With one rank
/// nothing is done. Throws the errors of the communicator and backend_error; with gpu::nccl also value_error
/// if the context is deterministic but NCCL's order of summation is not fixed (nccl::require_deterministic).
///
///     gpu::mean(ctx, comm, net.store().buffers());             // statistics of batch norms
template <class Comm, class T>
void mean(gpu_context& ctx, Comm& comm, std::span<T> values) {
  pufferfish::detail::check_communicator<Comm>();
  static_assert(std::is_floating_point_v<T>, "pufferfish: gpu::mean takes a span of float or double");
  if (comm.size() == 1 || values.empty()) return;
  if constexpr (detail::takes_streams<Comm, T>) {
    if constexpr (requires { comm.require_deterministic(ctx); }) comm.require_deterministic(ctx);
    comm.all_reduce_sum(values, ctx.stream());
    kernels::multiply(ctx.stream(), values.data(), static_cast<index_t>(values.size()),
                      T(1) / static_cast<T>(comm.size()));
  } else {
    detail::by_way_of_host(ctx, values, [&](std::span<T> host) { pufferfish::mean(comm, host); });
  }
}

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
