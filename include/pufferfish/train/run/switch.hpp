// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `run_switch`: parts of a training run's switch from dense to low rank: the decision, the
/// measurements before the factorization, and the optimizer and batch norms after the factorization.

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/nn/measure/measure_layers.hpp>
#include <pufferfish/nn/measure/profile_stages.hpp>
#include <pufferfish/nn/measure/stable_ranks.hpp>
#include <pufferfish/nn/switch/annealing.hpp>
#include <pufferfish/train/carry_state.hpp>
#include <pufferfish/train/estimate_norms.hpp>
#include <pufferfish/train/host_mirror.hpp>
#include <pufferfish/train/rank_states.hpp>
#include <pufferfish/train/run/states.hpp>
#include <pufferfish/train/run/steps.hpp>
#include <pufferfish/train/switch_moment.hpp>
#include <pufferfish/train/switch_statistics.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The policy with plain truncation, the only one that needs no statistics.
inline factorize_policy unmeasured(factorize_policy policy) {
  policy.truncate = truncation::plain;
  return policy;
}

/// The switch of a run. Calls, in order: is_due at the start of an epoch; if the switch is due: gather,
/// remember, factorize on rank 0, carry, estimate; then take_step. The options are checked by the
/// constructor.
template <class Task, class Comm>
class run_switch {
  using all_parts = run_parts<Task, Comm>;
  using model_type = typename all_parts::model_type;
  using device_type = typename all_parts::device_type;
  using T = typename all_parts::value_type;
  using device_work = device_parts<device_type>;
  using decay_type = frobenius_decay<T, device_type>;
  static constexpr bool on_cpu = std::is_same_v<device_type, device::cpu>;

 public:
  /// Throws value_error for options out of range, and for options that the device does not have.
  explicit run_switch(const run_options& options)
      : options_((options.validate(), options)),
        clock_(options.switching.moment.value_or(fixed_epoch{options.warmup_epochs})),
        statistics_(options) {
    if (options.switching.anneal_epochs > 0 && !on_cpu) {
      throw_error<value_error>({"switch: anneal_epochs ", options.switching.anneal_epochs,
                                " on a device; layers with residuals compute on the CPU only"});
    }
  }

  /// The policy of the factorization at the switch. It counts the batch norms that estimate() inserts.
  factorize_policy policy_at_switch() const {
    factorize_policy result = options_.factorize;
    if (options_.mode == training_mode::hybrid && moves_arenas()) result.factor_norms = true;
    return result;
  }

  /// Starts a run that trains at low rank from the beginning: makes the layers that the policy chooses
  /// without statistics low-rank, with random factors.
  void start_low_rank(context<device_type>& ctx, model_type& net) const {
    const factorize_policy policy = unmeasured(options_.factorize);
    if (policy.budget || needs_spectrum(policy.rank)) {
      // These ranks depend on singular values, here those of the random initial weights.
      model_type trial = net;
      apply_ranks(net, device_work::factorize(trial, policy, ctx, nullptr).ranks());
    } else {
      apply_ranks(net, planned_ranks(net, policy));
    }
    net.initialize(options_.seed);
  }

  /// Calls take_step() for one training step. Before it: a soft projection, if one is due, and the share of
  /// residuals. During it: the statistics are taken, if this may be one of the last S dense steps. take_step:
  /// see switch_statistics::run. Collective.
  template <class TakeStep>
  void take_step(context<device_type>& ctx, Comm& comm, model_type& net, const training_record& at,
                 index_t steps_per_epoch, TakeStep&& take_step) {
    const index_t every = options_.switching.project_every;
    const bool dense = options_.mode == training_mode::hybrid && !at.low_rank;
    if (dense && every > 0 && at.total_steps > 0 && at.total_steps % static_cast<std::uint64_t>(every) == 0) {
      project(ctx, comm, net);
    }
    if (const index_t epochs = annealing_epochs(at); epochs > 0) {
      const index_t done = (at.epoch - at.switched->epoch) * steps_per_epoch + at.step;
      set_residual_share(
          net, residual_share(static_cast<double>(done), static_cast<double>(epochs * steps_per_epoch)));
    }
    statistics_.run(ctx, net, at.epoch, at.step, steps_per_epoch, std::forward<TakeStep>(take_step));
  }

  /// Whether the switch is due at the start of the record's epoch. Rank 0 measures and decides. Collective.
  bool is_due(context<device_type>& ctx, Comm& comm, const Task& task, const model_type& net,
              const training_record& at) {
    if (options_.mode != training_mode::hybrid || at.low_rank) return false;
    const switch_measurement wanted = clock_.wanted(at.epoch);
    seen_.reset();
    if (wanted == switch_measurement::none) {
      clock_.decide(at.epoch);
    } else {
      seen_ = statistics_.finish(comm, net);
      const std::string state = on_root(comm, [&] {
        clock_.decide(at.epoch, measure(wanted, ctx, task, net));
        return clock_.state();
      });
      if (comm.rank() != 0) clock_.set_state(state, "rank 0");
    }
    return clock_.is_due(at.epoch);
  }
  /// Reason of the last decision, in words.
  const std::string& why() const { return clock_.reason(); }
  /// Measured stages of the network, for switch_result::stages.
  const std::vector<stage_time>& stages() const { return stages_; }

  /// Sums the statistics over all ranks. To be called before the factorization. Collective.
  void gather(Comm& comm, const model_type& net) {
    if (!seen_) seen_ = statistics_.finish(comm, net);
  }
  /// Factorizes rank 0's network, and attaches residuals if the options ask for them. Throws value_error for
  /// a budget in milliseconds if the task has no layer_inputs().
  factorization factorize(context<device_type>& ctx, const Task& task, model_type& net) {
    factorize_policy how = policy_at_switch();
    if (how.budget && how.budget->milliseconds) measure_times(ctx, task, net);
    if (std::holds_alternative<cuttlefish_moment>(clock_.moment())) how.ranks = clock_.ranks();
    std::optional<model_type> dense;
    if (options_.switching.anneal_epochs > 0) dense = net;
    factorization made = device_work::factorize(net, how, ctx, seen_ ? &*seen_ : nullptr);
    seen_.reset();
    if constexpr (on_cpu) {
      if (dense) attach_residuals(net, std::move(*dense));
    }
    return made;
  }

  /// Copies the optimizer's state, if the options ask for the state to be carried over.
  template <class Optimizer>
  std::optional<optimizer_memory<T>> remember(model_type& net, Optimizer& optimizer) const {
    if (!options_.switching.carry_state) return std::nullopt;
    return std::optional<optimizer_memory<T>>(std::in_place, net, optimizer);
  }
  /// Writes the copied state, projected to the factors, into the new optimizer. All ranks use rank 0's
  /// numbers. Collective.
  template <class Optimizer>
  void carry(const std::optional<optimizer_memory<T>>& memory, context<device_type>& ctx, Comm& comm,
             model_type& net, Optimizer& to) const {
    if (!memory) return;
    memory->carry(net, to, device_work::host_threads(ctx));
    if (comm.size() > 1) optimizer_mirror<T>(memory_of<device_type>::source(), to).spread(comm);
  }

  /// If the options ask for it: estimates the statistics of batch norms and inserts batch norms between the
  /// factors, which moves the arenas (moves_arenas()). average(): averages the buffers over the ranks.
  /// Returns whether the options ask for one of the two. Collective.
  template <class Average>
  bool estimate(const all_parts& run, const training_record& at, Average&& average) const {
    const index_t passes = std::max(options_.switching.norm_batches, options_.switching.extra_norm_batches);
    if (passes == 0) return false;
    if (moves_arenas()) observe_factors(run.net);
    estimate_norms(run.ctx, run.task, run.net, {at.epoch, 0, at.total_steps}, passes);
    average();
    if (moves_arenas()) settle_factor_norms(run.net);
    return true;
  }
  /// Whether estimate() inserts batch norms between the factors, which moves the arenas.
  bool moves_arenas() const { return options_.switching.extra_norm_batches > 0; }

  /// Whether the residuals are to be detached at the end of the record's epoch.
  bool annealing_ends(const training_record& at) const {
    const index_t epochs = annealing_epochs(at);
    return epochs > 0 && at.epoch + 1 == at.switched->epoch + epochs;
  }

  /// Tests the network, if the options ask for it. Adds the duration of the test to `start`, so that the
  /// measured duration of the switch does not contain the test. Collective.
  template <class Time>
  std::optional<evaluation> test(const all_parts& run, Time& start) const {
    if (!options_.switching.test) return std::nullopt;
    const Time begun = Time::clock::now();
    const evaluation tested = run.task.test(run.ctx, run.net, run.comm);
    start += Time::clock::now() - begun;
    return tested;
  }

  /// Makes the optimizer target of the network. Factors with a Frobenius decay are exempt from weight decay.
  auto make_target(model_type& net) const {
    auto target = make_optimizer_target(net.store());
    if (const auto decay = make_decay(net)) decay->exempt(target);
    return target;
  }
  /// Makes the Frobenius decay of the network's factors, decoupled if the options choose Adam with decoupled
  /// decay; empty if the options ask for none. The network must
  /// stay at its address.
  std::optional<decay_type> make_decay(model_type& net) const {
    if (options_.switching.frobenius_decay == 0.0) return std::nullopt;
    const auto* const adam = std::get_if<adam_options>(&options_.optimizer);
    const frobenius_options how{options_.switching.frobenius_decay, adam != nullptr && adam->decoupled_decay};
    return std::optional<decay_type>(std::in_place, net, how);
  }

  /// Adds to `facts` the state of the clock and, if some of the S steps have been taken, a line about the
  /// statistics, whose sums on this rank are written to `numbers`. Collective.
  void save(Comm& comm, std::map<std::string, std::string>& facts, std::vector<T>& numbers) {
    add_clock(facts);
    if (const std::string line = statistics_.save(comm, numbers); !line.empty())
      facts[statistics_fact] = line;
  }
  /// Adds the state of the clock to `facts`, without communication.
  void add_clock(std::map<std::string, std::string>& facts) const {
    if (const std::string state = clock_.state(); !state.empty()) facts[clock_fact] = state;
  }
  /// Name of the fact with the clock's state. Checkpoints of older versions do not have it.
  static constexpr const char* clock_fact = "training.switch";
  /// Name of the fact with the line about the statistics. Checkpoints of older versions do not have it.
  static constexpr const char* statistics_fact = "training.statistics";

  /// Returns an array for the numbers that a checkpoint of `net` stores if it has this `line` of statistics,
  /// to be passed to restore(). `source` names the file in errors, which are those of
  /// switch_statistics::prepare.
  std::vector<T> prepare(const std::string& line, const std::string& source, const model_type& net) {
    std::vector<T> numbers;
    switch_statistics<model_type>(options_).prepare(line, source, net, numbers);
    return numbers;
  }
  /// Throws io_error, naming `source`, unless `clock` is a state of the clock that save() stores.
  void check_clock(const std::string& clock, const std::string& source) const {
    switch_clock(clock_).set_state(clock, source);
  }
  /// Restores the state that save() has stored. `net` must be at its final address.
  void restore(const std::string& clock, const std::string& line, const std::string& source,
               const model_type& net, std::vector<T> numbers) {
    statistics_.restore(line, source, net, std::move(numbers));
    clock_.set_state(clock, source);
    seen_.reset();
  }

 private:
  // Number of epochs over which residuals fade, if the record's epoch is one of them; else 0.
  index_t annealing_epochs(const training_record& at) const {
    if (options_.switching.anneal_epochs == 0 || !at.switched) return 0;
    const index_t epochs = std::min(options_.switching.anneal_epochs, options_.epochs - at.switched->epoch);
    return at.epoch < at.switched->epoch + epochs ? epochs : 0;
  }

  // Adds measured times of the layers to the statistics. Throws value_error if the task has no
  // layer_inputs().
  void measure_times(context<device_type>& ctx, const Task& task, const model_type& net) {
    if constexpr (requires { task.layer_inputs(net); }) {
      if (!seen_) seen_.emplace();
      seen_->times = measure_layers(net, task.layer_inputs(net), options_.factorize, ctx);
    } else {
      PUFFERFISH_THROW(value_error(
          "switch: a budget in milliseconds, but the task has no layer_inputs() to measure layers with"));
    }
  }

  // The policy with the number of threads that decompositions may use.
  factorize_policy policy_on(context<device_type>& ctx) const {
    factorize_policy policy = options_.factorize;
    policy.threads = device_work::host_threads(ctx);
    return policy;
  }

  // The measurement that the clock wants, on rank 0. The predicted loss, from the factorization of a copy of
  // the network, is empty if there are no statistics.
  switch_evidence measure(switch_measurement wanted, context<device_type>& ctx, const Task& task,
                          const model_type& net) {
    switch_evidence found;
    if (wanted == switch_measurement::stable_ranks) {
      const bool floored = std::get<cuttlefish_moment>(clock_.moment()).floored;
      found.stable_ranks = stable_ranks(net, candidates(ctx, task, net), {.floored = floored});
    } else if (seen_) {
      model_type trial = net;
      found.predicted_loss = device_work::factorize(trial, policy_at_switch(), ctx, &*seen_).predicted_loss();
    }
    return found;
  }

  // The policy that selects the layers whose stable ranks are followed: all layers of options_.factorize, or
  // with least_gain those in stages that gain enough. The first measurement decides for all later ones.
  factorize_policy candidates(context<device_type>& ctx, const Task& task, const model_type& net) {
    const double least = std::get<cuttlefish_moment>(clock_.moment()).least_gain;
    factorize_policy policy = policy_on(ctx);
    if (least == 0.0) return policy;
    if (clock_.cuttlefish().measurements() > 0) {
      return only_layers(std::move(policy), clock_.cuttlefish().layer_names());
    }
    if constexpr (requires { task.input_shape(); }) {
      stages_ = profile_stages(net, task.input_shape(), unmeasured(policy), ctx);
      std::vector<std::string> names = profitable_layers(stages_, least);
      if (!names.empty()) return only_layers(std::move(policy), std::move(names));
      std::string gains;
      for (const stage_time& stage : stages_) {
        gains += message({gains.empty() ? "" : ", ", stage.first, " to ", stage.last, ": "}) +
                 exact_number(stage.gain());
      }
      throw_error<value_error>({"switch: no stage gains ", least, " from low-rank layers (", gains,
                                "); choose a smaller least_gain, 0 for no measurement"});
    } else {
      PUFFERFISH_THROW(
          value_error("switch: least_gain, but the task has no input_shape() to measure stages with"));
    }
  }

  // Rank 0 projects and broadcasts, so that all ranks have the same bits. Replays of earlier steps use the
  // communicator until they have ended.
  void project(context<device_type>& ctx, Comm& comm, model_type& net) const {
    if constexpr (requires { ctx.synchronize(); }) ctx.synchronize();
    on_root(comm, [&] {
      project_softly(net, unmeasured(policy_on(ctx)), options_.switching.project_strength);
      return std::string();
    });
    broadcast_from(comm, 0, memory_of<device_type>::source(), net.store().values());
    net.store().round();
  }

  run_options options_;
  switch_clock clock_;
  switch_statistics<model_type> statistics_;
  std::optional<network_statistics> seen_;  // sums over all ranks; empty after the switch
  std::vector<stage_time> stages_;          // measured stages, on rank 0 of the run that measured them
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
