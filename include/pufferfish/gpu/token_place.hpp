// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `gpu::token_place`: integers on their way from the host to one place of a device.

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include <pufferfish/gpu/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// By way of two pieces of pinned memory: the host writes into one while the device still has to read the
/// other.
class token_place {
 public:
  /// For up to so many. Throws backend_error.
  explicit token_place(index_t room)
      : room_(room),
        pinned_(pinned_memory(), 2 * room, uninitialized),
        place_(device_memory(), room, uninitialized) {}

  /// Copies them, in the order of the context's stream; the host's may change when it returns. Not to be
  /// captured. Waits for the copy of two calls before. Throws shape_error if there is no room.
  std::span<const std::int32_t> bring(gpu_context& ctx, std::span<const std::int32_t> tokens) {
    const auto count = static_cast<index_t>(tokens.size());
    if (count > room_) {
      pufferfish::detail::throw_error<shape_error>({"token_place: ", count, " tokens for ", room_});
    }
    if (count == 0) return {};
    event& read = read_[turn_];
    read.synchronize();
    std::int32_t* const here = pinned_.data() + static_cast<index_t>(turn_) * room_;
    std::copy(tokens.begin(), tokens.end(), here);
    check(cudaMemcpyAsync(place_.data(), here, tokens.size_bytes(), cudaMemcpyHostToDevice, ctx.stream()),
          "cudaMemcpyAsync of tokens to the device");
    read.record(ctx.stream());
    turn_ = 1 - turn_;
    return {place_.data(), tokens.size()};
  }

 private:
  index_t room_;
  memory_block<std::int32_t> pinned_, place_;
  std::array<event, 2> read_;
  std::size_t turn_ = 0;
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
