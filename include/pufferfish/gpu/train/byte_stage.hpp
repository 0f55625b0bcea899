// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `gpu::byte_stage`: copies batches of 8-bit images from the host to a device and converts their
/// pixels to numbers there.

#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include <pufferfish/gpu/kernels/train/augment.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/gpu/train/input_place.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// Device version of device_parts<device::cpu>::byte_stage. Pixels are copied to the device as bytes, through
/// an input_place for one batch.
class byte_stage {
 public:
  /// Allocates memory for batches of at most the shape `images` (NHWC). table[256 c + v] is the number for
  /// value v of channel c. Throws backend_error.
  byte_stage(const extents<4>& images, const std::vector<float>& table)
      : images_(images),
        labels_bytes_((images[0] * 4 + 15) / 16 * 16),
        place_(labels_bytes_ + volume<4>(images)),
        table_(device_memory(), static_cast<index_t>(table.size()), uninitialized),
        order_(device_memory(), images[0], uninitialized) {
    table_.from_host(table);
    std::vector<std::uint32_t> order(static_cast<std::size_t>(images[0]));
    std::iota(order.begin(), order.end(), 0U);
    order_.from_host(order);
  }

  /// Converts `count` images. `pixels` and `labels` are on the host, the results in device memory, written in
  /// the context's stream. Must not be captured into a graph. Throws backend_error.
  template <class T>
  void bring(gpu_context& ctx, index_t count, const std::uint8_t* pixels, const std::int32_t* labels,
             T* images, std::int32_t* labels_out) {
    if (count == 0) return;
    const index_t bytes = count * images_[1] * images_[2] * images_[3];
    std::byte* const to = place_.write();
    std::memcpy(to, labels, static_cast<std::size_t>(4 * count));
    std::memcpy(to + labels_bytes_, pixels, static_cast<std::size_t>(bytes));
    const std::byte* const there = place_.bring(ctx, labels_bytes_ + bytes);
    const kernels::image_source source{reinterpret_cast<const std::uint8_t*>(there + labels_bytes_),
                                       reinterpret_cast<const std::int32_t*>(there),
                                       table_.data(),
                                       images_[1],
                                       images_[2],
                                       images_[3],
                                       0,
                                       false,
                                       false};
    kernels::augment_images<T>(ctx.stream(), source, order_.data(), count, 0, 0, images, labels_out);
  }

 private:
  extents<4> images_;
  index_t labels_bytes_;
  input_place place_;
  memory_block<float> table_;
  memory_block<std::uint32_t> order_;
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
