// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the data of a training run, and the operations from which members of training_run are composed.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/train/options.hpp>
#include <pufferfish/train/progress_record.hpp>
#include <pufferfish/train/run/agreement.hpp>
#include <pufferfish/train/run/arena_parts.hpp>
#include <pufferfish/train/run/lines.hpp>
#include <pufferfish/train/run/switch.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Data of a run. `bound` refers to the arenas of `net`: after a change of the arenas, bind_to_arenas() or
/// start_exchange() makes it again.
template <class Task, class Comm>
struct run_data {
  using model_type = typename Task::model_type;
  using device_type = typename model_type::device_type;
  using T = stored_t<model_type>;
  using machine_options = typename device_parts<device_type>::machine_options;
  using all_parts = run_parts<Task, Comm>;
  using switch_type = run_switch<Task, Comm>;

  /// Prepares a run; arguments and errors are those of training_run's constructor. Collective.
  run_data(model_type dense, Comm& ranks, Task of, const run_options& how, const machine_options& machine)
      : net(std::move(dense)),
        resume_lines(detail::resume_lines(net, of, how)),
        comm(agree_on_run(ranks, net, resume_lines, how)),
        task(std::move(of)),
        options(how),
        tune_first(how.tune_exchange),
        rate_plateau(how.rate_plateau),
        switching(how),
        ctx(with_seed(machine, how.seed)),
        bound(how),
        steps(how) {
    all_or_none(*comm, "training_run", [this] {
      check_place_of_task();
      check_first_step();
      device_parts<device_type>::check_place(ctx, net.store().values().data());
      if (options.mode != training_mode::dense) check_reachable(net, switching.policy_at_switch());
      if (options.mode == training_mode::lowrank) switching.start_low_rank(ctx, net);
    });
    if (options.mode == training_mode::lowrank) agree_on_lines(*comm, "network", net.structure());
    broadcast_state();
    record.low_rank = options.mode == training_mode::lowrank;
    bind_to_arenas();
  }

  /// Throws value_error for a task that was made for another rank, or for another number of ranks.
  void check_place_of_task() const {
    if constexpr (requires { task.rank(), task.ranks(); }) {
      if (task.rank() == comm->rank() && task.ranks() == comm->size()) return;
      throw_error<value_error>({"training_run: the task is for rank ", task.rank(), " of ", task.ranks(),
                                ", this is rank ", comm->rank(), " of ", comm->size()});
    }
  }
  /// Throws value_error for a first step after the last one of the run.
  void check_first_step() const {
    const auto epoch = static_cast<std::uint64_t>(std::max<index_t>(1, task.steps_per_epoch()));
    if (options.first_step <= epoch * static_cast<std::uint64_t>(options.epochs)) return;
    throw_error<value_error>({"training_run: first_step ", options.first_step, " is after the last of ",
                              options.epochs, " epochs of ", epoch, " steps"});
  }

  /// Memory of the arenas: the host's, or the device's.
  static memory_source& memory() { return memory_of<device_type>::source(); }
  /// References to the objects that a step works with; valid until bind_to_arenas() or unbind().
  all_parts parts() { return bound.parts(ctx, task, net, *comm, options); }

  /// State that the task carries from step to step on this rank, in the model's compute type; nullopt: none.
  std::optional<std::span<typename model_type::value_type>> carried() {
    if constexpr (requires { task.carried(); }) return task.carried();
    return std::nullopt;
  }

  /// Throws state_error before the first step of a network whose weights are all zero: it would not learn.
  /// Biases and norms do not count, since a norm starts at 1. Not on a device, whose values are in other
  /// memory.
  void check_initialized() const {
    if (!std::is_same_v<device_type, device::cpu> || record.total_steps != options.first_step) return;
    bool any_weight = false;
    for (const auto& entry : net.store().parameters()) {
      if (entry.thing->role() != parameter_role::weight) continue;
      const auto values = entry.thing->values();
      if (std::any_of(values.begin(), values.end(), [](T value) { return value != T(); })) return;
      any_weight = true;
    }
    if (!any_weight) return;
    throw_error<state_error>(
        {"training_run: all weights are zero before the first step: call initialize(seed) of the network, or "
         "load weights, before the run is made"});
  }

  /// Copies the parameters and buffers of rank 0 to all ranks. Collective.
  void broadcast_state() {
    broadcast_from(*comm, 0, memory(), net.store().values());
    broadcast_from(*comm, 0, memory(), net.store().buffers());
    net.store().round();
  }
  /// Averages batch-norm statistics over the ranks. Collective.
  void average_buffers() { detail::average_buffers(*comm, memory(), net.store().buffers()); }

  /// Makes an optimizer and an exchange for the model's current arenas. The optimizer starts without state.
  /// Collective.
  void bind_to_arenas() {
    unbind();
    bound.optimizer.emplace(switching.make_target(net), options.optimizer);
    bound.decay = switching.make_decay(net);
    start_exchange();
  }
  /// Makes the exchange anew and starts the steps; the optimizer stays. Collective.
  void start_exchange() {
    bound.make_exchange(net.store(), *comm, options, record.low_rank);
    start_steps();
  }
  /// Starts steps at the record's position.
  void start_steps() {
    bound.set_epoch(record.epoch, learning_rate(record.step));  // the rate of the epoch's first step
    steps.start(parts(), record);
  }
  /// Ends the steps and destroys both exchanges, so that the arenas may move. The optimizer stays.
  void unbind() {
    steps.stop();
    // On a device the count of the optimizer's steps refers to the exchange's flag of skipped steps.
    if (bound.optimizer) bound.optimizer->set_steps(bound.optimizer->steps());
    bound.drop_exchange();
  }

  /// Waits for all steps and adds their results to the record (training_run::settle).
  void settle() { found_skipped += steps.settle(parts(), record); }
  /// Makes the ranks' parameters and buffers equal after all steps (training_run::synchronize).
  void synchronize() {
    settle();
    bound.outer.synchronize(ctx);
    average_buffers();
  }

  /// Compares the ranks' conditions. A device's results lag: they are awaited only if ranks compare or the
  /// limit may be reached. Collective.
  run_condition check_condition() {
    const std::int64_t most = options.divergence_steps;
    const std::uint64_t unknown = record.total_steps - record.finite_steps;
    if (comm->size() > 1 || (most > 0 && unknown >= static_cast<std::uint64_t>(most))) settle();
    bound.outer.await();
    return agreement.check(*comm, record, most, learning_rate(1));
  }
  /// Throws state_error on all ranks unless their parameters are bit-identical. Collective.
  void check_ranks_agree(const std::string& when) {
    agree(*comm, "parameters " + when, parameter_digest(net));
  }

  /// Learning rate of the step that is `steps_back` before the record's.
  double learning_rate(index_t steps_back = 0) const {
    return rate_of_step(options, record, task.steps_per_epoch(), steps_back) *
           (rate_plateau ? rate_plateau->factor() : 1.0);
  }

  model_type net;                     ///< the network that is trained
  std::string resume_lines;           ///< lines of the dense model and the options; see detail::resume_lines
  Comm* comm;                         ///< communicator of all ranks
  Task task;                          ///< data and loss
  run_options options;                ///< checked by run_switch's constructor
  bool tune_first;                    ///< whether the exchange is tuned before the next step
  const char* interrupted = nullptr;  ///< reason for which save_alone throws; nullptr: it does not
  std::optional<plateau> rate_plateau;       ///< factor of the learning rate; empty: none
  switch_type switching;                     ///< decision and measurements of the switch
  context<device_type> ctx;                  ///< tape and scratch memory of all passes
  arena_parts<Task, Comm> bound;             ///< parts that refer to the arenas
  run_steps<Task, Comm, device_type> steps;  ///< the form of a step on this device
  training_record record = first_record(options, task.steps_per_epoch());  ///< position and results
  run_agreement agreement;      ///< comparison of ranks between steps
  int found_skipped = 0;        ///< number of skipped steps that were not yet reported to the observer
  std::vector<double> step_ms;  ///< durations of the epoch's steps in ms

 private:
  // The machine's options with the seed of the run, which dropout and augmentation use.
  static machine_options with_seed(machine_options machine, std::uint64_t seed) {
    machine.seed = seed;
    return machine;
  }
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
