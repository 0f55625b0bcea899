// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: host access to all arrays that a checkpoint stores in addition to the network, from any memory.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/train/host_mirror.hpp>
#include <pufferfish/train/options.hpp>
#include <pufferfish/train/rank_states.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Copies of an optimizer's arrays on the host (host_mirror). For an optimizer in host memory, the copies are
/// the arrays themselves. After writing to the copies, call spread() or send_back().
template <class T>
class optimizer_mirror {
 public:
  /// `memory` is the memory of the optimizer's states. The optimizer must outlive the object.
  template <class Optimizer>
  optimizer_mirror(memory_source& memory, Optimizer& of) {
    for (const auto& [name, values] : of.states()) states_.emplace_back(name, host_mirror<T>(memory, values));
  }

  /// Appends the copies and their names, such as "optimizer.momentum", to `to`.
  void list(std::vector<named_state<T>>& to) {
    for (auto& [name, mirror] : states_) to.push_back({name, mirror.values()});
  }
  /// The copies and their names.
  std::vector<named_state<T>> list() {
    std::vector<named_state<T>> result;
    list(result);
    return result;
  }

  /// Copies rank 0's optimizer states (its host copies) to the optimizers of all ranks. Collective.
  template <class Comm>
  void spread(Comm& comm) {
    for (auto& [name, mirror] : states_) {
      comm.broadcast(mirror.values(), 0);
      mirror.send_back();
    }
  }
  /// Copies this rank's host copies to its optimizer.
  void send_back() {
    for (auto& [name, mirror] : states_) mirror.send_back();
  }

 private:
  std::vector<std::pair<std::string, host_mirror<T>>> states_;
};

/// Replaces batch-norm statistics, which are local in training, by their means over the ranks. Collective.
template <class T, class Comm>
void average_buffers(Comm& comm, memory_source& memory, std::span<T> buffers) {
  if (comm.size() == 1) return;
  host_mirror<T> here(memory, buffers);
  average_over_ranks(comm, here.values());
  here.send_back();
}

/// Makes the gradient compressor of a run for the parameters of `store`, dense or `low_rank`; nullopt if the
/// run has none in that phase. The compressor is split into the fragments of rare exchanges, or with
/// exchange_options::compress_by_bucket into the buckets of `plan` (nullopt: default_plan). Allocates memory
/// of the gradients' size; if one rank throws, all ranks throw. Collective.
template <class T, class Comm>
std::optional<any_compressor<T>> make_run_compressor(Comm& comm, const parameter_store<T>& store,
                                                     const run_options& options, bool low_rank,
                                                     const std::optional<exchange_plan>& plan) {
  const bool other_phase =
      options.phase_of_compression == (low_rank ? compression_phase::dense : compression_phase::low_rank);
  if (other_phase || !options.compression) return std::nullopt;
  return all_or_none(comm, "training_run", [&] {
    auto made = new_compressor(store, options.compression);
    if (options.rare) {
      const auto fragments = cut_fragments(store, options.rare->fragments);
      if (fragments.size() > 1) made->split(fragments);
    } else if (options.exchange.compress_by_bucket) {
      made->split(cut_buckets(store, (plan ? *plan : default_plan(comm.size())).buckets));
    }
    made->start(comm.rank(), comm.size());  // its states may depend on the ranks
    return made;
  });
}

/// The numbers that a task carries, as T: the numbers themselves, or a copy in T if they have 16 bits.
template <class T, class Carried>
class carried_mirror {
 public:
  /// Copies the numbers `there`, which are stored in `memory` and must outlive the object.
  carried_mirror(memory_source& memory, std::span<Carried> there) : here_(memory, there) {
    if constexpr (!std::is_same_v<T, Carried>) wide_.assign(here_.values().begin(), here_.values().end());
  }
  /// The copy, which the caller may change.
  std::span<T> values() {
    if constexpr (std::is_same_v<T, Carried>) {
      return here_.values();
    } else {
      return wide_;
    }
  }
  /// Writes the copy to the task's numbers, rounded to their type.
  void send_back() {
    if constexpr (!std::is_same_v<T, Carried>) {
      std::transform(wide_.begin(), wide_.end(), here_.values().begin(),
                     [](T value) { return static_cast<Carried>(value); });
    }
    here_.send_back();
  }

 private:
  host_mirror<Carried> here_;
  std::vector<T> wide_;
};

/// All states of a checkpoint besides the network: those of the optimizer and the compressor, and states that
/// differ between ranks: the task's carried state, the compressor's memory, statistics for the switch.
template <class T, class Comm, class Carried>
class run_states {
 public:
  /// `carried` is stored in `memory`; nullopt if the task carries nothing. `measured`: this rank's statistics
  /// for the switch; may be empty. `own_optimizer`: the optimizer's arrays differ between ranks. All must
  /// outlive the object. Collective.
  template <class Optimizer>
  run_states(Comm& comm, memory_source& memory, Optimizer& of, std::vector<compressor_state<T>> compressed,
             std::optional<std::span<Carried>> carried, std::span<T> measured = {},
             bool own_optimizer = false)
      : comm_(&comm),
        optimizer_(memory, of),
        own_optimizer_(own_optimizer),
        compressed_(std::move(compressed)),
        measured_(measured) {
    if (carried) carried_.emplace(memory, *carried);
    of_ranks_.emplace(comm, states_of_rank());
  }

  /// Whether the compressor has states.
  bool has_compressed() const { return !compressed_.empty(); }

  /// Copies the states of the other ranks to rank 0. Collective.
  void gather() { of_ranks_->gather(); }

  /// Arrays that rank 0 writes or reads, with their names in the checkpoint.
  std::vector<named_state<T>> list() {
    std::vector<named_state<T>> result = optimizer_.list();
    for (const auto& state : compressed_) {
      if (!state.of_rank) result.push_back({state.name, state.values});
    }
    of_ranks_->list(result);
    return result;
  }
  /// The optimizer's part of list(), which a rank can write without the others.
  std::vector<named_state<T>> list_optimizer() { return optimizer_.list(); }

  /// Throws state_error, naming the array, if the file has a state of a rank that this run does not have.
  void check_ranks(const checkpoint_file& file) const { of_ranks_->check_ranks(file); }

  /// Copies the arrays that rank 0 has read to all ranks: all of them, or (`all` false) without the ranks'
  /// own states; the task's carried state is then set to zero. Collective.
  void spread(bool all) {
    optimizer_.spread(*comm_);
    for (const auto& state : compressed_) {
      if (!state.of_rank) comm_->broadcast(state.values, 0);
    }
    if (all) {
      of_ranks_->scatter();
      if (own_optimizer_) optimizer_.send_back();
    }
    if (!carried_) return;
    if (!all) std::fill(carried_->values().begin(), carried_->values().end(), Carried{});
    carried_->send_back();
  }

 private:
  // Arrays of which every rank has its own, with their names in the checkpoint.
  std::vector<named_state<T>> states_of_rank() {
    std::vector<named_state<T>> result;
    if (own_optimizer_) {
      for (const named_state<T>& state : optimizer_.list())
        result.push_back({"own." + state.name, state.values});
    }
    if (carried_) result.push_back({"task.carried", carried_->values()});
    if (!measured_.empty()) result.push_back({"switch.statistics", measured_});
    for (const auto& state : compressed_) {
      if (state.of_rank) result.push_back({state.name, state.values});
    }
    return result;
  }

  Comm* comm_;
  optimizer_mirror<T> optimizer_;
  bool own_optimizer_;
  std::vector<compressor_state<T>> compressed_;
  std::span<T> measured_;
  std::optional<carried_mirror<T, Carried>> carried_;
  std::optional<rank_states<T, Comm>> of_ranks_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
