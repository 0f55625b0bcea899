// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gpu::stream` and `gpu::event`: a queue of work on a device, and a point in one, each with an owner.

#include <cstddef>
#include <utility>

#include <pufferfish/gpu/error.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// What an event is for, besides order.
enum class event_use : unsigned {
  order = cudaEventDisableTiming,                          ///< nothing: cheapest
  timing = cudaEventDefault,                               ///< seconds_since
  sleep = cudaEventDisableTiming | cudaEventBlockingSync,  ///< synchronize leaves the core to others
};

/// A point in a stream's work.
class event {
 public:
  /// Throws backend_error.
  explicit event(event_use use = event_use::order) {
    check(cudaEventCreateWithFlags(&handle_, static_cast<unsigned>(use)), "cudaEventCreateWithFlags");
  }
  event(event&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  event& operator=(event&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  event(const event&) = delete;
  event& operator=(const event&) = delete;
  ~event() {
    if (handle_ != nullptr) static_cast<void>(cudaEventDestroy(handle_));
  }

  cudaEvent_t handle() const { return handle_; }

  /// Puts the point behind all work that is in the stream now.
  void record(cudaStream_t stream) { check(cudaEventRecord(handle_, stream), "cudaEventRecord"); }

  /// Waits until the point is reached. Throws backend_error for whatever failed before it.
  void synchronize() const { check(cudaEventSynchronize(handle_), "cudaEventSynchronize"); }

  /// Whether the point has been reached.
  bool reached() const {
    const cudaError_t status = cudaEventQuery(handle_);
    if (status == cudaErrorNotReady) return false;
    check(status, "cudaEventQuery");
    return true;
  }

  /// Seconds from another point to this; both with timing, both reached.
  double seconds_since(const event& start) const {
    float milliseconds = 0.0F;
    check(cudaEventElapsedTime(&milliseconds, start.handle_, handle_), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  cudaEvent_t handle_ = nullptr;
};

/// A queue of work of the device that is current when it is made. It does not wait for the legacy default
/// stream, nor that for it.
class stream {
 public:
  /// Throws backend_error.
  stream() { check(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  /// One whose kernels go before those of others that wait for a place on the device.
  static stream urgent() {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    stream result{nullptr};
    check(cudaStreamCreateWithPriority(&result.handle_, cudaStreamNonBlocking, greatest),
          "cudaStreamCreateWithPriority");
    return result;
  }
  stream(stream&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  stream& operator=(stream&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;
  ~stream() {
    if (handle_ != nullptr) static_cast<void>(cudaStreamDestroy(handle_));
  }

  cudaStream_t handle() const { return handle_; }

  /// Waits for all work in it. Throws backend_error for whatever of it failed.
  void synchronize() const { check(cudaStreamSynchronize(handle_), "cudaStreamSynchronize"); }

  /// Work that comes from now on starts when the point is reached.
  void wait_for(const event& point) const {
    check(cudaStreamWaitEvent(handle_, point.handle(), 0), "cudaStreamWaitEvent");
  }

 private:
  explicit stream(std::nullptr_t) {}
  cudaStream_t handle_ = nullptr;
};

/// Whether what is put into a stream is captured into a graph.
inline bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
