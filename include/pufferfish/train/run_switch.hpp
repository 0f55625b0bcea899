// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: what a training run does for its switch from dense to low rank: when it is due, what the
/// factorization goes by, and what follows it.

#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/nn/measure_layers.hpp>
#include <pufferfish/nn/stable_ranks.hpp>
#include <pufferfish/train/carry_state.hpp>
#include <pufferfish/train/estimate_norms.hpp>
#include <pufferfish/train/host_mirror.hpp>
#include <pufferfish/train/rank_states.hpp>
#include <pufferfish/train/run_states.hpp>
#include <pufferfish/train/run_steps.hpp>
#include <pufferfish/train/switch_moment.hpp>
#include <pufferfish/train/switch_statistics.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Options with which no step has been taken that could be measured.
inline factorize_policy unmeasured(factorize_policy policy) {
  policy.truncate = truncation::plain;
  return policy;
}

template <class Task, class Comm>
class run_switch {
  using all_parts = run_parts<Task, Comm>;
  using model_type = typename all_parts::model_type;
  using device_type = typename all_parts::device_type;
  using T = typename all_parts::value_type;
  using device_work = device_parts<device_type>;
  using decay_type = frobenius_decay<T, device_type>;

 public:
  /// Throws value_error for options out of range.
  explicit run_switch(const run_options& options)
      : options_((options.switching.validate(), options)),
        clock_(options.switching.moment.value_or(fixed_epoch{options.warmup_epochs})),
        statistics_(options) {}

  /// Low rank from the start: the structure that the policy gives without statistics, with random factors.
  void start_low_rank(context<device_type>& ctx, model_type& net) const {
    const factorize_policy policy = unmeasured(options_.factorize);
    if (policy.budget || needs_spectrum(policy.rank)) {
      model_type trial = net;
      apply_ranks(net, device_work::factorize(trial, policy, ctx, nullptr).ranks());
    } else {
      apply_ranks(net, planned_ranks(net, policy));
    }
    net.initialize(options_.seed);
  }

  /// Takes a step of a dense network, after a soft projection if one is due, and watches it if the switch may
  /// go by it. take_step as switch_statistics::run. Collective.
  template <class TakeStep>
  void take_step(context<device_type>& ctx, Comm& comm, model_type& net, const training_record& at,
                 index_t steps_per_epoch, TakeStep&& take_step) {
    const index_t every = options_.switching.project_every;
    const bool dense = options_.mode == training_mode::hybrid && !at.low_rank;
    if (dense && every > 0 && at.total_steps > 0 && at.total_steps % static_cast<std::uint64_t>(every) == 0) {
      project(ctx, comm, net);
    }
    statistics_.run(ctx, net, at.epoch, at.step, steps_per_epoch, std::forward<TakeStep>(take_step));
  }

  /// Whether the switch is due at the start of the record's epoch. Collective where that takes a measurement.
  bool is_due(context<device_type>& ctx, Comm& comm, const model_type& net, const training_record& at) {
    if (options_.mode != training_mode::hybrid || at.low_rank) return false;
    const switch_measurement wanted = clock_.wanted(at.epoch);
    seen_.reset();
    if (wanted == switch_measurement::none) {
      clock_.decide(at.epoch);
    } else {
      seen_ = statistics_.finish(comm);
      const std::string state = on_root(comm, [&] {
        clock_.decide(at.epoch, measure(wanted, ctx, net));
        return clock_.state();
      });
      if (comm.rank() != 0) clock_.set_state(state, "rank 0");
    }
    return clock_.is_due(at.epoch);
  }
  const std::string& why() const { return clock_.reason(); }

  /// The sums of all ranks, before the factorization. Collective.
  void gather(Comm& comm) {
    if (!seen_) seen_ = statistics_.finish(comm);
  }
  /// Rank 0's network becomes low-rank. Throws value_error for a budget in milliseconds if the task cannot
  /// tell its layers' inputs.
  factorization factorize(context<device_type>& ctx, const Task& task, model_type& net) {
    factorize_policy policy = options_.factorize;
    if (policy.budget && policy.budget->milliseconds) measure_times(ctx, task, net);
    if (std::holds_alternative<cuttlefish_moment>(clock_.moment())) policy.ranks = clock_.ranks();
    factorization made = device_work::factorize(net, policy, ctx, seen_ ? &*seen_ : nullptr);
    seen_.reset();
    return made;
  }

  /// The optimizer's state, if it is to be carried over.
  template <class Optimizer>
  std::optional<optimizer_memory<T>> remember(model_type& net, Optimizer& optimizer) const {
    if (!options_.switching.carry_state) return std::nullopt;
    return std::optional<optimizer_memory<T>>(std::in_place, net, optimizer);
  }
  /// Gives it to the optimizer of the factors: rank 0's numbers on all ranks. Collective.
  template <class Optimizer>
  void carry(const std::optional<optimizer_memory<T>>& memory, context<device_type>& ctx, Comm& comm,
             model_type& net, Optimizer& to) const {
    if (!memory) return;
    memory->carry(net, to, ctx.threads());
    if (comm.size() > 1) optimizer_mirror<T>(memory_of<device_type>::source(), to).spread(comm);
  }

  /// Estimates the statistics of batch norms, this rank's, if that is asked for. Returns whether it was.
  bool estimate(const all_parts& run, const training_record& at) const {
    if (options_.switching.norm_batches == 0) return false;
    estimate_norms(run.ctx, run.task, run.net, {at.epoch, 0, at.total_steps},
                   options_.switching.norm_batches);
    return true;
  }

  /// Tests the network as it is now, if that is asked for, and moves the start of the switch by the time that
  /// this takes. Collective.
  template <class Time>
  std::optional<evaluation> test(const all_parts& run, Time& start) const {
    if (!options_.switching.test) return std::nullopt;
    const Time begun = Time::clock::now();
    const evaluation tested = run.task.test(run.ctx, run.net, run.comm);
    start += Time::clock::now() - begun;
    return tested;
  }

  /// The optimizer's arenas: factors that have a Frobenius decay are exempt from its own.
  auto make_target(model_type& net) const {
    auto target = make_optimizer_target(net.store());
    if (const auto decay = make_decay(net)) decay->exempt(target);
    return target;
  }
  /// The decay of the factors that the network has now, at its present address.
  std::optional<decay_type> make_decay(model_type& net) const {
    if (options_.switching.frobenius_decay == 0.0) return std::nullopt;
    const auto* const adam = std::get_if<adam_options>(&options_.optimizer);
    const frobenius_options how{options_.switching.frobenius_decay, adam != nullptr && adam->decoupled_decay};
    return std::optional<decay_type>(std::in_place, net, how);
  }

  /// What a checkpoint keeps: the clock's state, and where statistics are half taken their state, and this
  /// rank's numbers. Collective.
  void save(Comm& comm, std::map<std::string, std::string>& facts, std::vector<T>& numbers) {
    add_clock(facts);
    if (const std::string line = statistics_.save(comm, numbers); !line.empty())
      facts[statistics_fact] = line;
  }
  /// The part of it that a rank saves alone.
  void add_clock(std::map<std::string, std::string>& facts) const {
    if (const std::string state = clock_.state(); !state.empty()) facts[clock_fact] = state;
  }
  /// The facts' names. Older checkpoints have none.
  static constexpr const char* clock_fact = "training.switch";
  static constexpr const char* statistics_fact = "training.statistics";

  /// Makes room for the numbers that belong to the line of statistics in a checkpoint of `net`. Then they are
  /// taken over.
  std::vector<T> prepare(const std::string& line, const std::string& source, const model_type& net) {
    std::vector<T> numbers;
    switch_statistics<model_type>(options_).prepare(line, source, net, numbers);
    return numbers;
  }
  void restore(const std::string& clock, const std::string& line, const std::string& source,
               const model_type& net, std::vector<T> numbers) {
    statistics_.restore(line, source, net, std::move(numbers));
    clock_.set_state(clock, source);
    seen_.reset();
  }

 private:
  void measure_times(context<device_type>& ctx, const Task& task, const model_type& net) {
    if constexpr (requires { task.layer_inputs(net); }) {
      if (!seen_) seen_.emplace();
      seen_->times = measure_layers(net, task.layer_inputs(net), options_.factorize, ctx);
    } else {
      PUFFERFISH_THROW(value_error(
          "switch: a budget in milliseconds, but the task has no layer_inputs() to measure layers with"));
    }
  }

  factorize_policy policy_on(context<device_type>& ctx) const {
    factorize_policy policy = options_.factorize;
    policy.threads = ctx.threads();
    return policy;
  }

  switch_evidence measure(switch_measurement wanted, context<device_type>& ctx, const model_type& net) const {
    switch_evidence found;
    if (wanted == switch_measurement::stable_ranks) {
      found.stable_ranks = stable_ranks(net, policy_on(ctx));
    } else if (seen_) {
      model_type trial = net;
      found.predicted_loss = device_work::factorize(trial, options_.factorize, ctx, &*seen_).predicted_loss();
    }
    return found;
  }

  // On rank 0, for all.
  void project(context<device_type>& ctx, Comm& comm, model_type& net) const {
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
  std::optional<network_statistics> seen_;  // of all ranks
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
