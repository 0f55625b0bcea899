// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `training_run`: the Pufferfish training procedure as one object: warm-up, switch to low rank, training of
/// factors; on one rank or many. Task is a template parameter (see step_position.hpp; images: `procedure`).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/distributed/tune.hpp>
#include <pufferfish/train/arena_parts.hpp>
#include <pufferfish/train/checkpoint.hpp>
#include <pufferfish/train/options.hpp>
#include <pufferfish/train/run_agreement.hpp>
#include <pufferfish/train/run_lines.hpp>
#include <pufferfish/train/run_switch.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Trains a model by synchronous data parallelism (Wang et al., Pufferfish, MLSys 2021, algorithm 1): every
/// rank computes the gradients of its part of the global batch, the gradient arena is averaged in place, and
/// every rank takes the same step. In hybrid mode rank 0 factorizes the model at the start of epoch E and
/// broadcasts it. Batch-norm state and dense layers are kept bit for bit; the optimizer's state starts at
/// zero. switch_options offers other moments of the switch and can carry the optimizer's state over.
///
/// After every step all ranks have the same parameter bits (with run_options::rare: after synchronize()), for
/// any number of threads. Members that train, evaluate, save or load are collective, save_alone() excepted.
///
/// A bucket of parameters is updated as soon as its gradients are averaged. All buckets are updated at the
/// end instead with clipping, nonfinite_policy other than ignore, a compressor of all gradients at once, or a
/// timeout that the program has set (mpi::communicator::set_timeout). The bits are the same.
///
/// The run uses the model's device. On device::gpu (<pufferfish/gpu.hpp>) a step is one CUDA graph if the
/// task's steps repeat (run_options::captured_steps), and the host does not wait for it. Losses and skipped
/// steps in members and observers are some steps old until the end of an epoch, settle(), test() or save().
/// An error in a step is thrown by a later call.
template <class Task, class Comm>
class training_run {
 public:
  using model_type = typename Task::model_type;
  using device_type = typename model_type::device_type;
  /// Scalar type of parameters, gradients and optimizer state.
  using T = detail::stored_t<model_type>;
  /// Options of the run's context: context_options or gpu::context_options.
  using machine_options = typename detail::device_parts<device_type>::machine_options;

  /// `net` is a dense model. All ranks start from rank 0's initial values. Throws state_error on all ranks,
  /// naming the first difference, if their models, data or options differ. Throws state_error if the model is
  /// stored on another device than the run's (call gpu::use_device before both are made). If the model or an
  /// option is invalid on one rank, all ranks throw.
  training_run(model_type net, Comm& comm, Task task, const run_options& options,
               const machine_options& machine = {})
      : net_(std::move(net)),
        resume_lines_(detail::resume_lines(net_, task, options)),
        comm_(detail::agree_on_run(comm, net_, resume_lines_, options)),
        task_(std::move(task)),
        options_(options),
        tune_first_(options.tune_exchange),
        plateau_(options.rate_plateau),
        switch_(options),
        ctx_(with_seed(machine, options.seed)),
        bound_(options),
        steps_(options) {
    detail::all_or_none(*comm_, "training_run", [this] {
      detail::device_parts<device_type>::check_place(ctx_, net_.store().values().data());
      if (options_.mode != training_mode::dense) check_reachable(net_, switch_.policy_at_switch());
      if (options_.mode == training_mode::lowrank) switch_.start_low_rank(ctx_, net_);
    });
    if (options_.mode == training_mode::lowrank) agree_on_lines(*comm_, "network", net_.structure());
    broadcast_state();
    record_.low_rank = options_.mode == training_mode::lowrank;
    bind_to_arenas();
  }

  bool finished() const { return record_.epoch >= options_.epochs; }
  index_t epoch() const { return record_.epoch; }
  index_t steps_per_epoch() const { return task_.steps_per_epoch(); }
  /// Completed steps of the current epoch, and of the whole run.
  index_t step_of_epoch() const { return record_.step; }
  std::uint64_t total_steps() const { return record_.total_steps; }
  bool low_rank() const { return record_.low_rank; }

  const model_type& net() const { return net_; }
  model_type& net() { return net_; }
  Task& task() { return task_; }
  const Task& task() const { return task_; }
  context<device_type>& machine() { return ctx_; }
  const run_options& options() const { return options_; }
  const std::vector<epoch_result>& history() const { return record_.history; }
  const std::optional<switch_result>& switched() const { return record_.switched; }
  /// Mask of the pruned weights (run_options::pruning); nullptr before the pruning.
  const weight_mask* pruned() const { return bound_.pruning.mask(); }

  /// Bytes that one rank passes to the collectives of one step's gradient exchange.
  index_t exchange_bytes() const { return bound_.exchange->payload_bytes(); }
  /// Report of run_options::rare since the run was made or resumed, or since the switch; nullopt without it.
  std::optional<rare_exchange_report> rare_exchanges() const { return bound_.outer.report(); }
  /// Report of the gradient exchange since the run was made or resumed, or since the switch.
  const exchange_report& exchange_done() const { return bound_.exchange->report(); }
  const exchange_plan& plan() const { return bound_.exchange->plan(); }
  /// Steps that were left out because a gradient was not finite (nonfinite_policy::skip).
  std::uint64_t skipped_steps() const { return record_.skipped_steps; }
  /// Number of consecutive latest steps whose loss is not finite on a rank. Waits for all steps. Collective.
  index_t nonfinite_steps() {
    settle();
    bound_.outer.await();
    return static_cast<index_t>(agreement_.compare(*comm_, record_).nonfinite_steps);
  }
  /// Steps of this object that were replays of a CUDA graph.
  std::uint64_t replayed_steps() const { return steps_.replays(); }

  /// Asks all ranks to stop after a common step, about a quarter of a second or one step from now. `reason`:
  /// a number above 0, such as that of a signal; the largest of several is used. Any rank may call this,
  /// between two calls of advance.
  void request_stop(int reason) { agreement_.request_stop(reason); }
  /// Reason of the stop once the ranks have agreed on it, after the same step on all ranks; 0 before that.
  int stop_reason() const { return agreement_.stop_reason(); }

  /// Takes one training step: the switch before it, if due, and the end of the epoch after an epoch's last
  /// step. Does nothing once finished. If ranks are lost, calls observer.on_lost_ranks and rethrows
  /// timeout_error. Throws divergence_error on all ranks as run_options::divergence_steps says, and if both
  /// the test loss at the end of an epoch and the loss of its last step are not finite. If weights are not
  /// finite at the switch, rank 0 throws divergence_error and the others throw state_error.
  void advance(training_observer& observer) {
    if (finished()) return;
    try {
      if (tune_first_) tune_now();
      if (record_.step < steps_per_epoch()) {  // not after save_alone at an epoch's end
        if (record_.step == 0 && switch_.is_due(ctx_, *comm_, task_, net_, record_)) do_switch(observer);
        if (bound_.pruning.is_due(record_)) prune();
        train_step(observer);
        const evaluation& seen = record_.seen;
        observer.on_step({record_.epoch, options_.epochs, record_.step, steps_per_epoch(), record_.low_rank,
                          seen.loss(), seen.accuracy()});
        if (bound_.outer.between_rounds() && (agreement_.is_due() || comm_->size() == 1)) check_condition();
      }
      if (record_.step == steps_per_epoch()) end_epoch(observer);
    } catch (const timeout_error& lost) {
      if (!interrupted_ && !detail::may_lose_ranks(*comm_)) interrupted_ = detail::in_unguarded_step;
      observer.on_lost_ranks(lost);
      throw;
    }
  }

  /// Calls advance until the run has finished or the ranks have agreed to stop.
  void run(training_observer& observer) {
    while (!finished() && stop_reason() == 0) advance(observer);
  }

  /// Waits for all steps taken so far, so that losses and counters of the run include them. Not collective;
  /// returns at once on a CPU.
  void settle() { found_skipped_ += steps_.settle(parts(), record_); }

  /// Makes the state of all ranks equal: exchanges the parameter changes of local steps (run_options::rare)
  /// and averages batch-norm statistics over the ranks. Collective.
  void synchronize() {
    settle();
    bound_.outer.synchronize(ctx_);
    average_buffers();
  }

  /// Evaluates the model on the test set, after synchronize().
  evaluation test() {
    synchronize();
    return task_.test(ctx_, net_, *comm_);
  }

  /// Writes everything that resume() needs: rank 0 writes one temporary file and renames it. `facts` are
  /// stored unchanged. All ranks throw if rank 0 fails. Calls synchronize().
  void save(const std::string& path, std::map<std::string, std::string> facts = {}) {
    synchronize();
    training_record whole = record_;
    whole.seen = reduce(*comm_, record_.seen);
    whole.optimizer_steps = bound_.optimizer->steps();
    std::vector<T> measured;
    switch_.save(*comm_, facts, measured);
    states beside(*comm_, memory(), *bound_.optimizer, bound_.states(), carried(), measured,
                  bound_.outer.runs());
    beside.gather();
    detail::exchange_room<T> room{{}, {}, bound_.pruning.numbers()};
    detail::on_root(*comm_, [&] {
      add_facts(facts, whole);
      save_checkpoint(path, net_, room.list(beside.list()), facts);
      return std::string();
    });
  }

  /// Writes the state of this rank without the others, for observers of lost ranks: parameters and optimizer
  /// state as after the last whole step, and the record. resume() takes the file, and training continues as
  /// after save() with these exceptions: state that the task carries and a compressor's memory are missing
  /// and start afresh; batch-norm statistics are this rank's; losses and accuracies of the epoch are over
  /// this rank's samples. Local. Writes a temporary file and renames it; ranks need different paths. Throws
  /// io_error if the file cannot be written, and state_error if ranks were lost in the middle of the switch
  /// or under a communicator's default timeout (mpi::communicator::may_lose_ranks).
  void save_alone(const std::string& path, std::map<std::string, std::string> facts = {}) {
    if (interrupted_) {
      detail::throw_error<state_error>(
          {path, ": ranks were lost ", interrupted_, "; go on from a checkpoint"});
    }
    found_skipped_ += steps_.settle_alone(parts(), record_);
    bound_.outer.abandon(ctx_);
    training_record mine = record_;
    mine.optimizer_steps = bound_.optimizer->steps();
    mine.saved_by = comm_->rank();
    switch_.add_clock(facts);
    add_facts(facts, mine);
    detail::optimizer_mirror<T> of_optimizer(memory(), *bound_.optimizer);
    detail::exchange_room<T> room{{}, {}, bound_.pruning.numbers()};
    save_checkpoint(path, net_, room.list(of_optimizer.list()), facts);
  }

  /// Restores the state at save(); training then continues bit for bit. This run must have the same model,
  /// data, task and options, and as many ranks if the task carries state or gradients are compressed. Uses
  /// the file's exchange plan if it was made for as many ranks. Throws io_error for a file that is not such a
  /// checkpoint, and state_error, with both values, if it was made on other data, with other layers or with
  /// other options. In both cases the run is unchanged.
  void resume(const std::string& path) {
    settle();
    model_type loaded = net_;
    std::optional<checkpoint_file> file;  // open on rank 0 only
    const std::string text = detail::on_root(*comm_, [&] {
      file.emplace(open_checkpoint(path));
      detail::check_same_lines(path, file->fact("training.options"), resume_lines_, file->library_version());
      if (plateau_) static_cast<void>(file->fact("training.plateau"));
      file->restore(loaded);
      return file->fact("training.record");
    });
    const auto fact = [&](const char* name) { return detail::shared_fact(*comm_, file, name); };
    const std::string statistics = fact(switch_type::statistics_fact);
    training_record record = training_record::from_text(text, path);
    // Otherwise only parameters and rank 0's optimizer: save_alone, or `rare` with another number of ranks.
    const bool whole = record.saved_by < 0 && (!options_.rare || fact("training.ranks") == ranks_text());
    record.saved_by = -1;
    const std::optional<exchange_plan> plan =
        detail::usable_plan(fact("training.exchange"), path, comm_->size());
    detail::share_structure(*comm_, loaded);
    optimizer_type restored(switch_.make_target(loaded), options_.optimizer);
    detail::exchange_room<T> room{
        detail::make_run_compressor(*comm_, loaded.store(), options_, record.low_rank,
                                    plan ? plan : options_.exchange.plan),
        bound_.outer.momentum_room(options_, loaded.store()),
        fact(pruning_type::fact).empty() ? std::vector<T>() : pruning_type::room(loaded.store())};
    std::vector<T> measured = switch_.prepare(statistics, path, loaded);
    states beside(*comm_, memory(), restored, room.states(), carried(), measured, options_.rare.has_value());
    detail::on_root(*comm_, [&] {
      if (whole) beside.check_ranks(*file);
      file->restore(loaded, room.list(whole ? beside.list() : beside.list_optimizer()));
      return std::string();
    });
    pruning_type pruning(options_);
    pruning.restore(*comm_, loaded.store(), room.mask);
    unbind();
    bound_.pruning = pruning;
    net_ = std::move(loaded);
    bound_.optimizer.emplace(std::move(restored));
    bound_.decay = switch_.make_decay(net_);
    if (plan) options_.exchange.plan = plan;
    broadcast_state();
    bound_.make_exchange(net_.store(), *comm_, options_, std::move(room.compressor));
    // Tuning makes a new exchange, which would discard the restored compressor state.
    tune_first_ = tune_first_ && !plan && !beside.has_compressed();
    beside.spread(whole);
    if (whole) bound_.outer.set_momentum(room.outer_momentum);
    bound_.outer.set_steps(detail::steps_from(fact(bound_.outer.fact), path));
    switch_.restore(fact(switch_type::clock_fact), statistics, path, net_, std::move(measured));
    bound_.optimizer->set_steps(record.optimizer_steps);
    bound_.exchange->set_steps(record.optimizer_steps);  // neither counts skipped steps
    if (plateau_) plateau_->set_state(fact("training.plateau"));
    record_ = record;
    if (comm_->rank() != 0) record_.seen = {};
    found_skipped_ = 0;
    ctx_.tape().clear();
    steps_.set_state(fact("training.steps"), path);
    start_steps();
  }

 private:
  using all_parts = detail::run_parts<Task, Comm>;
  using optimizer_type = typename all_parts::optimizer_type;
  using pruning_type = detail::run_pruning<T>;
  using switch_type = detail::run_switch<Task, Comm>;
  using states = detail::run_states<T, Comm, typename model_type::value_type>;

  static machine_options with_seed(machine_options machine, std::uint64_t seed) {
    machine.seed = seed;
    return machine;
  }

  static memory_source& memory() { return memory_of<device_type>::source(); }
  all_parts parts() { return bound_.parts(ctx_, task_, net_, *comm_, options_); }

  // State that the task carries from step to step on this rank, in the model's compute type; nullopt: none.
  using carried_type = typename model_type::value_type;
  std::optional<std::span<carried_type>> carried() {
    if constexpr (requires { task_.carried(); }) return task_.carried();
    return std::nullopt;
  }

  std::string ranks_text() const { return std::to_string(comm_->size()); }

  // Adds the text entries of a checkpoint.
  void add_facts(std::map<std::string, std::string>& facts, const training_record& record) const {
    facts["training.record"] = record.to_text();
    facts["training.options"] = resume_lines_;
    facts["training.ranks"] = ranks_text();
    bound_.add_facts(facts);
    if (plateau_) facts["training.plateau"] = plateau_->state();
    if (const std::string state = steps_.state(); !state.empty()) facts["training.steps"] = state;
  }

  void broadcast_state() {
    detail::broadcast_from(*comm_, 0, memory(), net_.store().values());
    detail::broadcast_from(*comm_, 0, memory(), net_.store().buffers());
    net_.store().round();
  }

  // Makes an optimizer and an exchange for the model's current arenas.
  void bind_to_arenas() {
    unbind();
    bound_.optimizer.emplace(switch_.make_target(net_), options_.optimizer);
    bound_.decay = switch_.make_decay(net_);
    start_exchange();
  }
  void start_exchange() {
    bound_.make_exchange(net_.store(), *comm_, options_, record_.low_rank);
    start_steps();
  }
  void start_steps() {
    bound_.set_epoch(record_.epoch, learning_rate(record_.step));  // the rate of the epoch's first step
    steps_.start(parts(), record_);
  }
  void unbind() {
    steps_.stop();
    bound_.drop_exchange();
  }

  // A device's results lag. Waits for them only if ranks compare or the limit may be reached. Collective.
  detail::run_condition check_condition() {
    const std::int64_t most = options_.divergence_steps;
    const std::uint64_t unknown = record_.total_steps - record_.finite_steps;
    if (comm_->size() > 1 || (most > 0 && unknown >= static_cast<std::uint64_t>(most))) settle();
    bound_.outer.await();
    return agreement_.check(*comm_, record_, most, learning_rate(1));
  }

  void do_switch(training_observer& observer) {
    detail::run_clock::time_point start = detail::run_clock::now();
    synchronize();
    switch_result result{
        .epoch = record_.epoch, .factors = {}, .why = switch_.why(), .stages = switch_.stages()};
    result.before = switch_.test(parts(), start);
    switch_.gather(*comm_, net_);
    const auto kept = switch_.remember(net_, *bound_.optimizer);
    detail::on_root(*comm_, [&] {
      try {
        result.factors = switch_.factorize(ctx_, task_, net_);
      } catch (const value_error& e) {
        detail::check_finite<T>(memory(), net_.store().values(), record_, e);
        throw;
      }
      interrupted_ = detail::in_switch;
      return std::string();
    });
    interrupted_ = detail::in_switch;
    detail::share_structure(*comm_, net_);
    broadcast_state();
    record_.low_rank = true;
    bound_.pruning.forget();
    bind_to_arenas();
    switch_.carry(kept, ctx_, *comm_, net_, *bound_.optimizer);
    if (plateau_) plateau_->forget_best();
    result.after = switch_.test(parts(), start);
    if (switch_.estimate(parts(), record_, [&] { average_buffers(); })) {
      if (switch_.moves_arenas()) bind_to_arenas();
      result.estimated = switch_.test(parts(), start);
    }
    result.milliseconds = detail::milliseconds_since(start);
    record_.switched = result;
    interrupted_ = nullptr;
    check_ranks_agree("after the switch");
    observer.on_switch(result);
  }

  // Parameters keep their order, so the states of optimizer and compressor stay valid.
  void end_annealing() {
    const optimizer_memory<T> of_optimizer(net_, *bound_.optimizer);
    const detail::carried_exchanges<T> of_exchanges(bound_);
    detach_residuals(net_);
    bind_to_arenas();
    of_optimizer.carry(net_, *bound_.optimizer);
    of_exchanges.carry(bound_);
  }

  void prune() {
    bound_.pruning.prune(parts());
    unbind();
    start_exchange();
  }

  void tune_now() {
    options_.exchange.plan = tune(*comm_);
    unbind();
    start_exchange();
    tune_first_ = false;
  }

  void train_step(training_observer& observer) {
    const detail::run_clock::time_point start = detail::run_clock::now();
    const double rate = learning_rate();
    ctx_.set_mode(run_mode::training);
    const step_position at{record_.epoch, record_.step, record_.total_steps};
    switch_.take_step(ctx_, *comm_, net_, record_, steps_per_epoch(), [&](bool watched) {
      if (watched) settle();
      const std::int64_t before = record_.seen.count;
      found_skipped_ += steps_.take(parts(), at, rate, record_);
      bound_.outer.step_done(ctx_, rate);
      if (watched) settle();
      return static_cast<double>(record_.seen.count - before);
    });
    tell_skipped(observer);
    ++record_.step;
    ++record_.total_steps;
    step_ms_.push_back(detail::milliseconds_since(start));
  }

  void tell_skipped(training_observer& observer) {
    for (; found_skipped_ > 0; --found_skipped_) {
      observer.on_skipped_step(bound_.exchange->nonfinite().value_or(nonfinite_gradient{}));
    }
  }

  double learning_rate(index_t steps_back = 0) const {
    return detail::rate_of_step(options_, record_, steps_per_epoch(), steps_back) *
           (plateau_ ? plateau_->factor() : 1.0);
  }

  void end_epoch(training_observer& observer) {
    const detail::run_clock::time_point start = detail::run_clock::now();
    settle();
    if (!step_ms_.empty())
      step_ms_.back() += detail::milliseconds_since(start);  // settle() has waited for the epoch's steps
    tell_skipped(observer);
    synchronize();
    epoch_result result =
        detail::epoch_seen(record_, learning_rate(1), reduce(*comm_, record_.seen), step_ms_);
    if (switch_.annealing_ends(record_)) end_annealing();
    const std::int64_t nonfinite = check_condition().nonfinite_steps;
    check_ranks_agree("after epoch " + std::to_string(record_.epoch));
    const evaluation tested = test();
    if (options_.divergence_steps > 0 && nonfinite > 0 && !std::isfinite(tested.loss())) {
      detail::throw_divergence(nonfinite, record_, learning_rate(),
                               ", and the test loss is not finite either");
    }
    result.test_loss = tested.loss();
    result.test_accuracy = tested.accuracy();
    record_.history.push_back(result);
    if (plateau_) plateau_->observe(result.test_loss);
    ++record_.epoch;
    record_.step = 0;
    record_.seen = {};
    record_.exchange_ms = 0.0;
    start_steps();
    step_ms_.clear();
    observer.on_epoch(result);
  }

  // Throws state_error on all ranks unless their parameters are bit-identical.
  void check_ranks_agree(const std::string& when) {
    agree(*comm_, "parameters " + when, parameter_digest(net_));
  }

  void average_buffers() { detail::average_buffers(*comm_, memory(), net_.store().buffers()); }

  model_type net_;
  std::string resume_lines_;  // of the dense model
  Comm* comm_;
  Task task_;
  run_options options_;
  bool tune_first_;                    // tune before the next step
  const char* interrupted_ = nullptr;  // why save_alone must refuse; nullptr: it need not
  std::optional<plateau> plateau_;
  switch_type switch_;
  context<device_type> ctx_;
  detail::arena_parts<Task, Comm> bound_;
  detail::run_steps<Task, Comm, device_type> steps_;
  training_record record_;
  detail::run_agreement agreement_;
  int found_skipped_ = 0;  // skipped steps that were not yet reported to the observer
  std::vector<double> step_ms_;
};

PUFFERFISH_NAMESPACE_END
