// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `image_task`: image classification as the task of a training run.

#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/nn/measure/layer_inputs.hpp>
#include <pufferfish/prune/grasp.hpp>
#include <pufferfish/train/evaluate.hpp>
#include <pufferfish/train/host_mirror.hpp>
#include <pufferfish/train/image_source.hpp>
#include <pufferfish/train/options.hpp>
#include <pufferfish/train/training_run.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Trains a network by softmax cross entropy on augmented images, normalised by the training set's
/// statistics. On a device the sets are copied to its memory, and batches are made there.
/// load, compute, step, estimate, test, describe and data_lines are the members of a task
/// (train/step_position.hpp). With s_i the loss of sample i (smoothed if the options say so), B the number of
/// samples of the global batch, p the number of ranks: the gradient on a rank is that of (p / B) (sum of s_i
/// over the rank's samples).
///
/// \code
///   image_task<float> task(net, train, test, options, comm.rank(), comm.size());
///   training_run<image_task<float>, mpi::communicator> run(std::move(net), comm, std::move(task), options);
/// \endcode
template <class T, class Device = device::cpu>
class image_task {
 public:
  using model_type = network<T, Device>;
  using source_type = image_source<T, Device>;

  /// Named sets must outlive the object; temporary ones are moved into it. Throws shape_error if images do
  /// not fit the network; for an invalid set, batch, rank or padding, the errors of loader's constructor, on
  /// a device those of gpu::image_loader's. Local.
  template <detail::image_set_argument Train, detail::image_set_argument Test>
  image_task(const model_type& net, Train&& train, Test&& test, const training_options& options, int rank,
             int ranks)
      : image_task(net, std::make_shared<images_in_memory<T, Device>>(std::forward<Train>(train)),
                   std::make_shared<images_in_memory<T, Device>>(std::forward<Test>(test)), options, rank,
                   ranks) {}

  /// Makes a task whose images come from any source. Throws shape_error if images do not fit the network, and
  /// the errors of the sources.
  image_task(const model_type& net, std::shared_ptr<const source_type> train,
             std::shared_ptr<const source_type> test, const training_options& options, int rank, int ranks)
      : train_(std::move(train)),
        test_(std::move(test)),
        options_(options),
        rank_(rank),
        ranks_(ranks),
        normalize_(train_->normalize()),
        batches_(train_->batches(loader_for(rank, ranks))),
        shape_(batch_shape(*train_, *batches_)),
        output_shape_(net.output_shape(shape_)),
        images_(memory(), volume<4>(shape_)),
        labels_(memory(), shape_[0]),
        logits_(memory(), volume<4>(output_shape_)),
        gradient_(memory(), volume<4>(output_shape_)) {}

  /// The place that the task was made for; a run compares it with its communicator.
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  /// Number of global batches in an epoch.
  index_t steps_per_epoch() const { return batches_->steps_per_epoch(); }
  /// Multiply-adds of a forward pass of one image.
  index_t macs(const model_type& net) const {
    extents<4> image = shape_;
    image[0] = 1;
    return net.macs(image);
  }
  /// The training set's mean and deviation, which training and test images are normalized by.
  const normalization& normalize() const { return normalize_; }

  /// Loads this rank's part of the batch of epoch at.epoch, step at.step. The part may be empty.
  step_share load(context<Device>& ctx, const step_position& at) {
    place_ =
        batches_->load(ctx, at.epoch, at.step, tensor_view<T, 4>(images_.data(), shape_), labels_.span());
    ctx.begin_step(at.total, place_.first);
    const hasher work = hasher().number(place_.first).number(place_.count).number(place_.global_count);
    return {place_.count, work.digest()};
  }

  /// Runs the forward and backward pass over the loaded part. results[0]: sum of its losses; results[1]:
  /// number of hits.
  void compute(context<Device>& ctx, model_type& net, double* results) {
    const tensor_view<const T, 4> x = rows(images_, shape_);
    const tensor_view<T, 4> y = rows(logits_, output_shape_), dy = rows(gradient_, output_shape_);
    if (!std::is_same_v<Device, device::cpu> && place_.count == 0) {
      return detail::compute_nothing(ctx, net, results);
    }
    net.forward(ctx, x, y);
    // Each rank divides by its share of the global batch, so that the mean over ranks is the mean over
    // samples even where the shares differ by one.
    const double share = static_cast<double>(place_.global_count) / ranks_;
    const SoftmaxCrossEntropy<T> criterion(options_.smoothing);
    criterion(ctx, y, labels_.span().first(static_cast<std::size_t>(place_.count)), share, dy, results);
    net.backward(ctx, dy);
  }

  /// Loads a batch and computes its gradients: load(), then compute(). Returns the losses of this rank's
  /// part.
  evaluation step(context<Device>& ctx, model_type& net,
                  const step_position& at) requires(std::is_same_v<Device, device::cpu>) {
    return detail::step_at_once(*this, ctx, net, at);
  }

  /// Runs only the forward pass of a step; see estimate_norms. Returns false if this rank has no image of it.
  bool estimate(context<Device>& ctx, model_type& net, const step_position& at) {
    load(ctx, at);
    if (place_.count == 0) return false;
    net.forward(ctx, rows(images_, shape_), rows(logits_, output_shape_));
    return true;
  }

  /// Gradient of the mean cross entropy of outputs / temperature over half 0 or 1 of `per_class` training
  /// samples of each class, not augmented (balanced_halves); for prune_by_grasp. Equal on all ranks. The
  /// half is one batch: memory for all of its images and activations is allocated here. Leaves the context in
  /// training mode at step 0. Throws value_error, naming the class, for a class with fewer samples.
  void grasp_gradient(context<Device>& ctx, model_type& net, int which, index_t per_class,
                      double temperature) {
    using P = parameter_t<T>;
    const auto halves = balanced_halves(train_->labels(), train_->classes(), per_class, options_.seed);
    const image_set some = train_->chosen(which == 0 ? halves.first : halves.second);
    loader_options options{.batch = some.count, .shuffle = false, .augment = {}, .normalize = normalize_};
    loader source(some, options);
    const extents<4> shape{some.count, shape_[1], shape_[2], shape_[3]}, outputs = net.output_shape(shape);
    tensor<P, 4> pixels(shape);
    std::vector<std::int32_t> classes(some.labels.size());
    source.load(0, 0, pixels.view(), std::span<std::int32_t>(classes));
    memory_block<T> x(memory(), pixels.size()), y(memory(), volume<4>(outputs)), dy(memory(), y.size());
    memory_block<std::int32_t> labels(memory(), static_cast<index_t>(classes.size()));
    memory_block<double> results(memory(), 2);
    x.from_host(std::vector<T>(pixels.data(), pixels.data() + pixels.size()));
    labels.from_host(classes);
    ctx.set_mode(run_mode::training);
    ctx.begin_step(0);
    const auto divide = [&](memory_block<T>& values) {
      detail::host_mirror<T> here(memory(), values.span());
      for (T& value : here.values())
        value = static_cast<T>(static_cast<P>(value) / static_cast<P>(temperature));
      here.send_back();
    };
    net.forward(ctx, tensor_view<const T, 4>(x.data(), shape), tensor_view<T, 4>(y.data(), outputs));
    divide(y);
    SoftmaxCrossEntropy<T>()(ctx, tensor_view<const T, 4>(y.data(), outputs), std::as_const(labels).span(),
                             static_cast<double>(some.count), tensor_view<T, 4>(dy.data(), outputs),
                             results.data());
    divide(dy);
    net.backward(ctx, tensor_view<const T, 4>(dy.data(), outputs));
  }

  /// Shape of one rank's largest batch.
  const extents<4>& input_shape() const { return shape_; }
  /// Inputs of a dense network's layers in a step, for budgets in milliseconds.
  std::vector<layer_input> layer_inputs(const model_type& net) const { return traced_inputs(net, shape_); }

  /// Loss and accuracy on the test set. All ranks get the same sums. On a device the first call copies the
  /// set there. Collective.
  template <class Comm>
  evaluation test(context<Device>& ctx, const model_type& net, Comm& comm) {
    if (test_batches_ == nullptr) {
      loader_options options = loader_for(comm.rank(), comm.size());
      options.batch = std::max<index_t>(options_.batch, 256);
      options.shuffle = false;
      options.augment = {};
      test_batches_ = test_->batches(options);
    }
    return detail::evaluate(ctx, net, comm, *test_batches_, batch_shape(*test_, *test_batches_));
  }

  /// Lines of the options that decide the training besides the network, to compare ranks and checkpoints.
  std::string describe() const {
    return detail::message({"batch ", options_.batch, "\nlabel smoothing ",
                            pufferfish::describe(options_.smoothing), "\ncrop padding ",
                            options_.augment.pad_crop, options_.augment.reflect ? ", reflected" : "",
                            "\nflip ", options_.augment.flip ? "yes\n" : "no\n",
                            options_.augment.smallest_area == 1.0
                                ? ""
                                : detail::message({"smallest area ", options_.augment.smallest_area, "\n"})});
  }
  /// Lines that tell the training and test sets from others, with digests.
  std::string data_lines() const {
    return "training data " + train_->describe() + "\ntest data " + test_->describe() + "\n";
  }

 private:
  // Shape of the largest batch of a rank, N x height x width x channels.
  static extents<4> batch_shape(const source_type& source, const image_batches<T, Device>& batches) {
    extents<4> shape = source.images();
    shape[0] = batches.max_local_batch();
    return shape;
  }

  static memory_source& memory() { return memory_of<Device>::source(); }

  // The rows of `block` that the loaded step uses.
  tensor_view<T, 4> rows(memory_block<T>& block, extents<4> shape) const {
    shape[0] = place_.count;
    return {block.data(), shape};
  }

  // Options of the training batches of a rank.
  loader_options loader_for(int rank, int ranks) const {
    return {.batch = options_.batch,
            .augment = options_.augment,
            .normalize = normalize_,
            .seed = options_.seed,
            .rank = rank,
            .ranks = ranks};
  }

  std::shared_ptr<const source_type> train_, test_;
  training_options options_;
  int rank_, ranks_;
  normalization normalize_;
  std::unique_ptr<image_batches<T, Device>> batches_, test_batches_;  // test: made by the first test
  extents<4> shape_, output_shape_;
  memory_block<T> images_;
  memory_block<std::int32_t> labels_;
  memory_block<T> logits_, gradient_;
  batch_place place_;  // place of the loaded step's batch
};

PUFFERFISH_NAMESPACE_END
