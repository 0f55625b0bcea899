// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `training_run`: the Pufferfish training procedure as one object: warm-up, switch, train on; on one rank or
/// many; for whatever a task is made of (images: `procedure`).
///
/// What a task must have (a documented class that does not exist):
///
///     class ExampleTask {
///      public:
///       using model_type = network<T>;         // or model<Root>
///       index_t steps_per_epoch() const;
///       // Gradients of this rank's share of one global batch, scaled so that their mean over all ranks is
///       the
///       // global gradient. Calls ctx.begin_step(at.total, ...).
///       evaluation step(context<device::cpu>& ctx, const model_type& net, const step_position& at);
///       // On the test set, summed over all ranks; collective.
///       template <class Comm>
///       evaluation test(context<device::cpu>& ctx, const model_type& net, Comm& comm);
///       std::string describe() const;   // lines: what a checkpoint and the run that resumes it must share
///       std::string data_lines() const; // lines: what ranks must share besides, a digest of the data say
///       // Where it applies: state that passes from step to step on this rank, kept in checkpoints.
///       std::span<T> carried();
///     };

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

#include <pufferfish/dist/exchange.hpp>
#include <pufferfish/optim/clip.hpp>
#include <pufferfish/train/checkpoint.hpp>
#include <pufferfish/train/options.hpp>
#include <pufferfish/train/progress_record.hpp>
#include <pufferfish/train/rank_states.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Where a run is: step of an epoch (0-based), and steps since the start.
struct step_position {
  index_t epoch = 0;
  index_t step = 0;
  std::uint64_t total = 0;
};

/// Trains a model by synchronous data parallelism (Wang et al., Pufferfish, MLSys 2021, algorithm 1): every
/// rank computes the gradients of its part of the global batch, the gradient arena is averaged in place,
/// every rank takes the same step. In hybrid mode, at the start of epoch E rank 0 factorizes and broadcasts;
/// batch-norm state and dense layers are carried over bit for bit; the optimizer starts afresh.
///
/// Parameters are bit-identical on all ranks after every step, and do not depend on the number of threads.
/// All members that train, evaluate, save or load are collective: every rank calls them in the same order.
template <class Task, class Comm>
class training_run {
 public:
  using model_type = typename Task::model_type;
  using T = typename model_type::value_type;

  /// Takes a dense model. All ranks get rank 0's initial values. Throws state_error on all ranks if their
  /// models, data or options differ, naming the first difference.
  training_run(model_type net, Comm& comm, Task task, const run_options& options,
               const context_options& machine = {})
      : net_(std::move(net)),
        comm_(&comm),
        task_(std::move(task)),
        options_(options),
        plateau_(options.rate_plateau),
        ctx_(with_seed(machine, options.seed)) {
    if (options_.mode == training_mode::lowrank) start_low_rank();
    agree_on_lines(*comm_, "network", net_.structure());
    agree_on_lines(*comm_, "training options", option_lines());
    broadcast_state();
    bind_to_arenas();
    record_.low_rank = options_.mode == training_mode::lowrank;
  }

  bool finished() const { return record_.epoch >= options_.epochs; }
  index_t epoch() const { return record_.epoch; }
  index_t steps_per_epoch() const { return task_.steps_per_epoch(); }
  /// Steps of the current epoch that are done, and of the whole run.
  index_t step_of_epoch() const { return record_.step; }
  std::uint64_t total_steps() const { return record_.total_steps; }
  bool low_rank() const { return record_.low_rank; }

  const model_type& net() const { return net_; }
  model_type& net() { return net_; }
  Task& task() { return task_; }
  const Task& task() const { return task_; }
  context<device::cpu>& machine() { return ctx_; }
  const run_options& options() const { return options_; }
  const std::vector<epoch_result>& history() const { return record_.history; }
  const std::optional<switch_result>& switched() const { return record_.switched; }

  /// What one rank gives to the collectives of a step's gradient exchange, in bytes.
  index_t exchange_bytes() const { return exchange_->payload_bytes(); }
  /// Steps that were left out because a gradient was not finite (nonfinite_policy::skip).
  std::uint64_t skipped_steps() const { return record_.skipped_steps; }

  /// One training step; before it the switch, if it is due; after it the end of the epoch, if it was the
  /// last. Does nothing once finished.
  void advance(training_observer& observer) {
    if (finished()) return;
    if (record_.step == 0 && switch_is_due()) do_switch(observer);
    train_step(observer);
    const evaluation& seen = record_.seen;
    observer.on_step({record_.epoch, options_.epochs, record_.step, steps_per_epoch(), record_.low_rank,
                      seen.loss(), seen.accuracy()});
    if (record_.step == steps_per_epoch()) end_epoch(observer);
  }

  /// Steps until finished.
  void run(training_observer& observer) {
    while (!finished()) advance(observer);
  }

  /// How good the model is on the test set now.
  evaluation test() {
    average_buffers();
    return task_.test(ctx_, net_, *comm_);
  }

  /// Writes everything that resume needs: rank 0 writes one file, aside and renamed. `facts` go along as they
  /// are. All ranks throw if rank 0 could not.
  void save(const std::string& path, std::map<std::string, std::string> facts = {}) {
    average_buffers();
    training_record whole = record_;
    whole.seen = reduce(*comm_, record_.seen);
    whole.optimizer_steps = optimizer_->steps();
    const auto compressed = exchange_->states();
    detail::rank_states<T, Comm> of_ranks(*comm_, states_of_rank(compressed));
    of_ranks.gather();
    on_root([&] {
      facts["training.record"] = whole.to_text();
      facts["training.options"] = resume_lines();
      if (plateau_) facts["training.plateau"] = plateau_->state();
      save_checkpoint(path, net_, named_states(*optimizer_, compressed, of_ranks), facts);
      return std::string();
    });
  }

  /// Goes on where `save` was called, bit for bit: give a run with the same model, task and options, and as
  /// many ranks where the task carries state or gradients are compressed. Throws io_error for a file that is
  /// not such a checkpoint, state_error if it was made with other options; then nothing has changed.
  void resume(const std::string& path) {
    model_type loaded = net_;
    std::optional<checkpoint_file> file;
    std::string plateau_state;
    const std::string text = on_root([&] {
      file.emplace(open_checkpoint(path));
      check_same_options(path, file->fact("training.options"));
      if (plateau_) plateau_state = file->fact("training.plateau");
      file->restore(loaded);
      return file->fact("training.record");
    });
    const training_record record = training_record::from_text(text, path);
    take_structure(low_rank_layers(loaded), loaded);
    optimizer<T> restored(make_optimizer_target(loaded.store()), options_.optimizer);
    auto compressor = make_compressor(loaded.store(), options_.compression);
    const auto compressed = compressor ? compressor->states() : std::vector<compressor_state<T>>();
    detail::rank_states<T, Comm> of_ranks(*comm_, states_of_rank(compressed));
    on_root([&] {
      of_ranks.check_ranks(*file);
      file->restore(loaded, named_states(restored, compressed, of_ranks));
      return std::string();
    });
    exchange_.reset();
    net_ = std::move(loaded);
    optimizer_.emplace(std::move(restored));
    exchange_.emplace(net_.store(), *comm_, options_.exchange, std::move(compressor));
    broadcast_state();
    for (const auto& [name, values] : optimizer_->states()) comm_->broadcast(values, 0);
    for (const auto& state : compressed) {
      if (!state.of_rank) comm_->broadcast(state.values, 0);
    }
    of_ranks.scatter();
    optimizer_->set_steps(record.optimizer_steps);
    exchange_->set_steps(record.optimizer_steps);  // both leave out the same steps
    if (plateau_) plateau_->set_state(detail::broadcast_text(*comm_, plateau_state, 0));
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
    std::string text;
    const auto line = [&text](const char* name, const std::string& value) {
      text += std::string(name) + " " + value + "\n";
    };
    line("mode", to_string(options_.mode));
    line("warm-up epochs", std::to_string(options_.warmup_epochs));
    line("first factorized layer", std::to_string(options_.factorize.first_layer));
    line("learning rate", detail::exact_number(options_.learning_rate) + ", " +
                              options_.rate_schedule.describe() +
                              (options_.restart_schedule_at_switch ? ", again from the switch on" : ""));
    line("learning rate after the switch", "x " + detail::exact_number(options_.switch_rate_factor));
    line("plateau", plateau_ ? "yes" : "no");
    line("optimizer", describe(options_.optimizer));
    line("clip norm", detail::exact_number(options_.clip_norm));
    line("seed", std::to_string(options_.seed));
    line("scalar bytes", std::to_string(sizeof(T)));
    // Left out where it is the default, so that checkpoints from before these lines still resume.
    if (options_.compression.index() != 0) line("compression", pufferfish::describe(options_.compression));
    if (options_.exchange.wire != exchange_wire::same) line("wire", to_string(options_.exchange.wire));
    return text + task_.describe();
  }

  std::string option_lines() const {
    return resume_lines() + "epochs " + std::to_string(options_.epochs) + "\n" + task_.data_lines();
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

  // An optimizer and an exchange for the arenas that the model has now.
  void bind_to_arenas() {
    optimizer_.emplace(make_optimizer_target(net_.store()), options_.optimizer);
    exchange_.emplace(net_.store(), *comm_, options_.exchange,
                      make_compressor(net_.store(), options_.compression));
  }

  // Low rank from the start: the structure that the policy would give, with random factors.
  void start_low_rank() {
    if (needs_spectrum(options_.factorize.rank)) {
      model_type trial = net_;
      apply_ranks(net_, factorize(trial, options_.factorize).ranks());
    } else {
      apply_ranks(net_, planned_ranks(net_, options_.factorize));
    }
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
    bind_to_arenas();
    record_.low_rank = true;
    if (plateau_) plateau_->forget_best();
    result.milliseconds = milliseconds_since(start);
    record_.switched = result;
    check_ranks_agree("after the switch");
    observer.on_switch(result);
  }

  // Brings a network of the dense structure to that of rank 0, which has it already.
  void take_structure(const std::vector<layer_rank>& of_root, model_type& net) {
    const std::string text = detail::broadcast_text(*comm_, detail::ranks_to_text(of_root), 0);
    if (comm_->rank() == 0) return;
    const std::vector<layer_rank> ranks = detail::ranks_from_text(text);
    if (low_rank_layers(net) != ranks) apply_ranks(net, ranks);
  }

  void train_step(training_observer& observer) {
    const clock::time_point start = clock::now();
    ctx_.set_mode(run_mode::training);
    exchange_->begin(ctx_);
    const evaluation seen = task_.step(ctx_, net_, {record_.epoch, record_.step, record_.total_steps});
    const clock::time_point exchange_start = clock::now();
    const bool usable = exchange_->finish(ctx_);
    record_.exchange_ms += milliseconds_since(exchange_start);
    if (usable) {
      if (options_.clip_norm > 0.0) clip_gradient_norm<T>(ctx_, net_.store().gradients(), options_.clip_norm);
      optimizer_->step(ctx_, learning_rate());
      record_.seen.loss_sum += seen.loss_sum;
      record_.seen.correct += seen.correct;
      record_.seen.count += seen.count;
    } else {
      ++record_.skipped_steps;
      observer.on_skipped_step(*exchange_->nonfinite());
    }
    ++record_.step;
    ++record_.total_steps;
    step_ms_.push_back(milliseconds_since(start));
  }

  double learning_rate() const {
    double epoch = static_cast<double>(record_.epoch) +
                   static_cast<double>(record_.step) / static_cast<double>(steps_per_epoch());
    double rate = options_.learning_rate;
    if (record_.switched) {
      if (options_.restart_schedule_at_switch) epoch -= static_cast<double>(record_.switched->epoch);
      rate *= options_.switch_rate_factor;
    }
    return rate * options_.rate_schedule(epoch) * (plateau_ ? plateau_->factor() : 1.0);
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
    if (plateau_) plateau_->observe(result.test_loss);
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

  // What this rank has of its own: what the task carries from step to step, the compressor's memory.
  std::vector<named_state<T>> states_of_rank(const std::vector<compressor_state<T>>& compressed) {
    std::vector<named_state<T>> result;
    if constexpr (requires { task_.carried(); }) result.push_back({"task.carried", task_.carried()});
    for (const auto& state : compressed) {
      if (state.of_rank) result.push_back({state.name, state.values});
    }
    return result;
  }

  // All that is in a checkpoint beside the network, under its names.
  static std::vector<named_state<T>> named_states(optimizer<T>& of,
                                                  const std::vector<compressor_state<T>>& compressed,
                                                  detail::rank_states<T, Comm>& of_ranks) {
    std::vector<named_state<T>> result;
    for (const auto& [name, values] : of.states()) result.push_back({name, values});
    for (const auto& state : compressed) {
      if (!state.of_rank) result.push_back({state.name, state.values});
    }
    of_ranks.list(result);
    return result;
  }

  model_type net_;
  Comm* comm_;
  Task task_;
  run_options options_;
  std::optional<plateau> plateau_;
  context<device::cpu> ctx_;
  std::optional<optimizer<T>> optimizer_;
  std::optional<gradient_exchange<T, Comm>> exchange_;
  training_record record_;
  std::vector<double> step_ms_;
};

PUFFERFISH_NAMESPACE_END
