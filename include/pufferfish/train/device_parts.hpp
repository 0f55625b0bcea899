// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: types and functions of training runs that differ between devices. This header has those of the
/// CPU; <pufferfish/gpu.hpp> has those of the GPU.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/memory.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/train/loader.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Types and functions of training runs on Device. There are specializations for device::cpu and, in
/// <pufferfish/gpu.hpp>, for device::gpu.
template <class Device>
struct device_parts {
  static_assert(!std::is_same_v<Device, device::gpu>,
                "pufferfish: training on device::gpu is defined by <pufferfish/gpu.hpp>: include that header "
                "in this file (it needs the CUDA Toolkit, not nvcc)");
};

template <>
struct device_parts<device::cpu> {
  /// Options of the run's context.
  using machine_options = context_options;

  /// Loads batches of images into the device's memory.
  using image_source = loader;

  /// Stages a batch for the next step. On the CPU the batch is used in place, so nothing is copied.
  class input_place {
   public:
    /// Allocates `room` bytes.
    explicit input_place(index_t room) : place_(memory_of<device::cpu>::source(), room, uninitialized) {}
    /// Address to which the caller writes the input of the next bring().
    std::byte* write() { return place_.data(); }
    /// Makes this number of bytes available to a step. Returns their address, valid until the next write().
    const std::byte* bring(context<device::cpu>&, index_t) { return place_.data(); }

   private:
    memory_block<std::byte> place_;
  };

  /// Converts a batch of 8-bit images to numbers: value v of channel c becomes table[256 c + v].
  class byte_stage {
   public:
    /// `images`: shape of the largest batch, NHWC.
    byte_stage(const extents<4>& images, std::vector<float> table)
        : channels_(images[3]), image_(images[1] * images[2] * images[3]), table_(std::move(table)) {}

    /// Converts `count` images to numbers (see the class) and copies `count` labels. pixels, images: NHWC,
    /// dense. The outputs `images` and `labels_out` must not overlap the inputs.
    template <class T>
    void bring(context<device::cpu>&, index_t count, const std::uint8_t* pixels, const std::int32_t* labels,
               T* images, std::int32_t* labels_out) const {
      for (index_t i = 0; i < count * image_; i += channels_) {
        for (index_t c = 0; c < channels_; ++c) {
          images[i + c] = static_cast<T>(table_[static_cast<std::size_t>(256 * c + pixels[i + c])]);
        }
      }
      std::copy_n(labels, count, labels_out);
    }

   private:
    index_t channels_, image_;
    std::vector<float> table_;
  };

  /// Number of rows that a step computes for `tokens` tokens: at least `tokens`, on the CPU exactly `tokens`.
  static index_t rows_of_tokens(index_t tokens) { return tokens; }

  /// Throws state_error if parameters are on another device than the run; never on the CPU.
  static void check_place(const context<device::cpu>&, const void*) {}

  /// Number of threads for work on the host between steps.
  static int host_threads(const context<device::cpu>& ctx) { return ctx.threads(); }

  /// Factorizes a network with the run's threads; see pufferfish::factorize for the other arguments and the
  /// errors.
  template <class Root>
  static factorization factorize(model<Root>& net, factorize_policy policy, context<device::cpu>& ctx,
                                 const network_statistics* statistics) {
    policy.threads = ctx.threads();
    return pufferfish::factorize(net, policy, statistics);
  }
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
