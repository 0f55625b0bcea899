// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Memory of a device, and pinned memory of the host that a device copies from and to while it computes.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <pufferfish/core/memory.hpp>
#include <pufferfish/gpu/error.hpp>
#include <pufferfish/gpu/kernels/elementwise.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// Memory that outlives steps: parameters, gradients, optimizer states.
class device_memory_source : public memory_source {
 public:
  void* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, bytes);
    if (status != cudaSuccess) fail(status, bytes);
    return memory;
  }
  void deallocate(void* memory, std::size_t) noexcept override { static_cast<void>(cudaFree(memory)); }

  // Streams of this library do not wait for the default stream: the device must be idle before a copy.
  void from_host(void* to, const void* from, std::size_t bytes) override {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the device");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void to_host(void* to, const void* from, std::size_t bytes) override {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy from the device");
  }
  void fill_zero(void* memory, std::size_t bytes) override {
    check(cudaMemset(memory, 0, bytes), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice), "cudaMemcpy within the device");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void round(rounded_format format, const float* from, void* to, index_t count) override {
    if (count == 0) return;
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    auto* const bits = static_cast<std::uint16_t*>(to);
    format == rounded_format::bf16 ? kernels::to_bfloat16(nullptr, from, bits, count)
                                   : kernels::to_float16(nullptr, from, bits, count);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  bool on_host() const override { return false; }

 private:
  [[noreturn]] PUFFERFISH_COLD static void fail(cudaError_t status, std::size_t bytes) {
    static_cast<void>(cudaGetLastError());
    std::size_t free = 0, total = 0;
    static_cast<void>(cudaMemGetInfo(&free, &total));
    pufferfish::detail::throw_error<backend_error>(
        {"cudaMalloc of ", bytes, " bytes, ", free, " of ", total, " free: ", cudaGetErrorString(status)});
  }
};

/// Page-locked memory of the host, which a device reads and writes without a copy in between.
class pinned_memory_source final : public memory_source {
 public:
  void* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    check(cudaMallocHost(&memory, bytes), "cudaMallocHost");
    return memory;
  }
  void deallocate(void* memory, std::size_t) noexcept override { static_cast<void>(cudaFreeHost(memory)); }
  void from_host(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void to_host(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void fill_zero(void* memory, std::size_t bytes) override { std::memset(memory, 0, bytes); }
  void copy(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void round(rounded_format format, const float* from, void* to, index_t count) override {
    pufferfish::detail::round_on_host(format, from, to, count);
  }
  bool on_host() const override { return true; }
};

}  // namespace detail

/// Memory of the current device. Copies to and from the host wait for all work of the device: for setup, not
/// for training steps. The object is never destroyed, like host_memory().
inline memory_source& device_memory() {
  static memory_source* const source = new detail::device_memory_source;
  return *source;
}

/// Pinned memory of the host. The object is never destroyed, like host_memory().
inline memory_source& pinned_memory() {
  static memory_source* const source = new detail::pinned_memory_source;
  return *source;
}

/// Memory of the current device, allocated and freed in the order of a stream's work, from the device's pool:
/// memory that one arena frees is available to the next without a wait. For tapes and scratch memory.
class stream_memory final : public detail::device_memory_source {
 public:
  /// The stream must outlive this object and all memory allocated from it. The pool keeps freed memory
  /// without limit (by default it releases freed memory at every synchronisation).
  explicit stream_memory(cudaStream_t stream) : stream_(stream) {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    cudaMemPool_t pool = nullptr;
    check(cudaDeviceGetDefaultMemPool(&pool, device), "cudaDeviceGetDefaultMemPool");
    std::uint64_t keep = ~std::uint64_t{0};
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
  }

  void* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    check(cudaMallocAsync(&memory, bytes, stream_), "cudaMallocAsync");
    return memory;
  }
  void deallocate(void* memory, std::size_t) noexcept override {
    static_cast<void>(cudaFreeAsync(memory, stream_));
  }

 private:
  cudaStream_t stream_;
};

}  // namespace gpu

template <>
struct memory_of<device::gpu> {
  static memory_source& source() { return gpu::device_memory(); }
};

PUFFERFISH_NAMESPACE_END
