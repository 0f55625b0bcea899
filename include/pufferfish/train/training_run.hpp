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
#include <pufferfish/train/run/data.hpp>
#include <pufferfish/train/run/files.hpp>

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
/// \code
/// language_task<lstm_lm<float>> task(net, train, valid, {.streams = 20}, comm.rank(), comm.size());
/// training_run<language_task<lstm_lm<float>>, mpi::communicator> run(net, comm, std::move(task), options);
/// training_observer observer;  // or a derived class that shows progress
/// while (!run.finished()) run.advance(observer);
/// \endcode
template <class Task, class Comm>
class training_run {
 public:
  using model_type = typename Task::model_type;
  using device_type = typename model_type::device_type;
  /// Scalar type of parameters, gradients and optimizer state.
  using T = detail::stored_t<model_type>;
  /// Options of the run's context: context_options or gpu::context_options.
  using machine_options = typename detail::run_data<Task, Comm>::machine_options;

  /// `net` is a dense model. All ranks start from rank 0's initial values. Throws state_error on all ranks,
  /// naming the first difference, if their models, data or options differ. Throws state_error if the model is
  /// stored on another device than the run's (call gpu::use_device before both are made). If the model or an
  /// option is invalid on one rank, all ranks throw.
  training_run(model_type net, Comm& comm, Task task, const run_options& options,
               const machine_options& machine = {})
      : run_(std::move(net), comm, std::move(task), options, machine) {}

  /// Whether all epochs are done.
  bool finished() const { return run_.record.epoch >= run_.options.epochs; }
  /// Number of the current epoch, 0-based; run_options::epochs once the run has finished.
  index_t epoch() const { return run_.record.epoch; }
  /// Number of steps of an epoch, the same on all ranks.
  index_t steps_per_epoch() const { return run_.task.steps_per_epoch(); }
  /// Number of completed steps of the current epoch.
  index_t step_of_epoch() const { return run_.record.step; }
  /// Number of completed steps of the whole run.
  std::uint64_t total_steps() const { return run_.record.total_steps; }
  /// Whether the model is factorized: from the switch on, in training_mode::lowrank from the start.
  bool low_rank() const { return run_.record.low_rank; }

  /// This rank's model. Its parameters must stay equal on all ranks; a new layout of its arenas makes the
  /// run's optimizer and exchange invalid.
  const model_type& net() const { return run_.net; }
  model_type& net() { return run_.net; }
  /// Data and loss of this rank.
  Task& task() { return run_.task; }
  const Task& task() const { return run_.task; }
  /// Context of this rank: threads, tape and scratch memory.
  context<device_type>& machine() { return run_.ctx; }
  const run_options& options() const { return run_.options; }
  /// Results of all completed epochs, in order. resume() restores those of the checkpoint.
  const std::vector<epoch_result>& history() const { return run_.record.history; }
  /// Report of the switch from dense to low rank; empty before it. Checkpoints contain it.
  const std::optional<switch_result>& switched() const { return run_.record.switched; }
  /// Mask of the pruned weights (run_options::pruning); nullptr before the pruning.
  const weight_mask* pruned() const { return run_.bound.pruning.mask(); }

  /// Bytes that one rank passes to the collectives of one step's gradient exchange.
  index_t exchange_bytes() const { return run_.bound.exchange->payload_bytes(); }
  /// Report of run_options::rare since the run was made or resumed, or since the switch; nullopt without it.
  std::optional<rare_exchange_report> rare_exchanges() const { return run_.bound.outer.report(); }
  /// Report of the gradient exchange since the run was made or resumed, or since the switch.
  const exchange_report& exchange_done() const { return run_.bound.exchange->report(); }
  /// Plan of the gradient exchange: its buckets and all-reduce algorithms.
  const exchange_plan& plan() const { return run_.bound.exchange->plan(); }
  /// Number of steps that were left out because a gradient was not finite (nonfinite_policy::skip).
  std::uint64_t skipped_steps() const { return run_.record.skipped_steps; }
  /// Number of consecutive latest steps whose loss is not finite on a rank. Waits for all steps. Collective.
  index_t nonfinite_steps() {
    settle();
    run_.bound.outer.await();
    return static_cast<index_t>(run_.agreement.compare(*run_.comm, run_.record).nonfinite_steps);
  }
  /// Number of steps of this object that were replays of a CUDA graph.
  std::uint64_t replayed_steps() const { return run_.steps.replays(); }

  /// Asks all ranks to stop after a common step, about a quarter of a second or one step from now. `reason`:
  /// a number above 0, such as that of a signal; the largest of several is used. Any rank may call this,
  /// between two calls of advance.
  void request_stop(int reason) { run_.agreement.request_stop(reason); }
  /// Reason of the stop once the ranks have agreed on it, after the same step on all ranks; 0 before that.
  int stop_reason() const { return run_.agreement.stop_reason(); }

  /// Takes one training step: the switch before it, if due, and the end of the epoch after an epoch's last
  /// step. Does nothing once finished. Throws state_error before the first step of a network whose
  /// weights are all zero (CPU). If ranks are lost, calls observer.on_lost_ranks and rethrows
  /// timeout_error. Throws divergence_error on all ranks as run_options::divergence_steps says, and if both
  /// the test loss at the end of an epoch and the loss of its last step are not finite. If weights are not
  /// finite at the switch, rank 0 throws divergence_error and the others throw state_error.
  void advance(training_observer& observer) {
    if (finished()) return;
    run_.check_initialized();
    try {
      if (run_.tune_first) tune_now();
      if (run_.record.step < steps_per_epoch()) {  // not after save_alone at an epoch's end
        if (run_.record.step == 0 &&
            run_.switching.is_due(run_.ctx, *run_.comm, run_.task, run_.net, run_.record))
          do_switch(observer);
        if (run_.bound.pruning.is_due(run_.record)) prune();
        train_step(observer);
        const evaluation& seen = run_.record.seen;
        observer.on_step({run_.record.epoch, run_.options.epochs, run_.record.step, steps_per_epoch(),
                          run_.record.low_rank, seen.loss(), seen.accuracy()});
        if (run_.bound.outer.between_rounds() && (run_.agreement.is_due() || run_.comm->size() == 1))
          run_.check_condition();
      }
      if (run_.record.step == steps_per_epoch()) end_epoch(observer);
    } catch (const timeout_error& lost) {
      if (!run_.interrupted && !detail::may_lose_ranks(*run_.comm))
        run_.interrupted = detail::in_unguarded_step;
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
  void settle() { run_.settle(); }

  /// Makes the state of all ranks equal: exchanges the parameter changes of local steps (run_options::rare)
  /// and averages batch-norm statistics over the ranks. Collective.
  void synchronize() { run_.synchronize(); }

  /// Evaluates the model on the test set, after synchronize().
  evaluation test() {
    synchronize();
    return run_.task.test(run_.ctx, run_.net, *run_.comm);
  }

  /// Writes everything that resume() needs: rank 0 writes one temporary file and renames it. `facts` are
  /// stored unchanged. All ranks throw if rank 0 fails. Calls synchronize().
  void save(const std::string& path, std::map<std::string, std::string> facts = {}) {
    detail::save_run(run_, path, std::move(facts));
  }

  /// Writes the state of this rank without the others, for observers of lost ranks: parameters and optimizer
  /// state as after the last whole step, and the record. resume() takes the file, and training continues as
  /// after save() with these exceptions: state that the task carries and a compressor's memory are missing
  /// and start afresh; batch-norm statistics are this rank's; losses and accuracies of the epoch are over
  /// this rank's samples. Local. Writes a temporary file and renames it; ranks need different paths. Throws
  /// io_error if the file cannot be written, and state_error if ranks were lost in the middle of the switch
  /// or under a communicator's default timeout (mpi::communicator::may_lose_ranks).
  void save_alone(const std::string& path, std::map<std::string, std::string> facts = {}) {
    detail::save_run_alone(run_, path, std::move(facts));
  }

  /// Restores the state at save(); training then continues bit for bit. This run must have the same model,
  /// data, task and options, and as many ranks if the task carries state or gradients are compressed. Uses
  /// the file's exchange plan if it was made for as many ranks. Throws io_error for a file that is not such a
  /// checkpoint, and state_error, with both values, if it was made on other data, with other layers or with
  /// other options. In both cases the run is unchanged.
  void resume(const std::string& path) { detail::resume_run(run_, path); }

 private:
  // The switch from dense to low rank, at the start of an epoch. Collective.
  void do_switch(training_observer& observer) {
    detail::run_clock::time_point start = detail::run_clock::now();
    synchronize();
    switch_result result{.epoch = run_.record.epoch,
                         .factors = {},
                         .why = run_.switching.why(),
                         .stages = run_.switching.stages()};
    result.before = run_.switching.test(run_.parts(), start);
    run_.switching.gather(*run_.comm, run_.net);
    const auto kept = run_.switching.remember(run_.net, *run_.bound.optimizer);
    detail::on_root(*run_.comm, [&] {
      try {
        result.factors = run_.switching.factorize(run_.ctx, run_.task, run_.net);
      } catch (const value_error& e) {
        detail::check_finite<T>(run_.memory(), run_.net.store().values(), run_.record, e);
        throw;
      }
      run_.interrupted = detail::in_switch;
      return std::string();
    });
    run_.interrupted = detail::in_switch;
    detail::share_structure(*run_.comm, run_.net);
    run_.broadcast_state();
    run_.record.low_rank = true;
    run_.bound.pruning.forget();
    run_.bind_to_arenas();
    run_.switching.carry(kept, run_.ctx, *run_.comm, run_.net, *run_.bound.optimizer);
    if (run_.rate_plateau) run_.rate_plateau->forget_best();
    result.after = run_.switching.test(run_.parts(), start);
    if (run_.switching.estimate(run_.parts(), run_.record, [&] { run_.average_buffers(); })) {
      if (run_.switching.moves_arenas()) {  // the batch norms between the factors have parameters
        run_.bind_to_arenas();
        result.factors.parameters_after = run_.net.parameter_count();
      }
      result.estimated = run_.switching.test(run_.parts(), start);
    }
    result.milliseconds = detail::milliseconds_since(start);
    run_.record.switched = result;
    run_.interrupted = nullptr;
    run_.check_ranks_agree("after the switch");
    observer.on_switch(result);
  }

  // Parameters keep their order, so the states of optimizer and compressor stay valid.
  void end_annealing() {
    const optimizer_memory<T> of_optimizer(run_.net, *run_.bound.optimizer);
    const detail::carried_exchanges<T> of_exchanges(run_.bound);
    detach_residuals(run_.net);
    run_.bind_to_arenas();
    of_optimizer.carry(run_.net, *run_.bound.optimizer);
    of_exchanges.carry(run_.bound);
  }

  // Prunes the network and exchanges only the remaining gradients from now on. Collective.
  void prune() {
    run_.bound.pruning.prune(run_.parts());
    run_.unbind();
    run_.start_exchange();
  }

  // Tunes the exchange, which is made anew. Collective.
  void tune_now() {
    run_.options.exchange.plan = tune(*run_.comm);
    run_.unbind();
    run_.start_exchange();
    run_.tune_first = false;
  }

  // One step: batch, passes, exchange, update, and the comparison of ranks if it is due. Collective.
  void train_step(training_observer& observer) {
    const detail::run_clock::time_point start = detail::run_clock::now();
    const double rate = run_.learning_rate();
    run_.ctx.set_mode(run_mode::training);
    const step_position at{run_.record.epoch, run_.record.step, run_.record.total_steps};
    run_.switching.take_step(run_.ctx, *run_.comm, run_.net, run_.record, steps_per_epoch(),
                             [&](bool watched) {
                               if (watched) settle();
                               const std::int64_t before = run_.record.seen.count;
                               run_.found_skipped += run_.steps.take(run_.parts(), at, rate, run_.record);
                               run_.bound.outer.step_done(run_.ctx, rate);
                               if (watched) settle();
                               return static_cast<double>(run_.record.seen.count - before);
                             });
    tell_skipped(observer);
    ++run_.record.step;
    ++run_.record.total_steps;
    run_.step_ms.push_back(detail::milliseconds_since(start));
  }

  // Reports skipped steps that the observer does not know yet.
  void tell_skipped(training_observer& observer) {
    for (; run_.found_skipped > 0; --run_.found_skipped) {
      observer.on_skipped_step(run_.bound.exchange->nonfinite().value_or(nonfinite_gradient{}));
    }
  }

  // Ends an epoch: waits for its steps, makes the ranks equal, tests and reports. Collective.
  void end_epoch(training_observer& observer) {
    const detail::run_clock::time_point start = detail::run_clock::now();
    settle();
    if (!run_.step_ms.empty())
      run_.step_ms.back() += detail::milliseconds_since(start);  // settle() has waited for the epoch's steps
    tell_skipped(observer);
    synchronize();
    epoch_result result = detail::epoch_seen(run_.record, run_.learning_rate(1),
                                             reduce(*run_.comm, run_.record.seen), run_.step_ms);
    result.bytes_per_step = exchange_bytes();
    if (run_.switching.annealing_ends(run_.record)) end_annealing();
    run_.bound.shrink.run(run_.bound, run_.net, run_.record, [this] { run_.bind_to_arenas(); });
    const std::int64_t nonfinite = run_.check_condition().nonfinite_steps;
    run_.check_ranks_agree("after epoch " + std::to_string(run_.record.epoch));
    const evaluation tested = test();
    if (run_.options.divergence_steps > 0 && nonfinite > 0 && !std::isfinite(tested.loss())) {
      detail::throw_divergence(nonfinite, run_.record, run_.learning_rate(),
                               ", and the test loss is not finite either");
    }
    result.test_loss = tested.loss();
    result.test_accuracy = tested.accuracy();
    result.test_top5 = tested.top5_accuracy();
    result.parameters = run_.net.parameter_count();
    if constexpr (requires { run_.task.macs(run_.net); }) result.macs = run_.task.macs(run_.net);
    run_.record.history.push_back(result);
    if (run_.rate_plateau) run_.rate_plateau->observe(result.test_loss);
    ++run_.record.epoch;
    run_.record.step = 0;
    run_.record.seen = {};
    run_.record.exchange_ms = 0.0;
    run_.start_steps();
    run_.step_ms.clear();
    observer.on_epoch(result);
  }

  detail::run_data<Task, Comm> run_;
};

PUFFERFISH_NAMESPACE_END
