// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Memory of a device, and pinned memory of the host that a device copies from and to while it computes.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <pufferfish/core/memory.hpp>
#include <pufferfish/gpu/kernels/elementwise/elementwise.hpp>
#include <pufferfish/gpu/runtime/error.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// Source of memory that outlives steps: parameters, gradients, optimizer states. All copies are synchronous:
/// the functions wait for all work of the current device before the copy, and return when it is done. They
/// must not be called while a stream is captured. Every function throws backend_error if CUDA fails. The
/// message of allocate() names the requested, the free and the total number of bytes on the device.
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
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
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

/// Page-locked memory of the host, which a device reads and writes without a copy in between. The copies are
/// plain copies of the host. They do not wait for work of a device that reads or writes the memory.
/// allocate() throws backend_error.
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

/// Returns the source of memory of the current device. All copies, and fill_zero(), wait for all work of the
/// device: they are for setup, not for training steps. The object is never destroyed, like host_memory(). A
/// block belongs to the device that was current in the thread when it was allocated (gpu::use_device).
/// allocate() and all copies throw backend_error; the message of allocate() names the requested, the free and
/// the total number of bytes. The functions must not be called while a stream is captured. Any thread may use
/// the source.
///
///     memory_block<float> x(gpu::device_memory(), 1024);      // zeros, on the current device
///     x.from_host(std::vector<float>(1024, 1.0F));            // waits for the device
inline memory_source& device_memory() {
  static memory_source* const source = new detail::device_memory_source;
  return *source;
}

/// Returns the source of pinned memory of the host. The object is never destroyed, like host_memory(). A copy
/// by cudaMemcpyAsync between such memory and a device can run while the host and the device compute. The
/// copies of this source itself are plain copies of the host: a caller that reads data that a device has
/// written must wait for the device first. allocate() throws backend_error.
inline memory_source& pinned_memory() {
  static memory_source* const source = new detail::pinned_memory_source;
  return *source;
}

/// Source of memory of the current device, allocated and freed in the order of a stream's work, from the
/// device's pool: memory that one arena frees is available to the next without a wait. For tapes and scratch
/// memory. Work of other streams may use a block only after the stream has executed the allocation. Copies
/// and fill_zero() wait for the device, like those of device_memory(): in training steps, blocks are
/// allocated without initialization, and zeroed by work in the stream.
class stream_memory final : public detail::device_memory_source {
 public:
  /// Allocates in the order of `stream`, which must outlive this object and all memory allocated from it. The
  /// pool keeps freed memory without limit (by default it releases freed memory at every synchronisation).
  /// The device of the stream must be current. Changes the release threshold of the device's default memory
  /// pool for the whole process. Throws backend_error.
  explicit stream_memory(cudaStream_t stream) : stream_(stream) {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    cudaMemPool_t pool = nullptr;
    check(cudaDeviceGetDefaultMemPool(&pool, device), "cudaDeviceGetDefaultMemPool");
    std::uint64_t keep = ~std::uint64_t{0};
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
  }

  /// Allocates memory that later work of the stream may use. Does not wait. Throws backend_error.
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

/// Networks and stores on device::gpu allocate their arenas from device_memory().
template <>
struct memory_of<device::gpu> {
  static memory_source& source() { return gpu::device_memory(); }
};

PUFFERFISH_NAMESPACE_END
