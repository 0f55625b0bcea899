// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: saves and resumes a training run. The contracts are those of the members of training_run with
/// the same names: save, save_alone and resume. `Data` is run_data.

#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/train/checkpoint.hpp>
#include <pufferfish/train/run/data.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Number of ranks as the fact "training.ranks". A checkpoint of rare exchanges is whole only for as many
/// ranks.
template <class Data>
std::string ranks_text(const Data& run) {
  return std::to_string(run.comm->size());
}

/// Adds the text entries of a checkpoint to `facts`: `record`, the lines of model and options, the number of
/// ranks, and the states of those parts that have one.
template <class Data>
void add_facts(const Data& run, std::map<std::string, std::string>& facts, const training_record& record) {
  facts["training.record"] = record.to_text();
  facts["training.options"] = run.resume_lines;
  facts["training.ranks"] = ranks_text(run);
  run.bound.add_facts(facts);
  if (run.rate_plateau) facts["training.plateau"] = run.rate_plateau->state();
  if (const std::string state = run.steps.state(); !state.empty()) facts["training.steps"] = state;
}

/// Lists the states of a checkpoint besides the network: those of `optimizer` and `compressed`, and states of
/// which each rank has its own. `measured`: statistics for the switch, memory of the caller. `own_optimizer`:
/// whether the optimizers of the ranks differ, as between rare exchanges. The result refers to the arguments,
/// which must outlive it. Collective.
template <class Data, class Optimizer, class T = typename Data::T>
auto states_of(Data& run, Optimizer& optimizer, std::vector<compressor_state<T>> compressed,
               std::vector<T>& measured, bool own_optimizer) {
  using carried = typename Data::model_type::value_type;
  return run_states<T, std::remove_pointer_t<decltype(run.comm)>, carried>(
      *run.comm, run.memory(), optimizer, std::move(compressed), run.carried(), measured, own_optimizer);
}

/// Implements training_run::save: makes the ranks equal, gathers the ranks' own states on rank 0, and writes
/// the file there. Collective; if rank 0 cannot write, all ranks throw.
template <class Data>
void save_run(Data& run, const std::string& path, std::map<std::string, std::string> facts) {
  using T = typename Data::T;
  run.synchronize();
  training_record whole = run.record;
  whole.seen = reduce(*run.comm, run.record.seen);
  whole.optimizer_steps = run.bound.optimizer->steps();
  std::vector<T> measured;
  run.switching.save(*run.comm, facts, measured);
  auto beside = states_of(run, *run.bound.optimizer, run.bound.states(), measured, run.bound.outer.runs());
  beside.gather();
  exchange_room<T> room{{}, {}, run.bound.pruning.numbers()};
  on_root(*run.comm, [&] {
    add_facts(run, facts, whole);
    save_checkpoint(path, run.net, room.list(beside.list()), facts);
    return std::string();
  });
}

/// Implements training_run::save_alone, after other ranks were lost: writes parameters and optimizer of this
/// rank without any communication.
template <class Data>
void save_run_alone(Data& run, const std::string& path, std::map<std::string, std::string> facts) {
  using T = typename Data::T;
  if (run.interrupted) {
    throw_error<state_error>({path, ": ranks were lost ", run.interrupted, "; go on from a checkpoint"});
  }
  run.found_skipped += run.steps.settle_alone(run.parts(), run.record);
  run.bound.outer.abandon(run.ctx);
  training_record mine = run.record;
  mine.optimizer_steps = run.bound.optimizer->steps();
  mine.saved_by = run.comm->rank();
  run.switching.add_clock(facts);
  add_facts(run, facts, mine);
  optimizer_mirror<T> of_optimizer(run.memory(), *run.bound.optimizer);
  exchange_room<T> room{{}, {}, run.bound.pruning.numbers()};
  save_checkpoint(path, run.net, room.list(of_optimizer.list()), facts);
}

/// Implements training_run::resume. Rank 0 reads the file. Network, optimizer, compressor and mask are read
/// into copies before the run is changed. Collective.
template <class Data>
void resume_run(Data& r, const std::string& path) {
  using T = typename Data::T;
  using pruning_type = run_pruning<T>;
  using switch_type = typename Data::switch_type;
  r.settle();
  typename Data::model_type loaded = r.net;
  std::optional<checkpoint_file> file;  // open on rank 0 only
  const std::string text = on_root(*r.comm, [&] {
    file.emplace(open_checkpoint(path));
    check_same_lines(path, shorten_numbers(file->fact("training.options")), r.resume_lines,
                     file->library_version());
    if (r.rate_plateau) static_cast<void>(file->fact("training.plateau"));
    file->restore(loaded);
    return file->fact("training.record");
  });
  const auto fact = [&](const char* name) { return shared_fact(*r.comm, file, name); };
  const std::string statistics = fact(switch_type::statistics_fact);
  training_record record = training_record::from_text(text, path);
  if (record.step > r.task.steps_per_epoch()) {
    throw_error<io_error>(
        {path, ": its record is at step ", record.step, " of an epoch of ", r.task.steps_per_epoch()});
  }
  // A file of save_alone, or of `rare` with another number of ranks, has only parameters and rank 0's
  // optimizer.
  const bool whole = record.saved_by < 0 && (!r.options.rare || fact("training.ranks") == ranks_text(r));
  record.saved_by = -1;
  const std::optional<exchange_plan> plan = usable_plan(fact("training.exchange"), path, r.comm->size());
  share_structure(*r.comm, loaded);
  typename Data::all_parts::optimizer_type restored(r.switching.make_target(loaded), r.options.optimizer);
  exchange_room<T> room{
      make_run_compressor(*r.comm, loaded.store(), r.options, record.low_rank,
                          plan ? plan : r.options.exchange.plan),
      r.bound.outer.momentum_room(r.options, loaded.store()),
      fact(pruning_type::fact).empty() ? std::vector<T>() : r.bound.pruning.room(loaded.store())};
  std::vector<T> measured = r.switching.prepare(statistics, path, loaded);
  auto beside = states_of(r, restored, room.states(), measured, r.options.rare.has_value());
  on_root(*r.comm, [&] {
    if (whole) beside.check_ranks(*file);
    const auto states = room.list(whole ? beside.list() : beside.list_optimizer());
    file->restore(loaded, states);
    for (const named_state<T>& state : states) {
      if (state.name.starts_with("switch.statistics."))
        unpack<T>({state.values.begin(), state.values.end()}, path);
    }
    return std::string();
  });
  pruning_type pruning(r.options);
  pruning.restore(*r.comm, loaded.store(), room.mask);
  // All texts of the file are read before the run is changed.
  const std::string clock = fact(switch_type::clock_fact);
  r.switching.check_clock(clock, path);
  const std::uint64_t outer_steps = steps_from(fact(r.bound.outer.fact), path);
  std::optional<plateau> rate_plateau = r.rate_plateau;
  const std::string waited = fact("training.plateau");
  if (rate_plateau) {
    try {
      rate_plateau->set_state(waited);
    } catch (const value_error& e) {
      throw_error<io_error>({path, ": ", e.what()});
    }
  }
  run_shrink shrink = r.bound.shrink;
  shrink.restore(fact(shrink.fact), path);
  r.steps.set_state(fact("training.steps"), path);
  r.unbind();
  r.bound.pruning = pruning;
  r.net = std::move(loaded);
  r.bound.optimizer.emplace(std::move(restored));
  r.bound.decay = r.switching.make_decay(r.net);
  if (plan) r.options.exchange.plan = plan;
  r.broadcast_state();
  r.bound.make_exchange(r.net.store(), *r.comm, r.options, std::move(room.compressor));
  // Tuning makes a new exchange, which would discard the restored compressor state.
  r.tune_first = r.tune_first && !plan && !beside.has_compressed();
  beside.spread(whole);
  if (whole) r.bound.outer.set_momentum(room.outer_momentum);
  r.bound.outer.set_steps(outer_steps);
  r.switching.restore(clock, statistics, path, r.net, std::move(measured));
  r.bound.optimizer->set_steps(record.optimizer_steps);
  r.bound.exchange->set_steps(record.optimizer_steps);  // neither number counts skipped steps
  r.rate_plateau = rate_plateau;
  r.bound.shrink = std::move(shrink);
  r.record = record;
  if (r.comm->rank() != 0) r.record.seen = {};
  r.found_skipped = 0;
  r.ctx.tape().clear();
  r.start_steps();
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
