// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: copies a device's gradients to pinned memory of the host and back, on a stream of its own while
/// the backward pass computes.

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <pufferfish/distributed/communicator.hpp>
#include <pufferfish/distributed/exchange/gradient_staging.hpp>
#include <pufferfish/gpu/comm/packing.hpp>
#include <pufferfish/gpu/kernels/comm/exchange.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/nn/unwritten_gradients.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Sets gradients that layers have stopped writing to zero, in the order of the context's stream. Throws
/// backend_error.
template <class T>
void zero_unwritten(gpu_context& ctx, parameter_store<T>& store) {
  pufferfish::detail::zero_before_exchange(store, true, [&](index_t offset, index_t size) {
    check(cudaMemsetAsync(store.gradients().data() + offset, 0, static_cast<std::size_t>(size) * sizeof(T),
                          ctx.stream()),
          "cudaMemsetAsync of gradients");
  });
}

}  // namespace gpu::detail

namespace detail {

/// Functions that put work into a stream may be called while the context's stream is captured: the stream of
/// copies then takes part in the capture. Bucket b travels in this order: the context's stream writes it;
/// fetch() copies it to pinned memory on a separate stream; await() or is_fetched() tells the exchange's
/// thread; the exchange works on gradients(); write_back() copies it back in the context's stream. With
/// exchange_memory::device nothing is copied and gradients() is the arena on the device. Of packed buckets
/// only the packed elements are copied; the device gathers and scatters them.
template <class T>
class gradient_staging<T, device::gpu> {
 public:
  static constexpr bool copies = true;

  /// `buckets`: number of buckets. `memory`: `staged` copies gradients to the host, which takes pinned memory
  /// of their size; `device` leaves them on the device. `used`: whether fetch(), which starts the copy of a
  /// bucket, will be called; if not, neither events nor pinned memory are allocated. `places`: for each
  /// bucket the indices of the gradients that travel (any_compressor::pack); empty: all travel. The store
  /// must outlive the object. Throws backend_error.
  gradient_staging(parameter_store<T>& store, std::size_t buckets, exchange_memory memory, bool used,
                   const std::vector<std::vector<std::int32_t>>& places)
      : store_(&store), memory_(memory), skip_(gpu::device_memory(), 1), host_skip_(gpu::pinned_memory(), 1) {
    gpu::check(cudaGetDevice(&device_), "cudaGetDevice");
    if (!places.empty()) packed_.emplace(places);
    if (!used) return;
    for (std::size_t b = 0; b < buckets; ++b) fetched_.emplace_back(gpu::event_use::sleep);
    if (memory == exchange_memory::device) return;
    const index_t size = packed_ ? packed_->size() : store.size();
    host_ = memory_block<T>(gpu::pinned_memory(), size, uninitialized);
  }

  /// The arena in which the exchange works: pinned host memory, or the device's arena.
  std::span<T> gradients() { return memory_ == exchange_memory::device ? store_->gradients() : host_.span(); }
  /// The part of bucket b; if packed, its packed elements.
  std::span<T> gradients_of(std::size_t b, const gradient_bucket& bucket) {
    if (!packed_) return span_of(gradients(), bucket);
    return span_of(gradients(), {packed_->first(b), packed_->count(b), 0, 0});
  }

  /// A CPU context for compressors. One thread at a time uses it.
  context<device::cpu>& host(context<device::gpu>&) { return host_context_; }

  /// See gpu::detail::zero_unwritten.
  void zero_unwritten(context<device::gpu>& ctx) { gpu::detail::zero_unwritten(ctx, *store_); }

  // The copy to the host is ordered after the backward pass's work, and so after the previous step's copy to
  // the device from the same host memory.
  void fetch(context<device::gpu>& ctx, std::size_t b, const gradient_bucket& bucket, host_call then) {
    written_.record(ctx.stream());
    copies_.wait_for(written_);
    if (memory_ == exchange_memory::staged) {
      const std::span<T> to = gradients_of(b, bucket);
      const T* from = on_device(bucket).data();
      if (packed_) from = packed_->gather(b, from, copies_.handle()).data();
      copy(to.data(), from, to.size_bytes(), cudaMemcpyDeviceToHost, copies_.handle());
    }
    if (then.call != nullptr) call_in(copies_.handle(), then);
    fetched_[b].record(copies_.handle());
  }

  /// Whether bucket b has been fetched; await() waits for that, asleep. Any thread may call them.
  bool is_fetched(std::size_t b) const { return fetched_[b].reached(); }
  void await(std::size_t b) const { fetched_[b].synchronize(); }

  /// Copies a bucket back in the order of the context's stream. With exchange_memory::device, multiplies it
  /// in place by `factor` (1 / ranks) instead, because the sum was made on the device; else `factor` is
  /// unused.
  void write_back(context<device::gpu>& ctx, std::size_t b, const gradient_bucket& bucket, T factor) {
    const std::span<T> to = on_device(bucket), from = gradients_of(b, bucket);
    if (memory_ == exchange_memory::device) {
      return gpu::kernels::multiply(ctx.stream(), to.data(), bucket.size, factor);
    }
    T* const copied = packed_ ? packed_->values(b).data() : to.data();
    copy(copied, from.data(), from.size_bytes(), cudaMemcpyHostToDevice, ctx.stream());
    if (packed_) packed_->scatter(b, to, ctx.stream());
  }
  /// Sets all elements of a packed bucket that are not packed to zero, without the host.
  void clear_others(context<device::gpu>& ctx, std::size_t b, const gradient_bucket& bucket) {
    const std::span<T> gradients = on_device(bucket);
    packed_->gather(b, gradients.data(), ctx.stream());
    packed_->scatter(b, gradients, ctx.stream());
  }

  // MPI uses the device that is current, which in a new thread is the first one.
  void enter_thread() {
    if (memory_ == exchange_memory::device) gpu::check(cudaSetDevice(device_), "cudaSetDevice");
  }

  /// Flag on the device; not 0: the step is skipped.
  const int* skip() const { return skip_.data(); }
  /// Writes the flag of skip() in the order of the context's stream: 0 if the step is usable.
  void publish(context<device::gpu>& ctx, bool usable) {
    gpu::check(cudaMemsetAsync(skip_.data(), usable ? 0 : 1, sizeof(int), ctx.stream()), "cudaMemsetAsync");
  }
  /// In replayed steps: submits the copy of the host's flag, which set_usable writes, to the device's flag
  /// skip(). set_usable must be called before the stream executes the copy.
  void publish_replayed(context<device::gpu>& ctx) {
    gpu::check(
        cudaMemcpyAsync(skip_.data(), host_skip_.data(), sizeof(int), cudaMemcpyHostToDevice, ctx.stream()),
        "cudaMemcpyAsync of a flag to the device");
  }
  void set_usable(bool usable) { *host_skip_.data() = usable ? 0 : 1; }

  // For steps that are captured -----------------------------------------------------------------------------

  bool is_captured(const context<device::gpu>& ctx) const { return gpu::is_captured(ctx.stream()); }

  /// Makes the context's stream wait for all buckets that have been fetched.
  void join(context<device::gpu>& ctx) {
    all_fetched_.record(copies_.handle());
    gpu::check(cudaStreamWaitEvent(ctx.stream(), all_fetched_.handle(), 0), "cudaStreamWaitEvent");
  }
  /// Calls `what` when the context's stream reaches this point. The function must not call CUDA.
  void call(context<device::gpu>& ctx, host_call what) { call_in(ctx.stream(), what); }

  // No needless write: a replay of another graph may be calling leave_failure in another thread.
  void leave_failures_to(const context<device::gpu>& ctx) {
    if (failures_ != ctx.failures()) failures_ = ctx.failures();
  }
  void leave_failure(const std::exception_ptr& failure) { failures_->post(failure); }

  /// Never frees the host's copy: messages may still arrive in it.
  void keep_host_memory() { keep_for_good(std::make_shared<memory_block<T>>(std::move(host_))); }

  /// Waits for all work of the device.
  void drain() noexcept { static_cast<void>(cudaDeviceSynchronize()); }

 private:
  std::span<T> on_device(const gradient_bucket& bucket) { return span_of(store_->gradients(), bucket); }
  static void copy(T* to, const T* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    if (bytes > 0) gpu::check(cudaMemcpyAsync(to, from, bytes, kind, stream), "cudaMemcpyAsync of gradients");
  }
  static void call_in(cudaStream_t stream, host_call what) {
    gpu::check(cudaLaunchHostFunc(stream, what.call, what.object), "cudaLaunchHostFunc");
  }

  parameter_store<T>* store_;
  exchange_memory memory_;
  int device_ = 0;
  context<device::cpu> host_context_;
  std::vector<gpu::event> fetched_;  // one per bucket
  std::optional<gpu::detail::packed_buckets<T>> packed_;
  memory_block<T> host_;
  memory_block<int> skip_, host_skip_;
  gpu::stream copies_;
  gpu::event written_, all_fetched_;
  std::shared_ptr<gpu::late_failure> failures_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
