// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `procedure`: the Pufferfish training procedure as one object: warm-up, switch, train on; on one rank or
/// many.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/optim/clip.hpp>
#include <pufferfish/train/checkpoint.hpp>
#include <pufferfish/train/evaluate.hpp>
#include <pufferfish/train/options.hpp>
#include <pufferfish/train/progress_record.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Trains a network by synchronous data parallelism (Wang et al., Pufferfish, MLSys 2021, algorithm 1): every
/// rank computes the gradients of its part of the global batch, the gradient arena is averaged in place,
/// every rank takes the same step. In hybrid mode, at the start of epoch E rank 0 factorizes and broadcasts;
/// batch-norm state and dense layers are carried over bit for bit; the optimizer starts afresh.
///
/// Parameters are bit-identical on all ranks after every step, and do not depend on the number of threads.
/// All members that train, evaluate, save or load are collective: every rank calls them in the same order.
template <class T, class Comm>
class procedure {
 public:
  /// Takes a dense network. The sets must outlive the object. All ranks get rank 0's initial values. Throws
  /// state_error on all ranks if their networks, data or options differ, naming the first difference;
  /// shape_error if images do not fit.
  procedure(network<T> net, Comm& comm, const image_set& train, const image_set& test,
            const training_options& options, const context_options& machine = {})
      : net_(std::move(net)),
        comm_(&comm),
        test_(&test),
        options_(options),
        normalize_(measure_normalization(train)),
        ctx_(with_seed(machine, options.seed)),
        loader_(train, loader_for(comm)),
        images_({loader_.max_local_batch(), train.height, train.width, train.channels}),
        labels_(static_cast<std::size_t>(loader_.max_local_batch())),
        logits_(net_.output_shape(images_.shape())),
        gradient_(logits_.shape()) {
    if (options_.mode == training_mode::lowrank) start_low_rank();
    agree_on_lines(*comm_, "network", net_.structure());
    agree_on_lines(*comm_, "training options", option_lines(train));
    broadcast_state();
    make_optimizer();
    record_.low_rank = options_.mode == training_mode::lowrank;
  }

  bool finished() const { return record_.epoch >= options_.epochs; }
  index_t epoch() const { return record_.epoch; }
  index_t steps_per_epoch() const { return loader_.steps_per_epoch(); }
  /// Steps of the current epoch that are done, and of the whole run.
  index_t step_of_epoch() const { return record_.step; }
  std::uint64_t total_steps() const { return record_.total_steps; }
  bool low_rank() const { return record_.low_rank; }

  const network<T>& net() const { return net_; }
  network<T>& net() { return net_; }
  context<device::cpu>& machine() { return ctx_; }
  const normalization& normalize() const { return normalize_; }
  const training_options& options() const { return options_; }
  const std::vector<epoch_result>& history() const { return record_.history; }
  const std::optional<switch_result>& switched() const { return record_.switched; }

  /// Bytes of one rank's gradient that a step's all-reduce carries.
  index_t exchange_bytes() const { return net_.parameter_count() * static_cast<index_t>(sizeof(T)); }

  /// One training step; before it the switch, if it is due; after it the end of the epoch, if it was the
  /// last. Does nothing once finished.
  void advance(training_observer& observer) {
    if (finished()) return;
    if (record_.step == 0 && switch_is_due()) do_switch(observer);
    train_step();
    const evaluation& seen = record_.seen;
    observer.on_step({record_.epoch, options_.epochs, record_.step, steps_per_epoch(), record_.low_rank,
                      seen.loss(), seen.accuracy()});
    if (record_.step == steps_per_epoch()) end_epoch(observer);
  }

  /// Steps until finished.
  void run(training_observer& observer) {
    while (!finished()) advance(observer);
  }

  /// How good the network is on the test set now.
  evaluation test() {
    average_buffers();
    return evaluate(ctx_, net_, *comm_, *test_, normalize_, std::max<index_t>(options_.batch, 256));
  }

  /// Writes everything that resume needs: rank 0 writes one file, aside and renamed. `facts` go along as they
  /// are. All ranks throw if rank 0 could not.
  void save(const std::string& path, std::map<std::string, std::string> facts = {}) {
    average_buffers();
    training_record whole = record_;
    whole.seen = reduce(*comm_, record_.seen);
    whole.optimizer_steps = optimizer_->steps();
    on_root([&] {
      facts["training.record"] = whole.to_text();
      facts["training.options"] = resume_lines();
      const named_state<T> momentum{"optimizer.momentum", optimizer_->velocity()};
      save_checkpoint<T>(path, net_, std::span<const named_state<T>>(&momentum, 1), facts);
      return std::string();
    });
  }

  /// Goes on where `save` was called, bit for bit: give a procedure with the same network and options. Throws
  /// io_error for a file that is not such a checkpoint, state_error if it was made with other options; then
  /// nothing has changed.
  void resume(const std::string& path) {
    std::optional<checkpoint_file> file;
    network<T> loaded = net_;
    aligned_buffer<T> momentum;
    const std::string text = on_root([&] {
      file.emplace(open_checkpoint(path));
      check_same_options(path, file->fact("training.options"));
      momentum = aligned_buffer<T>(file->stored_size("optimizer.momentum"));
      const named_state<T> place{"optimizer.momentum", momentum.span()};
      file->restore(loaded, std::span<const named_state<T>>(&place, 1));
      return file->fact("training.record");
    });
    const training_record record = training_record::from_text(text, path);
    take_structure(low_rank_layers(loaded), loaded);
    net_ = std::move(loaded);
    broadcast_state();
    make_optimizer();
    if (comm_->rank() == 0) std::copy_n(momentum.data(), momentum.size(), optimizer_->velocity().data());
    comm_->broadcast(optimizer_->velocity(), 0);
    optimizer_->set_steps(record.optimizer_steps);
    record_ = record;
    if (comm_->rank() != 0) record_.seen = {};
    ctx_.tape().clear();
  }

 private:
  using clock = std::chrono::steady_clock;

  static double milliseconds_since(clock::time_point start) {
    return std::chrono::duration<double, std::milli>(clock::now() - start).count();
  }

  static context_options with_seed(context_options machine, std::uint64_t seed) {
    machine.seed = seed;
    return machine;
  }

  loader_options loader_for(const Comm& comm) const {
    loader_options result;
    result.batch = options_.batch;
    result.augment = options_.augment;
    result.normalize = normalize_;
    result.seed = options_.seed;
    result.rank = comm.rank();
    result.ranks = comm.size();
    return result;
  }

  // Runs `work` on rank 0 and gives its text to all. If it throws there, all ranks throw: none waits for a
  // broadcast that does not come.
  template <class Work>
  std::string on_root(Work&& work) {
    std::string text;
    std::uint64_t failed[1] = {0};
    std::exception_ptr failure;
    if (comm_->rank() == 0) {
      try {
        text = work();
      } catch (const std::exception& e) {
        failure = std::current_exception();
        text = e.what();
        failed[0] = 1;
      }
    }
    comm_->broadcast(std::span<std::uint64_t>(failed), 0);
    text = detail::broadcast_text(*comm_, text, 0);
    if (failure) std::rethrow_exception(failure);
    if (failed[0] != 0) PUFFERFISH_THROW(state_error("rank 0 failed: " + text));
    return text;
  }

  // What must be equal on all ranks, and between a checkpoint and the run that resumes it.
  std::string resume_lines() const {
    const auto real = [](double value) {
      char text[40];
      std::snprintf(text, sizeof text, "%.17g", value);
      return std::string(text);
    };
    std::string text;
    const auto line = [&text](const char* name, const std::string& value) {
      text += std::string(name) + " " + value + "\n";
    };
    line("mode", to_string(options_.mode));
    line("warm-up epochs", std::to_string(options_.warmup_epochs));
    line("first factorized layer", std::to_string(options_.factorize.first_layer));
    line("learning rate", real(options_.learning_rate) + ", " + options_.rate_schedule.describe());
    line("momentum", real(options_.optimizer.momentum));
    line("weight decay", real(options_.optimizer.weight_decay));
    line("label smoothing", real(options_.smoothing.epsilon));
    line("clip norm", real(options_.clip_norm));
    line("batch", std::to_string(options_.batch));
    line("crop padding", std::to_string(options_.augment.pad_crop));
    line("flip", options_.augment.flip ? "yes" : "no");
    line("seed", std::to_string(options_.seed));
    line("scalar bytes", std::to_string(sizeof(T)));
    line("training images", std::to_string(loader_.set().count));
    return text;
  }

  std::string option_lines(const image_set& train) const {
    return resume_lines() + "epochs " + std::to_string(options_.epochs) + "\ntraining data " +
           pufferfish::detail::hexadecimal(hasher()
                                               .values(std::span<const std::uint8_t>(train.pixels))
                                               .values(std::span<const std::int32_t>(train.labels))
                                               .digest()) +
           "\n";
  }

  void check_same_options(const std::string& path, const std::string& stored) const {
    const std::string mine = resume_lines();
    if (stored == mine) return;
    const std::size_t line = detail::first_difference({stored, mine});
    PUFFERFISH_THROW(state_error(path + ": made by a run with " + detail::line_of(stored, line) +
                                 ", this run has " + detail::line_of(mine, line)));
  }

  void broadcast_state() {
    comm_->broadcast(net_.store().values(), 0);
    comm_->broadcast(net_.store().buffers(), 0);
  }

  void make_optimizer() { optimizer_.emplace(make_optimizer_target(net_.store()), options_.optimizer); }

  // Low rank from the start: the structure that the policy would give, with random factors.
  void start_low_rank() {
    network<T> trial = net_;
    apply_ranks(net_, factorize(trial, options_.factorize).ranks());
    net_.initialize(options_.seed);
  }

  bool switch_is_due() const {
    return options_.mode == training_mode::hybrid && !record_.low_rank &&
           record_.epoch >= options_.warmup_epochs;
  }

  void do_switch(training_observer& observer) {
    const clock::time_point start = clock::now();
    average_buffers();
    switch_result result;
    result.epoch = record_.epoch;
    const std::string ranks = on_root([&] {
      factorize_policy policy = options_.factorize;
      policy.threads = ctx_.threads();
      result.factors = factorize(net_, policy);
      return detail::ranks_to_text(result.factors.ranks());
    });
    take_structure(detail::ranks_from_text(ranks), net_);
    broadcast_state();
    make_optimizer();
    record_.low_rank = true;
    result.milliseconds = milliseconds_since(start);
    record_.switched = result;
    check_ranks_agree("after the switch");
    observer.on_switch(result);
  }

  // Brings a network of the dense structure to that of rank 0, which has it already.
  void take_structure(const std::vector<layer_rank>& of_root, network<T>& net) {
    const std::string text = detail::broadcast_text(*comm_, detail::ranks_to_text(of_root), 0);
    if (comm_->rank() == 0) return;
    const std::vector<layer_rank> ranks = detail::ranks_from_text(text);
    if (low_rank_layers(net) != ranks) apply_ranks(net, ranks);
  }

  void train_step() {
    const clock::time_point start = clock::now();
    const batch_place place =
        loader_.load(record_.epoch, record_.step, images_.view(), std::span<std::int32_t>(labels_));
    ctx_.set_mode(run_mode::training);
    ctx_.begin_step(record_.total_steps, place.first);
    const tensor_view<const T, 4> x = images_.view().slice(0, 0, place.count);
    const tensor_view<T, 4> y = logits_.view().slice(0, 0, place.count);
    const tensor_view<T, 4> dy = gradient_.view().slice(0, 0, place.count);
    net_.forward(ctx_, x, y);
    // Each rank divides by its share of the global batch, so that the mean over ranks is the mean over
    // samples even where the shares differ by one.
    const double share = static_cast<double>(place.global_count) / comm_->size();
    const SoftmaxCrossEntropy<T> criterion(options_.smoothing);
    const loss_result loss = criterion(
        ctx_, y, std::span<const std::int32_t>(labels_.data(), static_cast<std::size_t>(place.count)), share,
        dy);
    net_.backward(ctx_, dy);
    const clock::time_point exchange_start = clock::now();
    mean(*comm_, net_.store().gradients());
    record_.exchange_ms += milliseconds_since(exchange_start);
    if (options_.clip_norm > 0.0) clip_gradient_norm<T>(ctx_, net_.store().gradients(), options_.clip_norm);
    optimizer_->step(ctx_, learning_rate());
    record_.seen.loss_sum += loss.loss_sum;
    record_.seen.correct += loss.correct;
    record_.seen.count += loss.count;
    ++record_.step;
    ++record_.total_steps;
    step_ms_.push_back(milliseconds_since(start));
  }

  double learning_rate() const {
    const double part = static_cast<double>(record_.step) / static_cast<double>(steps_per_epoch());
    return options_.learning_rate * options_.rate_schedule(static_cast<double>(record_.epoch) + part);
  }

  void end_epoch(training_observer& observer) {
    epoch_result result;
    result.epoch = record_.epoch;
    result.low_rank = record_.low_rank;
    --record_.step;
    result.learning_rate = learning_rate();
    ++record_.step;
    const evaluation train = reduce(*comm_, record_.seen);
    result.train_loss = train.loss();
    result.train_accuracy = train.accuracy();
    result.seconds = 0.0;
    for (double ms : step_ms_) result.seconds += ms / 1000.0;
    result.step_ms = median(step_ms_);
    result.exchange_ms = record_.exchange_ms / static_cast<double>(std::max<std::size_t>(1, step_ms_.size()));
    check_ranks_agree("after epoch " + std::to_string(record_.epoch));
    const evaluation tested = test();
    result.test_loss = tested.loss();
    result.test_accuracy = tested.accuracy();
    record_.history.push_back(result);
    ++record_.epoch;
    record_.step = 0;
    record_.seen = {};
    record_.exchange_ms = 0.0;
    step_ms_.clear();
    observer.on_epoch(result);
  }

  static double median(std::vector<double> values) {
    if (values.empty()) return 0.0;
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

  // Parameters are bit-identical on all ranks, or something is broken that must not go unnoticed.
  void check_ranks_agree(const std::string& when) {
    agree(*comm_, "parameters " + when, digest(std::span<const T>(net_.store().values())));
  }

  // Batch-norm statistics are local in training. Their mean is formed in double, in the order of the ranks,
  // so that it does not depend on how the communicator adds.
  void average_buffers() {
    if (comm_->size() == 1 || net_.store().buffers().empty()) return;
    const std::span<T> mine = net_.store().buffers();
    std::vector<T> one(mine.size());
    std::vector<double> sum(mine.size(), 0.0);
    for (int rank = 0; rank < comm_->size(); ++rank) {
      if (rank == comm_->rank()) std::copy(mine.begin(), mine.end(), one.begin());
      comm_->broadcast(std::span<T>(one), rank);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += static_cast<double>(one[i]);
    }
    for (std::size_t i = 0; i < sum.size(); ++i) mine[i] = static_cast<T>(sum[i] / comm_->size());
  }

  network<T> net_;
  Comm* comm_;
  const image_set* test_;
  training_options options_;
  normalization normalize_;
  context<device::cpu> ctx_;
  loader loader_;
  tensor<T, 4> images_;
  std::vector<std::int32_t> labels_;
  tensor<T, 4> logits_, gradient_;
  std::optional<SGD<T>> optimizer_;
  training_record record_;
  std::vector<double> step_ms_;
};

PUFFERFISH_NAMESPACE_END
