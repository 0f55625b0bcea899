// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: a device's gradients on their way through the host: pinned memory, and a stream of its own that
/// copies while the backward pass computes.

#include <cstddef>
#include <span>
#include <vector>

#include <pufferfish/dist/gradient_staging.hpp>
#include <pufferfish/gpu/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

template <class T>
class gradient_staging<T, device::gpu> {
 public:
  gradient_staging(parameter_store<T>& store, std::size_t buckets)
      : store_(&store),
        come_(buckets),
        host_(gpu::pinned_memory(), static_cast<index_t>(store.gradients().size()), uninitialized) {}

  std::span<T> gradients() { return host_.span(); }

  void fetch(context<device::gpu>& ctx, std::size_t b, const gradient_bucket& bucket) {
    written_.record(ctx.stream());
    copies_.wait_for(written_);
    gpu::check(cudaMemcpyAsync(host_.data() + bucket.offset, store_->gradients().data() + bucket.offset,
                               bytes(bucket), cudaMemcpyDeviceToHost, copies_.handle()),
               "cudaMemcpyAsync of gradients to the host");
    come_[b].record(copies_.handle());
  }

  bool has_come(std::size_t b) const { return come_[b].reached(); }
  void await(std::size_t b) const { come_[b].synchronize(); }

  void send(context<device::gpu>& ctx, const gradient_bucket& bucket) {
    gpu::check(cudaMemcpyAsync(store_->gradients().data() + bucket.offset, host_.data() + bucket.offset,
                               bytes(bucket), cudaMemcpyHostToDevice, ctx.stream()),
               "cudaMemcpyAsync of gradients to the device");
  }

 private:
  static std::size_t bytes(const gradient_bucket& bucket) {
    return static_cast<std::size_t>(bucket.size) * sizeof(T);
  }

  parameter_store<T>* store_;
  std::vector<gpu::event> come_;  // of each bucket
  memory_block<T> host_;
  gpu::stream copies_;
  gpu::event written_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
