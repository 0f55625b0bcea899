// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gpu::image_loader`: batches of normalised, augmented images from an image set that is stored on a
/// device.

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/gpu/kernels/train/augment.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/train/loader.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// Device version of pufferfish::loader, with the same batches. Pixels and labels are copied to the device
/// once, the order of samples once per epoch. The set must outlive the loader. The set on the device has
/// count height width channels bytes of pixels, and 8 bytes per sample for labels and order. It is on the
/// device that is current at construction. One thread at a time uses a loader.
///
///     gpu::image_loader loader(set, options);
///     const batch_place part = loader.load(ctx, epoch, step, images, labels);   // views of device memory
///     // rows 0 .. part.count - 1 of images and labels are those of this rank
class image_loader {
 public:
  /// Copies pixels and labels of the set to the current device, and waits for the copies. The loader keeps a
  /// reference to `set`, which must outlive it unchanged. Throws backend_error, and value_error or
  /// shape_error for sets and options that the constructor of pufferfish::loader rejects.
  image_loader(const image_set& set, loader_options options)
      : host_(set, std::move(options)),
        pixels_(device_memory(), static_cast<index_t>(set.pixels.size()), uninitialized),
        labels_(device_memory(), static_cast<index_t>(set.labels.size()), uninitialized),
        table_(device_memory(), static_cast<index_t>(host_.table().size()), uninitialized),
        order_(device_memory(), set.count, uninitialized) {
    pixels_.from_host(set.pixels);
    labels_.from_host(set.labels);
    table_.from_host(host_.table());
  }
  image_loader(image_set&&, loader_options) = delete;

  /// The set that the constructor received, on the host.
  const image_set& set() const { return host_.set(); }
  /// The options that the constructor received.
  const loader_options& options() const { return host_.options(); }
  /// Number of steps of an epoch.
  index_t steps_per_epoch() const { return host_.steps_per_epoch(); }
  /// Largest number of samples that load() writes on this rank.
  index_t max_local_batch() const { return host_.max_local_batch(); }
  /// The samples of this rank in a step's global batch. Throws value_error for an epoch or step that does not
  /// exist.
  batch_place place(index_t epoch, index_t step) const { return host_.place(epoch, step); }

  /// Fills rows 0 .. count - 1 of `images` (N x height x width x channels, dense, N >= count) and of `labels`
  /// with this rank's part of a global batch, and returns that part; `count` is a member of the result. Later
  /// rows are unchanged. Both views are in device memory; a kernel in the context's stream writes them. The
  /// first call of an epoch waits for the device. Must not be captured into a graph, because the batch is an
  /// argument of the kernel. Throws backend_error, and the errors of pufferfish::loader::load.
  template <class T>
  batch_place load(gpu_context& ctx, index_t epoch, index_t step, const tensor_view<T, 4>& images,
                   std::span<std::int32_t> labels) {
    const batch_place part = host_.place_for(epoch, step, images.shape(), labels.size());
    if (part.count == 0) return part;
    upload_order(epoch);
    const random_stream random = host_.augmentation_stream(epoch);
    const augmentation& augment = options().augment;
    const kernels::image_source source{pixels_.data(),   labels_.data(),  table_.data(),
                                       set().height,     set().width,     set().channels,
                                       augment.pad_crop, augment.reflect, augment.flip};
    kernels::augment_images<T>(ctx.stream(), source, order_.data() + step * options().batch + part.first,
                               part.count, random.seed(), random.stream(), images.flat().data(),
                               labels.data());
    return part;
  }

 private:
  // Copies the order of an epoch's samples to the device. The copy is synchronous: it waits for kernels that
  // still read the order of the previous epoch.
  void upload_order(index_t epoch) {
    if (epoch == order_epoch_ || (!options().shuffle && order_epoch_ >= 0)) return;
    std::vector<std::uint32_t> order;
    for (index_t i = 0; i < set().count; ++i) {
      order.push_back(static_cast<std::uint32_t>(host_.sample_at(epoch, i)));
    }
    order_.from_host(order);
    order_epoch_ = epoch;
  }

  loader host_;
  memory_block<std::uint8_t> pixels_;
  memory_block<std::int32_t> labels_;
  memory_block<float> table_;
  memory_block<std::uint32_t> order_;
  index_t order_epoch_ = -1;
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
