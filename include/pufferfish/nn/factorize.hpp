// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Whole networks from dense to low rank (`factorize`) and back (`merge`).

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/nn/conv.hpp>
#include <pufferfish/nn/linear.hpp>
#include <pufferfish/nn/lstm.hpp>
#include <pufferfish/nn/network.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Which layers of a network to factorize, and to what rank. The default is the paper's: rank ratio 1/4, the
/// last layer dense, shortcuts dense (Wang et al., Pufferfish, MLSys 2021, section 3).
struct factorize_policy {
  rank_policy rank = rank_ratio{0.25};
  /// K: layers 1 .. K-1 stay dense (the hybrid network), counting those with a weight matrix in execution
  /// order, shortcuts not counted. 1 factorizes from the first layer on; the paper never factorizes that
  /// one: 2. A number below 1, or above 2 and beyond the last layer, is refused with a value_error.
  index_t first_layer = 2;
  bool last_layer_dense = true;
  bool shortcuts_dense = true;
  /// Asked for each layer that the rules above would factorize; empty: all of them.
  std::function<bool(const std::string& name, matrix_size size)> also_if;
  /// Layers that would not become smaller stay dense (true), or are refused with a rank_error (false).
  bool keep_dense_if_larger = true;
  svd_method method = svd_method::automatic;
  std::uint64_t seed = 0;
  /// Layers factorized at once; the result does not depend on it.
  int threads = 1;
};

/// A layer and the rank it has, or should have; of an LSTM, that of its input side and that of its hidden
/// side.
struct layer_rank {
  std::string name;
  index_t rank = 0;
  index_t hidden = 0;
  friend bool operator==(const layer_rank&, const layer_rank&) = default;
};

/// What factorize did to a network.
struct factorization {
  std::vector<factor_report>
      layers;  ///< the factorized ones, in execution order; an LSTM's matrices one by one
  std::vector<layer_rank> low_rank;     ///< the same, one a layer
  std::vector<std::string> kept_dense;  ///< those that the policy wanted but that would have grown
  index_t parameters_before = 0;        ///< of the whole network
  index_t parameters_after = 0;

  /// Over all factorized layers together: sum of kept sigma^2 / sum of ||A||_F^2. 1 if there are none.
  double kept_energy() const {
    double kept = 0.0, all = 0.0;
    for (const factor_report& layer : layers) {
      kept += layer.squared_norm * layer.kept_energy;
      all += layer.squared_norm;
    }
    return all > 0.0 ? kept / all : 1.0;
  }

  /// What another rank of a distributed run needs to build the same structure.
  std::vector<layer_rank> ranks() const { return low_rank; }

  /// Adds a factorized layer, behind those that run before it.
  void add(const std::string& name, const layer_ranks& ranks, std::vector<factor_report> reports) {
    low_rank.push_back({name, ranks.rank, ranks.hidden});
    for (factor_report& report : reports) layers.push_back(std::move(report));
  }
};

namespace detail {

/// Finds the slots that a policy wants factorized.
template <class T, class Device>
class slot_selector final : public layer_visitor<T, Device> {
 public:
  struct found {
    std::string name;
    any_layer<T, Device>* slot;
    index_t number;  // 1, 2, ... along the main path; 0 on a shortcut
  };

  void on_layer(const std::string& name, any_layer<T, Device>& slot) override {
    // A low-rank layer holds its place in the count, so that numbers do not shift after a switch.
    if (slot.weight_matrix().empty() && !slot.ranks().is_low_rank()) return;
    slots_.push_back({name, &slot, shortcuts_ > 0 ? 0 : ++last_number_});
  }
  void enter_shortcut() override { ++shortcuts_; }
  void leave_shortcut() override { --shortcuts_; }

  const std::vector<found>& all() const { return slots_; }

  std::vector<found> select(const factorize_policy& policy) const {
    check_first_layer("factorize: first_layer", policy.first_layer, last_number_);
    std::vector<found> chosen;
    for (const found& f : slots_) {
      const bool shortcut = f.number == 0;
      if (shortcut ? policy.shortcuts_dense : f.number < policy.first_layer) continue;
      if (!shortcut && policy.last_layer_dense && f.number == last_number_) continue;
      const matrix_size size = f.slot->weight_matrix();
      if (size.empty() || (policy.also_if && !policy.also_if(f.name, size))) continue;
      chosen.push_back(f);
    }
    return chosen;
  }

 private:
  std::vector<found> slots_;
  index_t last_number_ = 0;
  int shortcuts_ = 0;
};

/// Grows as the time of a decomposition does.
inline double cost_of(const matrix_size& size) {
  return static_cast<double>(size.rows) * static_cast<double>(size.cols) *
         static_cast<double>(std::min(size.rows, size.cols));
}

/// Whether all of a layer's matrices together become smaller.
inline bool shrinks(const std::vector<factor_report>& reports) {
  index_t before = 0, after = 0;
  for (const factor_report& report : reports) {
    before += report.parameters_before;
    after += report.parameters_after;
  }
  return after < before;
}

/// A chosen slot, and what becomes of it: nothing if it would grow.
template <class T, class Device>
struct slot_factorization {
  std::string name;
  any_layer<T, Device>* slot;
  std::optional<any_layer<T, Device>> low_rank;
  std::vector<factor_report> reports;

  void run(const factorize_policy& policy) {
    const matrix_size size = slot->weight_matrix();
    if (policy.keep_dense_if_larger && largest_shrinking_rank(size.rows, size.cols) < 1) return;
    factorize_options options;
    options.name = name;
    options.method = policy.method;
    options.seed = policy.seed;
    options.allow_growth = policy.keep_dense_if_larger;
    any_layer<T, Device> made = slot->factorized(policy.rank, options, reports);
    if (reports.size() == 1) reports[0].name = name;
    if (policy.keep_dense_if_larger && !shrinks(reports)) return;
    low_rank = std::move(made);
  }

  double cost() const { return cost_of(slot->weight_matrix()); }
};

/// The large ones first. Each has a cost().
template <class Decomposition>
std::vector<std::size_t> decomposition_order(const std::vector<Decomposition>& work) {
  std::vector<std::size_t> order(work.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return work[a].cost() > work[b].cost(); });
  return order;
}

/// Runs all decompositions on policy.threads threads, the large ones first, so that no thread is left with
/// one at the end. Each has a cost() and a run(policy).
template <class Decomposition>
void run_decompositions(std::vector<Decomposition>& work, const factorize_policy& policy) {
  const std::vector<std::size_t> order = decomposition_order(work);
  thread_pool(policy.threads).run(static_cast<index_t>(work.size()), [&](index_t task, int) {
    work[order[static_cast<std::size_t>(task)]].run(policy);
  });
}

}  // namespace detail

/// Replaces the layers that `policy` chooses by their low-rank factors, all other layers, parameters and
/// buffers carried over bit for bit. New arenas, a new generation: optimizers and exchanges of the old one
/// throw from now on.
///
/// Errors as svd_factorize, naming the layer; the network is unchanged if anything is thrown.
template <class Root, class Device>
factorization factorize(model<Root, Device>& net, const factorize_policy& policy) {
  using T = typename Root::value_type;
  factorization result;
  result.parameters_before = net.parameter_count();
  net.modify([&](Root& root) {
    detail::slot_selector<T, Device> selector;
    root.visit_layers(selector);
    std::vector<detail::slot_factorization<T, Device>> work;
    for (const auto& found : selector.select(policy)) work.push_back({found.name, found.slot, {}, {}});
    detail::run_decompositions(work, policy);
    for (auto& done : work) {
      if (!done.low_rank) {
        result.kept_dense.push_back(done.name);
        continue;
      }
      *done.slot = std::move(*done.low_rank);
      result.add(done.name, done.slot->ranks(), std::move(done.reports));
    }
  });
  result.parameters_after = net.parameter_count();
  detail::return_free_memory();
  return result;
}

/// The device's form: <pufferfish/gpu.hpp>.
template <class Root>
factorization factorize(model<Root, device::gpu>& net, const factorize_policy& policy);

/// Gives a dense network the structure that factorize would: the named layers become low-rank layers of the
/// given ranks, with zeros for numbers. For ranks that receive the numbers from another, and for loading
/// checkpoints. Throws state_error for a name that is not a dense layer of the network, rank_error for an
/// impossible rank.
template <class Root, class Device>
void apply_ranks(model<Root, Device>& net, const std::vector<layer_rank>& ranks) {
  using T = typename Root::value_type;
  net.rearrange([&](Root& root) {
    struct finder final : layer_visitor<T, Device> {
      void on_layer(const std::string& name, any_layer<T, Device>& slot) override {
        slots.emplace_back(name, &slot);
      }
      std::vector<std::pair<std::string, any_layer<T, Device>*>> slots;
    } finder;
    root.visit_layers(finder);
    std::vector<std::pair<any_layer<T, Device>*, any_layer<T, Device>>> replacements;
    for (const layer_rank& wanted : ranks) {
      const auto at = std::find_if(finder.slots.begin(), finder.slots.end(),
                                   [&](const auto& slot) { return slot.first == wanted.name; });
      if (at == finder.slots.end() || at->second->weight_matrix().empty()) {
        PUFFERFISH_THROW(state_error("apply_ranks: the network has no dense layer called " + wanted.name));
      }
      const matrix_size size = at->second->weight_matrix();
      check_rank(wanted.name, size.rows, size.cols, wanted.rank);
      const matrix_size hidden = at->second->hidden_matrix();
      if (!hidden.empty()) check_rank(wanted.name + ", hidden side", hidden.rows, hidden.cols, wanted.hidden);
      replacements.emplace_back(at->second, at->second->low_rank_twin({wanted.rank, wanted.hidden}));
    }
    for (auto& [slot, layer] : replacements) *slot = std::move(layer);
  });
}

/// The layers that factorize would replace and the ranks it would give them, without a decomposition. Throws
/// value_error for a policy that needs the singular values (energy_kept).
template <class Root, class Device>
std::vector<layer_rank> planned_ranks(const model<Root, Device>& net, const factorize_policy& policy) {
  if (needs_spectrum(policy.rank)) {
    PUFFERFISH_THROW(value_error("planned_ranks: this policy needs the singular values of the weights"));
  }
  detail::slot_selector<typename Root::value_type, Device> selector;
  net.visit_layers(selector);
  std::vector<layer_rank> result;
  for (const auto& found : selector.select(policy)) {
    const matrix_size size = found.slot->weight_matrix(), hidden = found.slot->hidden_matrix();
    const auto rank_of = [&](const matrix_size& m) {
      return m.empty() ? 0 : choose_rank(policy.rank, m.rows, m.cols, {}, 0.0);
    };
    const layer_rank chosen{found.name, rank_of(size), rank_of(hidden)};
    const index_t after = factor_parameters(size.rows, size.cols, chosen.rank) +
                          factor_parameters(hidden.rows, hidden.cols, chosen.hidden);
    const index_t before = size.rows * size.cols + hidden.rows * hidden.cols;
    if (!policy.keep_dense_if_larger || after < before) result.push_back(chosen);
  }
  return result;
}

/// A layer by the number that factorize_policy::first_layer counts by.
struct layer_number {
  std::string name;
  index_t number = 0;  ///< 1, 2, ... in execution order; 0 on a shortcut
  friend bool operator==(const layer_number&, const layer_number&) = default;
};

/// The layers that have a weight matrix, or the factors of one, in execution order.
template <class Root, class Device>
std::vector<layer_number> numbered_layers(const model<Root, Device>& net) {
  detail::slot_selector<typename Root::value_type, Device> selector;
  net.visit_layers(selector);
  std::vector<layer_number> result;
  for (const auto& found : selector.all()) result.push_back({found.name, found.number});
  return result;
}

/// The low-rank layers that a network has now, with their ranks.
template <class Root, class Device>
std::vector<layer_rank> low_rank_layers(const model<Root, Device>& net) {
  std::vector<layer_rank> result;
  net.for_each_layer([&](const std::string& name, const auto& layer) {
    const layer_ranks ranks = layer.ranks();
    if (ranks.is_low_rank()) result.push_back({name, ranks.rank, ranks.hidden});
  });
  return result;
}

namespace detail {

template <class T>
Conv<T> merged(const low_rank_conv<T>& layer) {
  Conv<T> dense(layer.shape(), layer.has_bias());
  copy(tensor_view<const parameter_t<T>, 4>(layer.to_dense()), dense.weight());
  if (layer.has_bias()) copy(layer.bias(), dense.bias());
  return dense;
}
template <class T>
Linear<T> merged(const low_rank_linear<T>& layer) {
  Linear<T> dense(layer.in_features(), layer.out_features(), layer.has_bias());
  copy(tensor_view<const parameter_t<T>, 2>(layer.to_dense()), dense.weight());
  if (layer.has_bias()) copy(layer.bias(), dense.bias());
  return dense;
}

}  // namespace detail

/// Multiplies the factors of every low-rank layer out: a dense network of the same function up to rounding,
/// for programs that know dense layers only. New arenas, a new generation.
template <class Root, class Device>
void merge(model<Root, Device>& net) {
  using T = typename Root::value_type;
  net.modify([](Root& root) {
    struct merger final : layer_visitor<T, Device> {
      void on_layer(const std::string&, any_layer<T, Device>& slot) override {
        if (const auto* conv = slot.low_rank_conv()) {
          slot = any_layer<T, Device>(detail::merged(*conv));
        } else if (const auto* linear = slot.low_rank_linear()) {
          slot = any_layer<T, Device>(detail::merged(*linear));
        } else if (const auto* lstm = slot.low_rank_lstm()) {
          slot = any_layer<T, Device>(detail::merged(*lstm));
        }
      }
    } merger;
    root.visit_layers(merger);
  });
}

/// The device's form: <pufferfish/gpu.hpp>.
template <class Root>
void merge(model<Root, device::gpu>& net);

PUFFERFISH_NAMESPACE_END
