// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `folder_images`: folders of JPEG files as the images of a training run.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <pufferfish/adapters/jpeg/batch_threads.hpp>
#include <pufferfish/adapters/jpeg/decoder.hpp>
#include <pufferfish/io/file.hpp>
#include <pufferfish/io/image_folder.hpp>
#include <pufferfish/train/image_source.hpp>
#include <pufferfish/train/resized_crop.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Mean and deviation of the channels of ImageNet's images, times 255.
/// Source: the values that its published networks are trained with (torchvision's models).
inline normalization imagenet_normalization() {
  return {{0.485F * 255.0F, 0.456F * 255.0F, 0.406F * 255.0F},
          {0.229F * 255.0F, 0.224F * 255.0F, 0.225F * 255.0F}};
}

/// How files become images of one size.
struct folder_options {
  index_t size = 224;    ///< height and width of the images of a batch
  index_t resize = 256;  ///< of an image that is not cut at random: shorter side before its middle is cut out
  int threads = 0;       ///< that read and decode; 0: as many as the machine runs at once
  normalization normalize =
      imagenet_normalization();  ///< mean and deviation of each channel, in units of 0 .. 255
};

namespace detail {

/// Reads, decodes, cuts and scales one file at a time, with memory that is used again for the next file. Each
/// thread has its own.
class window_reader {
 public:
  /// Writes the window of an image, scaled to size x size x 3 values, to `to`. choose(height, width) returns
  /// the window in pixels of the file. The file is decoded at the smallest scale at which the window still
  /// has that size, and the window is scaled accordingly. Throws io_error for a file that cannot be read or
  /// decoded.
  template <class Choose>
  void read(const std::string& path, index_t size, Choose&& choose, std::uint8_t* to) {
    const std::vector<std::uint8_t> bytes = read_file(path);
    const extents<2> whole = decoder_.size_of(bytes, path);
    image_window window = choose(whole[0], whole[1]);
    decoder_.decode(bytes, path, jpeg_decoder::scale_for(window.height, window.width, size), image_);
    const double rows = static_cast<double>(image_.height) / static_cast<double>(whole[0]);
    const double columns = static_cast<double>(image_.width) / static_cast<double>(whole[1]);
    window = {window.top * rows, window.left * columns, window.height * rows, window.width * columns,
              window.flipped};
    scaler_.run(image_.pixels, image_.height, image_.width, window, size, size, to);
  }

 private:
  jpeg_decoder decoder_;
  rgb_image image_;
  window_scaler scaler_;
};

/// The batches of folder_images for one rank. While a batch is used, threads prepare the next one.
template <class T, class Device>
class folder_batches final : public image_batches<T, Device> {
 public:
  /// `folder` must outlive the object. Throws value_error for a smallest_area outside of (0, 1] and for the
  /// augmentations pad_crop and reflect, which need images of one size.
  folder_batches(const image_folder& folder, const folder_options& how, loader_options options)
      : folder_(&folder),
        how_(how),
        plan_({static_cast<index_t>(folder.files.size()), how.size, how.size, 3}, std::move(options)),
        stage_({plan_.max_local_batch(), how.size, how.size, 3}, plan_.normalized_values()),
        readers_(number_of_threads(how)),
        threads_(readers_.size()) {
    const augmentation& augment = plan_.options().augment;
    if (!(augment.smallest_area > 0.0 && augment.smallest_area <= 1.0)) {
      throw_error<value_error>(
          {"folder_images: smallest_area is ", shortest_number(augment.smallest_area), ", not in (0, 1]"});
    }
    if (augment.pad_crop != 0 || augment.reflect) {
      throw_error<value_error>(
          {"folder_images: images of different sizes are cut by smallest_area, not by "
           "pad_crop ",
           augment.pad_crop, augment.reflect ? ", reflected" : ""});
    }
  }

  index_t steps_per_epoch() const override { return plan_.steps_per_epoch(); }
  index_t max_local_batch() const override { return plan_.max_local_batch(); }

  /// Fills images and labels with this rank's part of a batch, and begins the next batch. A batch that was
  /// not prepared, because the caller skipped steps, is read now. Throws io_error, naming the file that
  /// cannot be decoded.
  batch_place load(context<Device>& ctx, index_t epoch, index_t step, const tensor_view<T, 4>& images,
                   std::span<std::int32_t> labels) override {
    const batch_place part = plan_.place_for(epoch, step, images.shape(), labels.size());
    if (!(next_ && next_->epoch == epoch && next_->step == step)) next_ = begin(epoch, step);
    const std::shared_ptr<prepared> now = std::exchange(next_, nullptr);
    begin_after(epoch, step);
    threads_.wait(*now);
    stage_.bring(ctx, part.count, now->pixels.data(), now->labels.data(), images.flat().data(),
                 labels.data());
    free_ = now;
    return part;
  }

 private:
  // A batch in preparation: its place in training, and the decoded pixels before normalization.
  struct prepared : batch_threads::batch {
    index_t epoch = 0, step = 0;
    std::vector<std::uint8_t> pixels;
    std::vector<std::int32_t> labels;
    std::vector<index_t> samples;
  };

  // The number that the options ask for; 0: one for each hardware thread.
  static std::size_t number_of_threads(const folder_options& how) {
    if (how.threads > 0) return static_cast<std::size_t>(how.threads);
    return std::max(1U, std::thread::hardware_concurrency());
  }

  // Training runs continue with the next epoch; tests, which are not shuffled, are of one epoch.
  void begin_after(index_t epoch, index_t step) {
    if (step + 1 < steps_per_epoch()) {
      next_ = begin(epoch, step + 1);
    } else if (plan_.options().shuffle) {
      next_ = begin(epoch + 1, 0);
    }
  }

  // Starts the threads on a batch. Samples and windows are fixed before, by the seed, so that the pixels do
  // not depend on the order in which threads run.
  std::shared_ptr<prepared> begin(index_t epoch, index_t step) {
    const batch_place part = plan_.place(epoch, step);
    std::shared_ptr<prepared> fresh = std::exchange(free_, nullptr);
    if (fresh == nullptr) fresh = std::make_shared<prepared>();
    static_cast<batch_threads::batch&>(*fresh) = {};
    fresh->epoch = epoch;
    fresh->step = step;
    fresh->samples.clear();
    fresh->labels.clear();
    for (index_t i = 0; i < part.count; ++i) {
      fresh->samples.push_back(plan_.sample_at(epoch, step * plan_.options().batch + part.first + i));
      fresh->labels.push_back(folder_->labels[static_cast<std::size_t>(fresh->samples.back())]);
    }
    fresh->pixels.resize(static_cast<std::size_t>(part.count * image_size()));
    fresh->count = part.count;
    // The threads hold the batch while they run it.
    fresh->run = [this, batch = fresh.get(), random = plan_.stream("augment", epoch)](
                     index_t i, std::size_t thread) { read(*batch, i, readers_[thread], random); };
    if (part.count > 0) threads_.start(fresh);
    return fresh;
  }

  // Number of values of an image.
  index_t image_size() const { return how_.size * how_.size * 3; }

  // Reads item i of a batch. Called by threads of the pool, each with its own reader.
  void read(prepared& batch, index_t i, window_reader& reader, const random_stream& random) const {
    const index_t sample = batch.samples[static_cast<std::size_t>(i)];
    const augmentation& augment = plan_.options().augment;
    const bool at_random = augment.smallest_area < 1.0;
    const double share = static_cast<double>(how_.size) / static_cast<double>(how_.resize);
    reader.read(
        folder_->path(static_cast<std::size_t>(sample)), how_.size,
        [&](index_t height, index_t width) {
          if (at_random)
            return random_window(height, width, augment.smallest_area, augment.flip, random, sample);
          // The mirror image uses the same random number as in random_window.
          image_window window = central_window(height, width, share);
          window.flipped = augment.flip && random.below(64 * static_cast<std::uint64_t>(sample) + 63, 2) == 1;
          return window;
        },
        batch.pixels.data() + i * image_size());
  }

  const image_folder* folder_;
  folder_options how_;
  batch_plan plan_;
  typename device_parts<Device>::byte_stage stage_;
  std::shared_ptr<prepared> next_, free_;  // batch in preparation; memory of the last one, for reuse
  std::vector<window_reader> readers_;
  batch_threads threads_;  // uses what stands above
};

}  // namespace detail

/// The JPEG files below a folder of classes (list_image_folder). Files are read when a batch needs them, by
/// threads that work one batch ahead. Training batches with augmentation::smallest_area below 1 are random
/// windows (random_window), all others the middle of the image (central_window with size / resize). A
/// sample's window is a pure function of seed, epoch and position, whatever the number of ranks and threads.
/// A file that cannot be decoded ends the step with an io_error that names it.
/// \code
///   auto train = std::make_shared<folder_images<float>>("imagenet/train");
///   auto test = std::make_shared<folder_images<float>>("imagenet/val");
///   options.augment = {.flip = true, .smallest_area = 0.08};
///   procedure<float, mpi::communicator> run(std::move(net), comm, train, test, options);
/// \endcode
template <class T, class Device = device::cpu>
class folder_images final : public image_source<T, Device> {
 public:
  /// Throws value_error for size < 1, resize < size or threads < 0, and the errors of list_image_folder.
  explicit folder_images(const std::string& root, folder_options options = {})
      : folder_images(list_image_folder(root), std::move(options)) {}
  /// Uses a list of files that the caller has made or changed, such as a part of a folder. Throws value_error
  /// for size < 1, resize < size or threads < 0, and unless each file has a label of one of the classes.
  explicit folder_images(image_folder folder, folder_options options = {})
      : folder_(std::move(folder)), options_(std::move(options)) {
    if (options_.size < 1 || options_.resize < options_.size || options_.threads < 0) {
      detail::throw_error<value_error>({"folder_images: size ", options_.size, ", resize ", options_.resize,
                                        " and ", options_.threads,
                                        " threads; 1 <= size <= resize and threads >= 0 are allowed"});
    }
    if (folder_.labels.size() != folder_.files.size()) {
      detail::throw_error<value_error>(
          {"folder_images: ", folder_.files.size(), " files and ", folder_.labels.size(), " labels"});
    }
    for (std::size_t i = 0; i < folder_.labels.size(); ++i) {
      if (folder_.labels[i] >= 0 && folder_.labels[i] < classes()) continue;
      detail::throw_error<value_error>({"folder_images: ", folder_.path(i), " has label ", folder_.labels[i],
                                        "; there are ", classes(), " classes"});
    }
  }

  /// The files, their labels and the names of the classes.
  const image_folder& folder() const { return folder_; }

  /// Extents of all images together, [files][size][size][3].
  extents<4> images() const override {
    return {static_cast<index_t>(folder_.files.size()), options_.size, options_.size, 3};
  }
  index_t classes() const override { return static_cast<index_t>(folder_.classes.size()); }
  std::span<const std::int32_t> labels() const override { return folder_.labels; }
  normalization normalize() const override { return options_.normalize; }

  /// Returns the given samples, unaugmented (central_window), as images in memory. Throws value_error for a
  /// sample that does not exist, io_error for a file that cannot be decoded.
  image_set chosen(const std::vector<index_t>& samples) const override {
    image_set some{static_cast<index_t>(samples.size()), options_.size, options_.size, 3, classes(), {}, {}};
    const index_t image = options_.size * options_.size * 3;
    some.pixels.resize(samples.size() * static_cast<std::size_t>(image));
    const double share = static_cast<double>(options_.size) / static_cast<double>(options_.resize);
    detail::window_reader reader;
    std::uint8_t* to = some.pixels.data();
    for (const index_t sample : samples) {
      if (sample < 0 || sample >= images()[0]) {
        detail::throw_error<value_error>({"folder_images: sample ", sample, " of ", images()[0]});
      }
      reader.read(
          folder_.path(static_cast<std::size_t>(sample)), options_.size,
          [share](index_t height, index_t width) { return central_window(height, width, share); }, to);
      some.labels.push_back(folder_.labels[static_cast<std::size_t>(sample)]);
      to += image;
    }
    return some;
  }

  /// Hashes the names and labels of the files, not their content.
  std::string describe() const override {
    hasher names;
    for (const std::string& file : folder_.files) names.text(file);
    names.values(std::span<const std::int32_t>(folder_.labels));
    return detail::message({folder_.files.size(), " JPEG files of ", classes(), " classes, ", options_.size,
                            " of ", options_.resize, " pixels, digest ",
                            detail::hexadecimal(names.digest())});
  }

  /// Returns the batches of one rank, with threads of their own. This object must outlive the result. Throws
  /// value_error for a smallest_area outside of (0, 1], for pad_crop and for reflect.
  std::unique_ptr<image_batches<T, Device>> batches(loader_options options) const override {
    return std::make_unique<detail::folder_batches<T, Device>>(folder_, options_, std::move(options));
  }

 private:
  image_folder folder_;
  folder_options options_;
};

PUFFERFISH_NAMESPACE_END
