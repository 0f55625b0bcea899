// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `gpu::input_place`: copies the input of steps from the host to a fixed address on a device.

#include <array>
#include <cstddef>

#include <pufferfish/gpu/runtime/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// The host writes into pinned memory. A separate stream copies from there to the device while earlier steps
/// are computed. The context's stream then copies within the device to the fixed address that steps read. The
/// pinned buffer and the first one on the device exist `ahead` (4) times, so that no thread waits while the
/// host is less than `ahead` steps ahead of the device. One thread at a time calls the functions. The
/// destructor does not wait for copies: synchronize the context before the object is destroyed.
///
///     std::byte* const at = place.write();              // may wait for the copy of four inputs ago
///     std::memcpy(at, tokens.data(), tokens.size_bytes());
///     const std::byte* on_device = place.bring(ctx, static_cast<index_t>(tokens.size_bytes()));
class input_place {
 public:
  static constexpr std::size_t ahead = 4;

  /// Allocates buffers for inputs of at most `room` bytes, rounded up to a multiple of 256: `ahead` (4)
  /// buffers in pinned memory of the host, and ahead + 1 on the current device. Throws backend_error.
  explicit input_place(index_t room)
      : room_((room + memory_step - 1) / memory_step * memory_step),
        pinned_(pinned_memory(), of_all(), uninitialized),
        come_(device_memory(), of_all(), uninitialized),
        place_(device_memory(), room_, uninitialized) {}

  /// Returns the pinned buffer to which the caller writes the input of the next bring(). Waits until the
  /// input that was last written to this buffer, `ahead` inputs ago, has been copied. Throws backend_error.
  std::byte* write() {
    taken_[turn_].synchronize();
    return pinned_.data() + at();
  }

  /// Copies the first `bytes` bytes of the buffer of the last write() to the device, in the order of the
  /// context's stream: work that is in the stream now still reads the previous input, later work reads the
  /// new one. Returns the device address, which is always the same. Does not wait; must not be captured.
  /// Throws shape_error if `bytes` is more than the size given to the constructor, and backend_error.
  const std::byte* bring(gpu_context& ctx, index_t bytes) {
    if (bytes > room_) {
      pufferfish::detail::throw_error<shape_error>({"input_place: ", bytes, " bytes for ", room_});
    }
    if (bytes > 0) {
      copy(come_.data() + at(), pinned_.data() + at(), bytes, cudaMemcpyHostToDevice, copies_.handle());
      arrived_.record(copies_.handle());
      check(cudaStreamWaitEvent(ctx.stream(), arrived_.handle(), 0), "cudaStreamWaitEvent");
      copy(place_.data(), come_.data() + at(), bytes, cudaMemcpyDeviceToDevice, ctx.stream());
      taken_[turn_].record(ctx.stream());
      turn_ = (turn_ + 1) % ahead;
    }
    return place_.data();
  }

 private:
  static constexpr index_t memory_step = 256;

  index_t of_all() const { return static_cast<index_t>(ahead) * room_; }
  index_t at() const { return static_cast<index_t>(turn_) * room_; }
  static void copy(std::byte* to, const std::byte* from, index_t bytes, cudaMemcpyKind kind,
                   cudaStream_t stream) {
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), kind, stream),
          "cudaMemcpyAsync of a step's input");
  }

  index_t room_;
  memory_block<std::byte> pinned_, come_, place_;
  stream copies_;
  event arrived_;
  std::array<event, ahead> taken_;  // reached when the buffer has been copied to place_
  std::size_t turn_ = 0;
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
