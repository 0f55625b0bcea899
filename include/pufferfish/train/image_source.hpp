// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `image_source`: where the labelled images of a training run come from. `images_in_memory` serves an
/// image_set; adapters/jpeg.hpp serves folders of JPEG files; a program may derive its own.

#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/hash.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/io/image_set.hpp>
#include <pufferfish/train/device_parts.hpp>
#include <pufferfish/train/loader.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Serves the batches of an image_source to one rank. Used by one thread at a time.
template <class T, class Device = device::cpu>
class image_batches {
 public:
  virtual ~image_batches() = default;

  /// Number of global batches in an epoch, the last, smaller one included.
  virtual index_t steps_per_epoch() const = 0;
  /// The largest number of samples that any rank gets in a step.
  virtual index_t max_local_batch() const = 0;
  /// Fills rows 0 .. count - 1 of `images` (N x height x width x channels, dense, in the memory of Device)
  /// and of `labels` with this rank's part of a global batch, in the order of the context's work. The parts
  /// of all ranks together must not depend on the number of ranks. Equal arguments give equal batches.
  virtual batch_place load(context<Device>& ctx, index_t epoch, index_t step, const tensor_view<T, 4>& images,
                           std::span<std::int32_t> labels) = 0;
};

/// A set of labelled images, from which batches of images of one size are served.
/// \code
///   auto train = std::make_shared<images_in_memory<float>>(train_set);
///   auto test = std::make_shared<images_in_memory<float>>(test_set);
///   procedure<float, mpi::communicator> run(std::move(net), comm, train, test, options);
/// \endcode
template <class T, class Device = device::cpu>
class image_source {
 public:
  virtual ~image_source() = default;

  /// Number, height, width and channels of the images as they are served.
  virtual extents<4> images() const = 0;
  /// Number of classes.
  virtual index_t classes() const = 0;
  /// The class of each sample, in 0 .. classes() - 1.
  virtual std::span<const std::int32_t> labels() const = 0;
  /// Mean and deviation of each channel, by which batches are normalized if this is the training set.
  virtual normalization normalize() const = 0;
  /// Copies of the samples with these numbers, in this order, without augmentation.
  virtual image_set chosen(const std::vector<index_t>& samples) const = 0;
  /// A line that distinguishes this set from others; a checkpoint resumes only with sets of the same lines.
  virtual std::string describe() const = 0;
  /// Makes the batches of one rank. Throws value_error for options that cannot be met. The source must
  /// outlive the result.
  virtual std::unique_ptr<image_batches<T, Device>> batches(loader_options options) const = 0;
};

/// The images of an image_set. A named set is used in place: it must outlive the object unchanged. A
/// temporary one is moved into the object.
/// describe() hashes all pixels. batches() copies the set to the device; each call makes a new copy.
template <class T, class Device = device::cpu>
class images_in_memory final : public image_source<T, Device> {
 public:
  /// Throws value_error for an empty set and for labels out of range, shape_error for numbers of pixels or
  /// labels that do not fit.
  explicit images_in_memory(const image_set& set)
      : images_in_memory(std::shared_ptr<const image_set>(std::shared_ptr<void>(), &set)) {}
  /// Takes over the set. Throws the errors of the other constructor.
  explicit images_in_memory(image_set&& set)
      : images_in_memory(std::make_shared<const image_set>(std::move(set))) {}

  extents<4> images() const override { return {set_->count, set_->height, set_->width, set_->channels}; }
  index_t classes() const override { return set_->classes; }
  std::span<const std::int32_t> labels() const override { return set_->labels; }
  normalization normalize() const override { return measure_normalization(*set_); }

  /// Copies the given samples, in this order.
  image_set chosen(const std::vector<index_t>& samples) const override {
    image_set some{static_cast<index_t>(samples.size()),
                   set_->height,
                   set_->width,
                   set_->channels,
                   set_->classes,
                   {},
                   {}};
    const index_t size = set_->height * set_->width * set_->channels;
    for (const index_t sample : samples) {
      const auto first = set_->pixels.begin() + sample * size;
      some.pixels.insert(some.pixels.end(), first, first + size);
      some.labels.push_back(set_->labels[static_cast<std::size_t>(sample)]);
    }
    return some;
  }

  /// Number, extents and classes of the images, with a digest of pixels and labels.
  std::string describe() const override {
    const std::uint64_t content = hasher()
                                      .values(std::span<const std::uint8_t>(set_->pixels))
                                      .values(std::span<const std::int32_t>(set_->labels))
                                      .digest();
    return detail::message({set_->count, " images of ", extents<3>{set_->height, set_->width, set_->channels},
                            ", ", set_->classes, " classes, digest ", detail::hexadecimal(content)});
  }

  std::unique_ptr<image_batches<T, Device>> batches(loader_options options) const override {
    return std::make_unique<served>(*set_, std::move(options));
  }

 private:
  explicit images_in_memory(std::shared_ptr<const image_set> set) : set_(std::move(set)) {
    detail::check_image_set(*set_, "images_in_memory");
  }

  // The batches of a loader, as image_batches.
  class served final : public image_batches<T, Device> {
   public:
    served(const image_set& set, loader_options options) : loader_(set, std::move(options)) {}
    index_t steps_per_epoch() const override { return loader_.steps_per_epoch(); }
    index_t max_local_batch() const override { return loader_.max_local_batch(); }
    batch_place load(context<Device>& ctx, index_t epoch, index_t step, const tensor_view<T, 4>& images,
                     std::span<std::int32_t> labels) override {
      return loader_.load(ctx, epoch, step, images, labels);
    }

   private:
    typename detail::device_parts<Device>::image_source loader_;
  };

  std::shared_ptr<const image_set> set_;  // owns nothing if the set is the caller's
};

namespace detail {

/// An image_set as an argument that may be named or temporary (images_in_memory).
template <class Set>
concept image_set_argument = std::derived_from<std::remove_cvref_t<Set>, image_set>;

}  // namespace detail

PUFFERFISH_NAMESPACE_END
