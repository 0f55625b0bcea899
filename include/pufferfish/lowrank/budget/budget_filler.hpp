// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `budget_filler`, the greedy last step of `allocate`. The budget that a search left over is spent
/// on further components.

#include <algorithm>
#include <cstddef>
#include <limits>
#include <queue>
#include <vector>

#include <pufferfish/lowrank/budget/budget_problem.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Spends the rest of a budget greedily. Each step buys the move with the highest gain per priced cost:
/// either the next component of a group, or a whole dense layer instead of its factors. Moves that do not fit
/// into the rest are skipped.
class budget_filler {
 public:
  using state = budget_problem::state;

  /// `price`: price per unit of each cost. `form`: for each layer, whether it may be dense, low-rank, or
  /// both. `problem` and `form` must outlive this object.
  budget_filler(const budget_problem& problem, const budget_problem::forms& form, const budget_vector& price)
      : problem_(problem), form_(form), price_(price) {}

  /// Adds components and dense layers to the state `to` and recomputes to.cost. `room`: costs that may be
  /// added to those of the state. Returns the number of moves examined, a measure of the work.
  std::size_t operator()(state& to, budget_vector room) {
    std::size_t looked_at = 0;
    for (bool again = true; again;) {
      again = false;
      moves_ = {};
      changes_.assign(problem_.layers().size(), 0);
      for (std::size_t i = 0; i < problem_.layers().size(); ++i) offer_all(i, to);
      while (!moves_.empty()) {
        const move best = moves_.top();
        moves_.pop();
        ++looked_at;
        if (best.to_dense && best.version != changes_[best.layer]) continue;
        if (to.dense[best.layer] != 0) continue;
        const budget_vector cost = cost_of(best, to);
        if (!fits(cost, room) || !allowed(best, to)) continue;
        room = plus_scaled(room, -1.0, cost);
        // A dense embedding frees multiply-adds, so moves that did not fit may fit now.
        again = again || std::any_of(cost.begin(), cost.end(), [](double c) { return c < 0.0; });
        take(best, to);
      }
    }
    to.cost = {};
    for (std::size_t i = 0; i < problem_.layers().size(); ++i) {
      const budget_problem::layer& one = problem_.layers()[i];
      to.cost = plus_scaled(to.cost, 1.0, to.dense[i] != 0 ? one.dense : problem_.low_rank_cost(one, to));
    }
    return looked_at;
  }

 private:
  // An improvement that the rest of the budget may buy. The order puts the highest worth last, and breaks
  // ties by layer, then by group, so that the result does not depend on the order of insertion.
  struct move {
    double worth = 0.0;  // gain per unit of priced cost
    std::size_t layer = 0, group = 0;
    bool to_dense = false;
    std::size_t version = 0;  // changes_[layer] when the move to dense was priced
    // Order of a priority queue, whose top is the move of highest worth.
    bool operator<(const move& other) const {
      if (worth != other.worth) return worth < other.worth;
      if (layer != other.layer) return layer > other.layer;
      if (to_dense != other.to_dense) return to_dense;
      return group > other.group;
    }
  };

  // Whether every cost that the move increases is within the rest of the budget.
  static bool fits(const budget_vector& cost, const budget_vector& room) {
    for (std::size_t k = 0; k < cost.size(); ++k) {
      if (cost[k] > 0.0 && !(cost[k] <= room[k])) return false;
    }
    return true;
  }

  // Whether the factors still pay (budget_problem::pays) after the move. A move to a dense layer is always
  // allowed.
  bool allowed(const move& one, const state& in) const {
    const budget_problem::layer& layer = problem_.layers()[one.layer];
    return one.to_dense ||
           problem_.pays(layer, plus_scaled(problem_.low_rank_cost(layer, in), 1.0, cost_of(one, in)));
  }

  // Cost of the state after the move minus its cost before the move.
  budget_vector cost_of(const move& one, const state& in) const {
    const budget_problem::layer& layer = problem_.layers()[one.layer];
    return one.to_dense ? plus_scaled(layer.dense, -1.0, problem_.low_rank_cost(layer, in))
                        : problem_.groups()[one.group].per_rank;
  }

  // Prices a move and adds it to the queue. A move that costs nothing has infinite worth.
  void push(move one, double gain, const state& in) {
    const double cost = dot(price_, cost_of(one, in));
    one.worth = cost > 0.0 ? gain / cost : std::numeric_limits<double>::infinity();
    moves_.push(one);
  }
  // Queues the next component of a group, unless its gain is 0 or the group has its largest rank.
  void offer_group(std::size_t layer, std::size_t group, const state& in) {
    const budget_problem::group& g = problem_.groups()[group];
    const index_t rank = in.ranks[group];
    if (rank < g.last && g.gains[rank] > 0.0) push({0.0, layer, group, false, 0}, g.gains[rank], in);
  }
  // Queues the move to the dense layer, if the layer may be dense. Its gain is the loss of the present
  // factors.
  void offer_dense(std::size_t layer, const state& in) {
    if (form_[layer] != budget_problem::layer_form::any) return;
    const double gain = problem_.lost(problem_.layers()[layer], in);
    if (gain > 0.0) push({0.0, layer, 0, true, changes_[layer]}, gain, in);
  }
  // Queues all moves of a layer, unless the layer is dense.
  void offer_all(std::size_t layer, const state& in) {
    if (in.dense[layer] != 0) return;
    const budget_problem::layer& one = problem_.layers()[layer];
    for (std::size_t g = one.first; g < one.first + one.groups; ++g) offer_group(layer, g, in);
    offer_dense(layer, in);
  }

  // Applies a move to the state, and queues the moves that follow from the new rank.
  void take(const move& best, state& to) {
    if (best.to_dense) {
      to.dense[best.layer] = 1;
      return;
    }
    ++to.ranks[best.group];
    ++changes_[best.layer];
    offer_group(best.layer, best.group, to);
    offer_dense(best.layer, to);
  }

  const budget_problem& problem_;
  const budget_problem::forms& form_;
  budget_vector price_;
  std::priority_queue<move> moves_;
  std::vector<std::size_t> changes_;  // number of changes of each layer's ranks
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
