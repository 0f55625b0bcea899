// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `optimizer_memory`: carries the state of an optimizer over the switch from dense to low rank.

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/parallel.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/train/host_mirror.hpp>
#include <pufferfish/train/run/project_state.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Report of optimizer_memory::carry: names of the parameters by what happened to their states.
struct carried_state {
  std::vector<std::string> kept;       ///< new network's parameters with their old states, bit for bit
  std::vector<std::string> projected;  ///< new network's parameters with states projected from a dense layer
  std::vector<std::string> fresh;      ///< new network's parameters that did not exist before: zero states
  std::vector<std::string> dropped;    ///< old network's parameters whose states were not carried over
};

/// Carries an optimizer's state over the switch, or over any change of a network that replaces dense layers
/// by low-rank ones:
///
///     const optimizer_memory<float> memory(net, optimizer);   // before: copies all states
///     factorize(net, policy);
///     optimizer_type fresh(make_optimizer_target(net.store()), options);
///     memory.carry(net, fresh);                               // after
///
/// Parameters that keep their name and shape keep their state bit for bit, and the number of steps goes on
/// (else momentum and Adam's bias correction would start again).
///
/// A matrix W of a dense layer that becomes up down:
///   - Velocity of SGD and first moment of Adam, M:  M_up = M down^T,  M_down = up^T M.
///     M is a weighted sum of gradients G of W, and the gradients of the factors are G down^T and up^T G. So
///     these are the sums that the factors, held fixed, would have collected from the same G. They transform
///     as gradients do: where component i of up is multiplied by s and that of down divided by s, M_up is
///     divided by s and M_down multiplied. With up = W Q, down = Q^T and orthonormal columns of Q they are
///     M Q and up^T M, and a step of up with down fixed is the dense step times Q. Weight decay that M has
///     collected, a multiple of W ~ up down, becomes the same multiple of the gradient of ||up down||_F^2 / 2
///     (see frobenius_decay).
///     The least-squares form M down^+ agrees with these only where the rows of down are orthonormal. It
///     transforms as values do, not as a sum of gradients: for balanced factors of an SVD, component i is
///     1 / sigma_i times as large as the sum that the following steps continue.
///   - Second moment of Adam, V:  V_up = V (down o down)^T,  V_down = (up o up)^T V, o by elements.
///     An average of squares of gradients: the expectation of (G down^T)_ij^2 where the elements of G in a
///     row, or for V_down in a column, are uncorrelated.
///
/// Two biases of a dense layer that a low-rank one adds up (see low_rank_parts) have the same gradient, which
/// is also that of their sum: the state of the sum is the mean of theirs. One bias alone keeps its state.
template <class T>
class optimizer_memory {
 public:
  /// Copies the states and the number of steps of an optimizer whose arenas are the network's, and notes
  /// where each dense layer's matrices are in them. Waits for a device. Throws state_error, naming the state,
  /// if it is not arranged as the network's values or no rule for it is known. Memory: a copy of all states
  /// on the host.
  template <class Root, class Device, class Optimizer>
  optimizer_memory(model<Root, Device>& net, Optimizer& of) : steps_(of.steps()) {
    const auto size = static_cast<std::size_t>(net.parameter_count());
    for (const auto& [name, values] : of.states()) {
      detail::order_of_state(name);
      if (!values.empty() && values.size() != size) {
        detail::throw_error<state_error>({"optimizer_memory: ", name, " has ", values.size(),
                                          " elements, the network ", size, " parameters"});
      }
      detail::host_mirror<T> here(memory_of<Device>::source(), values);
      states_.push_back({name, {here.values().begin(), here.values().end()}});
    }
    for (const auto& entry : net.store().parameters()) {
      parameters_.push_back({entry.name, entry.offset, entry.thing->layout()});
    }
    const auto found = detail::find_slots(net);
    for (std::size_t i = 0; i < found.slots.size(); ++i) {
      const std::string& name = found.layers[i].name;
      layer_before layer{name, {}, {}};
      const auto weights = found.slots[i]->weights(name);
      for (const auto& matrix : weights.matrices) {
        layer.matrices.push_back({matrix.name, detail::find_in_arena(net.store(), matrix.view)});
      }
      for (const auto& bias : weights.biases) {
        layer.biases.push_back({bias.view.is_null(), detail::find_in_arena(net.store(), bias.view)});
      }
      layers_.push_back(std::move(layer));
    }
  }

  /// Number of steps that the optimizer had taken when this object was made.
  std::uint64_t steps() const { return steps_; }

  /// Writes the remembered states of the old optimizer into `to`, an optimizer of the same kind and options
  /// for the changed network `net`, and sets its number of steps. States of dense layers that became low-rank
  /// are projected to the factors. Returns, by parameter, what happened. `threads` work on different
  /// matrices; the bits do not depend on them. Waits for a device. Throws state_error for an optimizer of
  /// another kind, a layer that is low-rank no longer, and weights outside the network's arenas; shape_error
  /// for a parameter of another size or rank than before. Each names the layer or parameter; `to` is
  /// unchanged then.
  template <class Root, class Device, class Optimizer>
  carried_state carry(model<Root, Device>& net, Optimizer& to, int threads = 1) const {
    auto spans = to.states();
    check_states(spans, static_cast<std::size_t>(net.parameter_count()));
    carried_state report;
    std::vector<detail::host_mirror<T>> mirrors;
    for (auto& [name, values] : spans) mirrors.emplace_back(memory_of<Device>::source(), values);
    net.read_on_host([&](const Root&) {
      const plan work = make_plan(net, report);
      std::vector<std::vector<T>> made;
      for (const auto& [name, values] : spans) made.emplace_back(values.size());
      thread_pool(threads).run(static_cast<index_t>(work.pairs.size()), [&](index_t task, int) {
        const pair_task& pair = work.pairs[static_cast<std::size_t>(task)];
        for (std::size_t s = 0; s < made.size(); ++s) {
          if (made[s].empty()) continue;
          detail::project_state<T>(pair.matrix.of(states_[s].values.data()), pair.factors.up,
                                   pair.factors.down, detail::order_of_state(states_[s].name),
                                   pair.up.of(made[s].data()), pair.down.of(made[s].data()));
        }
      });
      for (std::size_t s = 0; s < made.size(); ++s) {
        if (made[s].empty()) continue;
        copy_ranges(work, states_[s].values, made[s]);
        std::copy(made[s].begin(), made[s].end(), mirrors[s].values().begin());
      }
    });
    for (auto& mirror : mirrors) mirror.send_back();
    to.set_steps(steps_);
    return report;
  }

 private:
  // An array of the old optimizer, copied to the host.
  struct state {
    std::string name;
    std::vector<T> values;
  };
  // A parameter of the old network: its name, its place in the arena, and its layout.
  struct old_parameter {
    std::string name;
    index_t offset;
    logical_layout layout;
  };
  // A matrix or bias of a layer of the old network, and its place in the arena.
  struct dense_matrix {
    std::string name;
    detail::arena_view<4> place;
  };
  struct dense_bias {
    bool missing;
    detail::arena_view<1> place;
  };
  // A layer of the old network.
  struct layer_before {
    std::string name;
    std::vector<dense_matrix> matrices;  // empty: the layer was low-rank
    std::vector<dense_bias> biases;

    bool is_low_rank() const { return matrices.empty(); }
  };

  // Origin of the state of a parameter of the new network; unknown: no layer's plan computes it.
  enum class origin : unsigned char { unknown, kept, projected };

  // Work of carry(), done for each state.
  struct pair_task {
    detail::arena_view<4> matrix;  // in the old arena
    factor_views<T> factors;       // values
    detail::arena_view<4> up, down;
  };
  // A range of elements that is copied.
  struct range_task {  // to = from
    index_t from, to, size;
  };
  // A bias, and those of which its state is the mean.
  struct bias_task {  // to = mean of from
    std::vector<detail::arena_view<1>> from;
    detail::arena_view<1> to;
  };
  // The places from which and to which states are copied or projected, the same for all arrays of the
  // optimizer.
  struct plan {
    std::vector<pair_task> pairs;
    std::vector<range_task> ranges;
    std::vector<bias_task> biases;
  };

  // Throws state_error unless the new optimizer has the same states, of `size` elements each where not empty.
  template <class Spans>
  void check_states(const Spans& spans, std::size_t size) const {
    bool same = spans.size() == states_.size();
    std::string before, after;
    for (const state& one : states_) before += " " + one.name + (one.values.empty() ? " (none)" : "");
    for (const auto& [name, values] : spans) after += " " + name + (values.empty() ? " (none)" : "");
    same = same && before == after;
    for (const auto& [name, values] : spans) same = same && (values.empty() || values.size() == size);
    if (same) return;
    detail::throw_error<state_error>({"optimizer_memory: the states", before, " cannot be carried to", after,
                                      " of a network of ", size, " parameters"});
  }

  // Finds the origin of each new parameter's state, and fills the report. Throws the errors of carry().
  template <class Root, class Device>
  plan make_plan(model<Root, Device>& net, carried_state& report) const {
    const auto& entries = net.store().parameters();
    std::vector<origin> done(entries.size(), origin::unknown);
    std::vector<bool> used(parameters_.size());
    plan work;
    const auto found = detail::find_slots(net);
    for (std::size_t i = 0; i < found.slots.size(); ++i) {
      const auto parts = found.slots[i]->low_rank();
      const auto before = std::find_if(layers_.begin(), layers_.end(), [&](const layer_before& layer) {
        return layer.name == found.layers[i].name;
      });
      if (before == layers_.end()) continue;
      if (before->is_low_rank() && !parts.is_low_rank()) {
        detail::throw_error<state_error>({"optimizer_memory: ", before->name,
                                          " was low-rank and is dense: no rule says how to carry its state"});
      }
      if (!before->is_low_rank() && parts.is_low_rank())
        plan_layer(net.store(), *before, parts, work, done, used);
    }
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const std::string& name = entries[i].name;
      if (done[i] != origin::unknown) {
        (done[i] == origin::kept ? report.kept : report.projected).push_back(name);
        continue;
      }
      const auto before = std::find_if(parameters_.begin(), parameters_.end(),
                                       [&](const old_parameter& one) { return one.name == name; });
      if (before == parameters_.end()) {
        report.fresh.push_back(name);
        continue;
      }
      if (!(before->layout == entries[i].thing->layout())) {
        detail::throw_error<shape_error>({"optimizer_memory: ", name, " was ", to_string(before->layout),
                                          " and is ", to_string(entries[i].thing->layout()),
                                          ": its state cannot be carried"});
      }
      work.ranges.push_back({before->offset, entries[i].offset, entries[i].thing->size()});
      used[static_cast<std::size_t>(before - parameters_.begin())] = true;
      report.kept.push_back(name);
    }
    for (std::size_t i = 0; i < used.size(); ++i) {
      if (!used[i]) report.dropped.push_back(parameters_[i].name);
    }
    return work;
  }

  // Plans the factors and biases of a layer that was dense before.
  void plan_layer(const parameter_store<T>& store, const layer_before& before, const low_rank_parts<T>& parts,
                  plan& work, std::vector<origin>& done, std::vector<bool>& used) const {
    if (before.matrices.size() != parts.factors.size()) {
      detail::throw_error<shape_error>({"optimizer_memory: ", before.name, " had ", before.matrices.size(),
                                        " matrices and has ", parts.factors.size(), " pairs of factors"});
    }
    const auto place = [&](const auto& view, origin how) {
      const auto result = detail::find_in_arena(store, view);
      require_stored(before.name, result.in_arena() || view.size() == 0);
      if (result.in_arena()) done[static_cast<std::size_t>(result.entry)] = how;
      return result;
    };
    const auto use = [&](const auto& from) {
      require_stored(before.name, from.in_arena() || volume(from.shape) == 0);
      if (from.in_arena()) used[static_cast<std::size_t>(from.entry)] = true;
    };
    for (std::size_t m = 0; m < parts.factors.size(); ++m) {
      const factor_views<T>& pair = parts.factors[m];
      const extents<4>& was = before.matrices[m].place.shape;
      const extents<4> is{pair.up.extent(0), pair.down.extent(1), pair.down.extent(2), pair.down.extent(3)};
      if (was != is) {
        detail::throw_error<shape_error>({"optimizer_memory: ", before.name, ".", before.matrices[m].name,
                                          " was ", was, " and its factors make ", is});
      }
      use(before.matrices[m].place);
      work.pairs.push_back({before.matrices[m].place, pair, place(pair.up, origin::projected),
                            place(pair.down, origin::projected)});
    }
    for (std::size_t b = 0; b < parts.biases.size(); ++b) {
      if (parts.biases[b].is_null()) continue;
      bias_task task{{}, {}};
      for (std::size_t from = b; from < before.biases.size(); from += parts.biases.size()) {
        if (before.biases[from].missing) continue;
        use(before.biases[from].place);
        task.from.push_back(before.biases[from].place);
      }
      task.to = place(parts.biases[b], task.from.size() == 1 ? origin::kept : origin::projected);
      work.biases.push_back(std::move(task));
    }
  }

  // Throws state_error, naming the layer, unless `stored`.
  static void require_stored(const std::string& layer, bool stored) {
    if (stored) return;
    detail::throw_error<state_error>(
        {"optimizer_memory: weights or factors of ", layer,
         " are not stored in the network's arenas, so they have no state there"});
  }

  // Copies kept states and makes the states of biases.
  static void copy_ranges(const plan& work, const std::vector<T>& from, std::vector<T>& to) {
    for (const range_task& range : work.ranges)
      std::copy_n(from.data() + range.from, range.size, to.data() + range.to);
    for (const bias_task& bias : work.biases) {
      const tensor_view<T, 1> target = bias.to.of(to.data());
      for (index_t i = 0; i < target.size(); ++i) {
        if (bias.from.size() == 1) {
          target(i) = bias.from.front().of(from.data())(i);
          continue;
        }
        double sum = 0.0;
        for (const auto& one : bias.from) sum += static_cast<double>(one.of(from.data())(i));
        target(i) = bias.from.empty() ? T{} : static_cast<T>(sum / static_cast<double>(bias.from.size()));
      }
    }
  }

  std::uint64_t steps_ = 0;
  std::vector<state> states_;
  std::vector<old_parameter> parameters_;
  std::vector<layer_before> layers_;
};

template <class Root, class Device, class Optimizer>
optimizer_memory(model<Root, Device>&, Optimizer&)
    -> optimizer_memory<typename model<Root, Device>::parameter_type>;

PUFFERFISH_NAMESPACE_END
