// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `budget_problem`, the layers of a budget as a pricing problem. At given prices of parameters,
/// multiply-adds and milliseconds, each layer gets the ranks with the largest gain minus price.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/lowrank/budget/budget_layer.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A cost, or a price per unit of cost, indexed by budget_resource.
using budget_vector = std::array<double, budget_resources>;

/// The costs in the order of budget_resource.
inline budget_vector to_vector(const network_cost& cost) {
  return {cost.parameters, cost.macs, cost.milliseconds};
}
/// The inner product of two vectors, such as the price of a cost.
inline double dot(const budget_vector& a, const budget_vector& b) {
  double sum = 0.0;
  for (std::size_t k = 0; k < a.size(); ++k) sum += a[k] * b[k];
  return sum;
}
/// Returns a + factor b.
inline budget_vector plus_scaled(const budget_vector& a, double factor, const budget_vector& b) {
  budget_vector sum = a;
  for (std::size_t k = 0; k < a.size(); ++k) sum[k] += factor * b[k];
  return sum;
}

/// The midpoint of two non-negative numbers in the order of their bit patterns, so that half of the steps of
/// a bisection find the exponent.
inline double price_between(double low, double high) {
  const auto a = std::bit_cast<std::uint64_t>(low), b = std::bit_cast<std::uint64_t>(high);
  return std::bit_cast<double>(a + (b - a) / 2);
}
/// Whether two non-negative numbers agree to a relative precision of about 2^-`bits`.
inline bool prices_agree(double low, double high, int bits) {
  return std::bit_cast<std::uint64_t>(high) - std::bit_cast<std::uint64_t>(low) <=
         (std::uint64_t{1} << (52 - bits));
}

/// The layers sorted by name, with the groups of all layers in one list and, for each rank of a group, the
/// sum of the dropped gains. The problem points into the caller's gains, which must outlive it.
class budget_problem {
 public:
  /// A rank group of a layer, with the smallest and the largest rank that `choose` may select.
  struct group {
    const double* gains = nullptr;
    const double* dropped = nullptr;  // [rank]: sum of gains[rank] and all later gains
    index_t floor = 0, last = 0;      // smallest and largest rank
    budget_vector per_rank{};         // cost of one more rank
  };
  /// A layer of the problem. Its groups are groups()[first .. first + groups - 1].
  struct layer {
    std::size_t index = 0;               // position in the caller's list
    std::size_t first = 0, groups = 0;   // position of its first group, number of groups
    budget_vector at_rank_0{}, dense{};  // costs: of the factors extrapolated to rank 0, of the dense layer
    bool low_rank = false;               // whether factors at the floor pay
    budget_reason otherwise = budget_reason::growth;  // reason to stay dense if factors do not pay
  };
  /// Choices that the search allows for a layer: dense only, low-rank only, or both.
  enum class layer_form : char { any, dense, low_rank };
  using forms = std::vector<layer_form>;
  /// A solution: for each layer whether it is dense or low-rank, and for each group its rank.
  struct state {
    std::vector<index_t> ranks;  // rank of each group
    std::vector<char> dense;     // whether each layer is dense
    budget_vector cost{};        // of all layers, without the rest of the network
  };

  /// Sorts and prices the layers, which must have been validated (check_budget_input). `timed`: the budget
  /// limits milliseconds, so factors must also be faster than the dense layer.
  budget_problem(std::span<const budget_layer> all, const budget_options& options, bool timed)
      : timed_(timed) {
    std::vector<std::size_t> order(all.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return all[a].name < all[b].name; });
    std::size_t sums = 0;
    for (const budget_layer& one : all) {
      for (const budget_group& g : one.groups)
        sums += static_cast<std::size_t>(std::min(g.size.rows, g.size.cols)) + 1;
    }
    sums_.reserve(sums);  // groups point into it
    for (const std::size_t index : order) add(all[index], index, options);
  }

  budget_problem(const budget_problem&) = delete;
  budget_problem& operator=(const budget_problem&) = delete;

  /// The layers, sorted by name.
  const std::vector<layer>& layers() const { return layers_; }
  /// The groups of all layers, one layer after the other.
  const std::vector<group>& groups() const { return groups_; }

  /// Returns which choices (layer_form) each layer has if only its own costs limit them: `any` if factors can
  /// be smaller than the dense layer, else `dense`.
  forms all_forms() const {
    forms made;
    for (const layer& one : layers_) made.push_back(one.low_rank ? layer_form::any : layer_form::dense);
    return made;
  }

  /// The state in which all layers are dense.
  state all_dense() const {
    state made{std::vector<index_t>(groups_.size(), 0), std::vector<char>(layers_.size(), 1), {}};
    for (const layer& one : layers_) made.cost = plus_scaled(made.cost, 1.0, one.dense);
    return made;
  }

  /// The minimum cost of all layers in one resource (an index of budget_vector).
  double least(std::size_t resource) const {
    double sum = 0.0;
    for (const layer& one : layers_) {
      const double dense = one.dense[resource];
      sum += one.low_rank ? std::min(dense, floor_cost(one)[resource]) : dense;
    }
    return sum;
  }

  /// Chooses for each layer the ranks, or the dense layer, with the largest gain minus price, among the forms
  /// that `form` allows. Writes `to`, including its cost.
  void choose(const budget_vector& price, const forms& form, state& to) const {
    to.cost = {};
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const layer& one = layers_[i];
      budget_vector cost = one.dense;
      to.dense[i] = form[i] == layer_form::dense ? 1 : 0;
      if (to.dense[i] == 0) {
        const bool may_be_dense = form[i] == layer_form::any;
        set_ranks(one, price, 1.0, to);
        cost = low_rank_cost(one, to);
        bool dense = may_be_dense && worth_dense(one, price, cost, to);
        if (!dense && !pays(one, cost)) {
          lower_ranks(one, price, to);
          cost = low_rank_cost(one, to);
          dense = may_be_dense && worth_dense(one, price, cost, to);
        }
        if (dense) {
          to.dense[i] = 1;
          cost = one.dense;
        }
      }
      to.cost = plus_scaled(to.cost, 1.0, cost);
    }
  }

  /// Upper bound for a search of prices: at this multiple of `price`, `choose` returns each layer's least
  /// rank.
  double highest_price(const budget_vector& price) const {
    double highest = 0.0;
    const auto consider = [&](double gain, double cost) {
      if (cost > 0.0) highest = std::max(highest, gain / cost);
    };
    for (const layer& one : layers_) {
      if (!one.low_rank) continue;
      double lost = 0.0;
      for (std::size_t g = one.first; g < one.first + one.groups; ++g) {
        lost += groups_[g].dropped[groups_[g].floor];
        if (groups_[g].floor < groups_[g].last) {
          consider(groups_[g].gains[groups_[g].floor], dot(price, groups_[g].per_rank));
        }
      }
      consider(lost, dot(price, plus_scaled(one.dense, -1.0, floor_cost(one))));
    }
    return highest > 0.0 && std::isfinite(2.0 * highest) ? 2.0 * highest : 1.0;
  }

  /// Predicted loss of a layer's factors at the state's ranks: the sum of the dropped gains.
  double lost(const layer& one, const state& of) const {
    double sum = 0.0;
    for (std::size_t g = one.first; g < one.first + one.groups; ++g) sum += groups_[g].dropped[of.ranks[g]];
    return sum;
  }
  /// Predicted loss of all layers; 0 for a dense layer.
  double lost(const state& of) const {
    double sum = 0.0;
    for (std::size_t i = 0; i < layers_.size(); ++i) sum += of.dense[i] != 0 ? 0.0 : lost(layers_[i], of);
    return sum;
  }
  /// Additional cost of a dense layer over its factors at the state's ranks or, if the layer is dense in that
  /// state, over factors at the floor.
  budget_vector step_to_dense(std::size_t i, const state& of) const {
    const layer& one = layers_[i];
    return plus_scaled(one.dense, -1.0, of.dense[i] != 0 ? floor_cost(one) : low_rank_cost(one, of));
  }
  /// Sum of all gains of a layer.
  double all_gains(const layer& one) const {
    double sum = 0.0;
    for (std::size_t g = one.first; g < one.first + one.groups; ++g) sum += groups_[g].dropped[0];
    return sum;
  }

  /// Cost of a layer's factors at the state's ranks.
  budget_vector low_rank_cost(const layer& one, const state& of) const {
    budget_vector cost = one.at_rank_0;
    for (std::size_t g = one.first; g < one.first + one.groups; ++g) {
      cost = plus_scaled(cost, static_cast<double>(of.ranks[g]), groups_[g].per_rank);
    }
    return cost;
  }

  /// Whether factors of this cost have fewer parameters than the dense layer and, under a
  /// limit of time, take less time.
  bool pays(const layer& one, const budget_vector& cost) const {
    constexpr auto time = static_cast<std::size_t>(budget_resource::milliseconds);
    return cost[0] < one.dense[0] && (!timed_ || cost[time] < one.dense[time]);
  }

 private:
  /// Appends a layer with its groups: sums of dropped gains, costs, and whether factors at the floor pay.
  void add(const budget_layer& from, std::size_t index, const budget_options& options) {
    layer made;
    made.index = index;
    made.first = groups_.size();
    made.groups = from.groups.size();
    made.dense = to_vector(cost_of(from));
    made.at_rank_0 = {0.0, 0.0, from.low_rank_ms};
    for (const budget_group& g : from.groups) {
      const index_t full = std::min(g.size.rows, g.size.cols);
      group item;
      item.gains = g.gains.data();
      item.per_rank = to_vector(cost_per_rank(g));
      item.floor = std::min(options.floor, full);
      item.last = full;
      const std::size_t begin = sums_.size();
      sums_.resize(begin + static_cast<std::size_t>(full) + 1, 0.0);
      for (auto r = static_cast<std::size_t>(full); r-- > 0;) {
        sums_[begin + r] = sums_[begin + r + 1] + g.gains[r];
      }
      item.dropped = sums_.data() + begin;
      groups_.push_back(item);
    }
    const budget_vector least = floor_cost(made);
    made.low_rank = pays(made, least);
    made.otherwise = least[0] < made.dense[0] ? budget_reason::slower : budget_reason::growth;
    if (made.low_rank) {
      for (std::size_t g = made.first; g < groups_.size(); ++g) limit_rank(made, least, groups_[g]);
    }
    layers_.push_back(made);
  }

  /// Lowers the group's largest rank to the largest one that pays with the other groups at their floors.
  void limit_rank(const layer& one, const budget_vector& least, group& g) const {
    index_t low = g.floor, high = g.last + 1;
    while (high - low > 1) {
      const index_t middle = low + (high - low) / 2;
      const bool fits = pays(one, plus_scaled(least, static_cast<double>(middle - g.floor), g.per_rank));
      (fits ? low : high) = middle;
    }
    g.last = low;
  }

  /// Cost of a layer with all groups at their floors.
  budget_vector floor_cost(const layer& one) const {
    budget_vector cost = one.at_rank_0;
    for (std::size_t g = one.first; g < one.first + one.groups; ++g) {
      cost = plus_scaled(cost, static_cast<double>(groups_[g].floor), groups_[g].per_rank);
    }
    return cost;
  }

  /// Selects every component whose gain exceeds its price times `factor`.
  void set_ranks(const layer& one, const budget_vector& price, double factor, state& to) const {
    for (std::size_t i = one.first; i < one.first + one.groups; ++i) {
      const group& g = groups_[i];
      const double least = factor * dot(price, g.per_rank);
      to.ranks[i] = std::partition_point(g.gains + g.floor, g.gains + g.last,
                                         [least](double gain) { return gain > least; }) -
                    g.gains;
    }
  }

  /// Raises the price of a layer's components until its factors cost less than the dense layer (`pays`).
  void lower_ranks(const layer& one, budget_vector price, state& to) const {
    price[0] = std::max(price[0], 1e-290);
    double low = 1.0, high = std::numeric_limits<double>::max();
    while (!prices_agree(low, high, 30)) {
      const double middle = price_between(low, high);
      set_ranks(one, price, middle, to);
      (pays(one, low_rank_cost(one, to)) ? high : low) = middle;
    }
    set_ranks(one, price, high, to);
  }

  /// Whether the gains lost by factors of this cost exceed the price of the additional cost of the dense
  /// layer.
  bool worth_dense(const layer& one, const budget_vector& price, const budget_vector& cost,
                   const state& of) const {
    const double extra = dot(price, plus_scaled(one.dense, -1.0, cost));
    return extra <= 0.0 || lost(one, of) > extra;
  }

  bool timed_;
  std::vector<double> sums_;
  std::vector<group> groups_;
  std::vector<layer> layers_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
