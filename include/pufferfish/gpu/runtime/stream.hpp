// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gpu::stream` and `gpu::event`: owners of a CUDA stream (a queue of work) and event (a point in it).

#include <cstddef>
#include <utility>

#include <pufferfish/gpu/runtime/error.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// What an event is used for besides the order of work. seconds_since requires `timing`.
enum class event_use : unsigned {
  order = cudaEventDisableTiming,                          ///< order only: cheapest
  timing = cudaEventDefault,                               ///< for seconds_since
  sleep = cudaEventDisableTiming | cudaEventBlockingSync,  ///< synchronize sleeps instead of spinning
};

/// A point in a stream's work. An event that was never recorded counts as reached. Recording it again moves
/// the point. A moved-from event may only be destroyed or assigned to. Every function throws backend_error if
/// CUDA fails.
///
///     gpu::event start(gpu::event_use::timing), stop(gpu::event_use::timing);
///     start.record(ctx.stream());
///     ... work ...
///     stop.record(ctx.stream());
///     stop.synchronize();
///     const double seconds = stop.seconds_since(start);
class event {
 public:
  /// Creates an event on the device that is current now; it can be recorded in streams of this device. Throws
  /// backend_error.
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

  /// CUDA's handle. This object owns it.
  cudaEvent_t handle() const { return handle_; }

  /// Sets the point after all work that is in the stream now.
  void record(cudaStream_t stream) { check(cudaEventRecord(handle_, stream), "cudaEventRecord"); }

  /// Waits until the point is reached. Throws backend_error if work before it has failed.
  void synchronize() const { check(cudaEventSynchronize(handle_), "cudaEventSynchronize"); }

  /// Whether the point has been reached. Does not wait. Throws backend_error if work before the point has
  /// failed.
  bool reached() const {
    const cudaError_t status = cudaEventQuery(handle_);
    if (status == cudaErrorNotReady) return false;
    check(status, "cudaEventQuery");
    return true;
  }

  /// Seconds from the point `start` to this one. Both need event_use::timing and must have been reached. Both
  /// events are of one device. Throws backend_error otherwise, or if one of them has no timing or has not
  /// been reached.
  double seconds_since(const event& start) const {
    float milliseconds = 0.0F;
    check(cudaEventElapsedTime(&milliseconds, start.handle_, handle_), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  cudaEvent_t handle_ = nullptr;
};

/// A queue of work of the device that is current at construction. It does not synchronize with the legacy
/// default stream. Its work runs in the order in which it was put into the stream, at the same time as work
/// of other streams. The destructor does not wait: CUDA frees the stream when its work is done. A moved-from
/// stream may only be destroyed or assigned to.
///
///     gpu::stream computes, copies;
///     gpu::event written;
///     written.record(computes.handle());     // after everything that is in `computes` now
///     copies.wait_for(written);              // later work in `copies` starts after that point
class stream {
 public:
  /// Creates a stream of normal priority on the current device. Throws backend_error.
  stream() { check(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  /// Creates a stream of highest priority: its kernels start before waiting kernels of other streams. Throws
  /// backend_error.
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

  /// CUDA's handle. This object owns it.
  cudaStream_t handle() const { return handle_; }

  /// Waits for all work in the stream. Throws backend_error if any of it has failed.
  void synchronize() const { check(cudaStreamSynchronize(handle_), "cudaStreamSynchronize"); }

  /// Work that is put into the stream from now on starts when the point is reached. The host does not wait. A
  /// later record() of the event has no effect on this call. Throws backend_error.
  void wait_for(const event& point) const {
    check(cudaStreamWaitEvent(handle_, point.handle(), 0), "cudaStreamWaitEvent");
  }

 private:
  explicit stream(std::nullptr_t) {}
  cudaStream_t handle_ = nullptr;
};

/// Whether work that is put into a stream is captured into a graph. Also true if the capture has become
/// invalid. Throws backend_error.
inline bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
