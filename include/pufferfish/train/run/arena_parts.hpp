// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the parts of a training run that work on the network's arenas and are made anew when the arenas
/// move.

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/train/rank_states.hpp>
#include <pufferfish/train/run/outer.hpp>
#include <pufferfish/train/run/pruning.hpp>
#include <pufferfish/train/run/shrink.hpp>
#include <pufferfish/train/run/states.hpp>
#include <pufferfish/train/run/steps.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Optimizer, decay, exchanges and pruning mask of a run. They refer to the arenas of the model: after a new
/// layout they are made again. `optimizer` and `exchange` are empty only before the first layout and between
/// the removal of a layout and the next one.
template <class Task, class Comm>
struct arena_parts {
  using all_parts = run_parts<Task, Comm>;
  using T = typename all_parts::value_type;
  using device_type = typename all_parts::device_type;
  using exchange_type = typename all_parts::exchange_type;

  /// Makes the parts that need no arenas. make_exchange() and the owner make the others.
  explicit arena_parts(const run_options& options) : pruning(options), shrink(options) {}

  std::optional<typename all_parts::optimizer_type> optimizer;  ///< made by the owner
  std::optional<frobenius_decay<T, device_type>> decay;         ///< decay of the factors; empty: none
  std::optional<scale_sparsity<T>> sparsity;  ///< term of the batch norms' weights; empty: none
  std::optional<exchange_type> exchange;      ///< exchange of gradients
  run_outer<T, Comm, device_type> outer;      ///< exchange of parameters after local steps
  run_pruning<T> pruning;                     ///< mask of pruned weights
  run_shrink shrink;                          ///< removal of rank components; kept when the arenas move

  /// Makes the exchange of gradients, or with options.rare that of parameters, with `compressor` (nullopt:
  /// none). A pruned network exchanges its remaining gradients in place of a compressor's messages.
  /// Parameters must be equal on all ranks. Throws value_error for scale_sparsity on a device, and the errors
  /// of the exchanges. Collective.
  void make_exchange(parameter_store<T>& store, Comm& comm, const run_options& options,
                     std::optional<any_compressor<T>> compressor) {
    exchange_options gradients = options.exchange;
    gradients.local = options.rare.has_value();
    if (const auto survivors = pruning.exchange()) {
      gradients.compress_by_bucket = true;
      compressor = all_or_none(comm, "training_run", [&] { return new_compressor(store, *survivors); });
    }
    sparsity.reset();
    if (options.scale_sparsity > 0.0) {
      if (!std::is_same_v<device_type, device::cpu>) {
        PUFFERFISH_THROW(value_error("training_run: scale_sparsity on a device; train on a CPU"));
      }
      sparsity.emplace(store, options.scale_sparsity);
      if (sparsity->size() == 0) {
        detail::throw_error<value_error>(
            {"training_run: scale_sparsity ", options.scale_sparsity, ", but the network has no batch norm"});
      }
    }
    if (options.rare) outer.start(store, comm, options, std::exchange(compressor, std::nullopt));
    exchange.emplace(store, comm, gradients, std::move(compressor));
  }
  /// Makes the gradient exchange, with a compressor made from the options. Its number of steps becomes the
  /// optimizer's.
  void make_exchange(parameter_store<T>& store, Comm& comm, const run_options& options, bool low_rank) {
    make_exchange(store, comm, options,
                  make_run_compressor(comm, store, options, low_rank, options.exchange.plan));
    exchange->set_steps(optimizer->steps());
  }
  /// Destroys both exchanges; their reports and states are lost.
  void drop_exchange() {
    outer.stop();
    exchange.reset();
  }

  /// References to all parts that a step works with. They are valid until the parts are made anew.
  all_parts parts(context<device_type>& ctx, Task& task, typename all_parts::model_type& net, Comm& comm,
                  const run_options& options) {
    return {ctx,
            task,
            net,
            comm,
            options,
            *optimizer,
            *exchange,
            decay ? &*decay : nullptr,
            sparsity ? &*sparsity : nullptr};
  }

  /// Passes an epoch and its first learning rate to both exchanges, whose compressors may depend on them.
  void set_epoch(index_t epoch, double rate) {
    exchange->set_epoch(epoch, rate);
    outer.set_epoch(epoch, rate);
  }

  /// Adds what a checkpoint stores as text: the exchange plan, the state of shrinking ranks, the number of
  /// outer steps, and the number of remaining weights.
  void add_facts(std::map<std::string, std::string>& facts) const {
    facts["training.exchange"] = to_text(exchange->plan());
    if (const std::string text = shrink.state(); !text.empty()) facts[shrink.fact] = text;
    if (outer.runs()) facts[outer.fact] = std::to_string(outer.steps());
    if (const weight_mask* mask = pruning.mask(); mask != nullptr) {
      facts[pruning.fact] = std::to_string(mask->kept());
    }
  }
  /// Arrays of the exchange that a checkpoint keeps.
  std::vector<compressor_state<T>> states() { return outer.runs() ? outer.states() : exchange->states(); }
};

/// Memory for a checkpoint's arrays of an exchange that does not exist yet, and for the pruning mask.
template <class T>
struct exchange_room {
  std::optional<any_compressor<T>> compressor;  ///< compressor of the future exchange
  std::vector<T> outer_momentum, mask;          ///< outer momentum; pruning mask as numbers

  /// Arrays of the exchange: all arrays but the mask.
  std::vector<compressor_state<T>> states() {
    std::vector<compressor_state<T>> all;
    if (compressor) all = compressor->states();
    if (!outer_momentum.empty()) all.push_back({"outer.momentum", outer_momentum, false});
    return all;
  }
  /// Appends the mask, if there is one, to `others`, and returns the list.
  std::vector<named_state<T>> list(std::vector<named_state<T>> others) {
    if (!mask.empty()) others.push_back({run_pruning<T>::state, mask});
    return others;
  }
};

/// Copy of the compressors' states and of the numbers of exchanges, for an exchange of the same parameters in
/// arenas that have moved. States are on the host.
template <class T>
class carried_exchanges {
 public:
  /// Copies the states of the exchanges of `of`, which may be destroyed afterwards.
  template <class Task, class Comm>
  explicit carried_exchanges(arena_parts<Task, Comm>& of)
      : steps_(of.exchange->steps()), outer_steps_(of.outer.steps()) {
    for (const auto& state : of.states()) states_.emplace_back(state.values.begin(), state.values.end());
  }

  /// Copies states and numbers to the exchanges of `to`, which must have states of the same order and
  /// lengths.
  template <class Task, class Comm>
  void carry(arena_parts<Task, Comm>& to) const {
    const auto states = to.states();
    for (std::size_t i = 0; i < states.size(); ++i) {
      std::copy(states_[i].begin(), states_[i].end(), states[i].values.begin());
    }
    to.exchange->set_steps(steps_);
    to.outer.set_steps(outer_steps_);
  }

 private:
  std::uint64_t steps_, outer_steps_;
  std::vector<std::vector<T>> states_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
