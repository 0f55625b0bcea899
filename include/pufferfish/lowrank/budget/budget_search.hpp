// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `budget_search`, which searches the ranks of all layers under several limits. The search finds
/// prices at which all limits hold, and branches on whether a layer stays dense.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/lowrank/budget/budget_filler.hpp>
#include <pufferfish/lowrank/budget/network_budget.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Relative precision of prices, in bits. Components between two prices this close are bought one by one.
inline constexpr int price_bits = 14;
/// Number of layers and components examined before the search stops branching. This work takes 5 to 20 ms.
inline constexpr std::size_t budget_work = 200000;
/// Least relative improvement on the best state for which a branch is searched.
inline constexpr double budget_tolerance = 1e-6;

/// Finds the state of least loss within all limits.
///
/// For fixed forms of the layers (dense, low rank or any), the search raises the prices of costs until the
/// limits hold. Each layer gets the components that are worth their price, which is optimal except for the
/// budget left over. The budget left over can be large if a layer's dense and low-rank forms are worth the
/// same at that price, so the search branches on such a layer. Any price yields a lower bound on the loss of
/// all states of a branch, so most branches end at once.
class budget_search {
 public:
  using state = budget_problem::state;
  using forms = budget_problem::forms;

  /// `rest`: costs of the network outside the problem's layers. `problem` must outlive this object; `limits`
  /// is read during the call only.
  budget_search(const budget_problem& problem, const budget_vector& rest,
                std::span<const budget_limit> limits)
      : problem_(problem), above_(problem.all_dense()), below_(above_), spare_(above_) {
    room_.fill(std::numeric_limits<double>::infinity());
    for (const budget_limit& limit : limits) {
      const auto k = static_cast<std::size_t>(limit.resource);
      if (std::isinf(room_[k])) limited_.push_back(k);
      room_[k] = std::min(room_[k], limit.most() - rest[k]);
    }
    std::sort(limited_.begin(), limited_.end());
    for (const std::size_t k : limited_) scale_[k] = room_[k] > 0.0 ? room_[k] : 1.0;
  }

  /// Whether layers with this cost stay within all limits.
  bool holds(const budget_vector& cost) const {
    return std::all_of(limited_.begin(), limited_.end(), [&](std::size_t k) { return cost[k] <= room_[k]; });
  }

  /// The best state found; empty if no state within all limits was found.
  std::optional<state> operator()() {
    forms form = problem_.all_forms();
    const node root = look(form);
    branch(form, root);
    return std::move(best_);
  }

 private:
  static constexpr double infinity = std::numeric_limits<double>::infinity();
  using layer_form = budget_problem::layer_form;

  /// Result of examining the states with certain forms.
  struct node {
    double bound = 0.0;     // lower bound on the loss; infinity: no state holds
    std::size_t layer = 0;  // layer to branch on
    bool leaf = true;       // no layer to branch on
  };

  /// Finds prices for these forms, and the states that result from them.
  node look(const forms& form) {
    form_ = &form;
    candidates_.clear();
    bound_ = 0.0;
    budget_vector weights{};
    settle(limited_.size() - 1, 1.0, weights);
    if (bound_ == infinity) return {infinity, 0, true};
    candidates_.push_back(weights);
    node found;
    double largest = 0.0;
    bool any_even = false;
    std::vector<char> first;
    for (const budget_vector& candidate : candidates_) {
      excess(candidate);
      if (first.empty()) first = below_.dense;
      for (std::size_t i = 0; i < form.size(); ++i) {
        if (form[i] != layer_form::any) continue;
        // Prefer layers for which dense and low rank are worth the same; among those, the largest.
        const bool even = above_.dense[i] != first[i] || below_.dense[i] != first[i];
        const double step = std::abs(dot(price_of(candidate), problem_.step_to_dense(i, below_)));
        if (!found.leaf && (even == any_even ? step <= largest : any_even)) continue;
        found.leaf = false;
        found.layer = i;
        largest = step;
        any_even = even;
      }
      finish(candidate);
    }
    if (limited_.size() > 1) {  // prices of a single resource may also lead to good states
      for (const std::size_t k : limited_) {
        weights = {};
        weights[k] = 1.0;
        finish(weights);
      }
    }
    found.bound = bound_;
    return found;
  }

  /// Searches the branches below a node, the more promising one first.
  void branch(forms& form, const node& at) {
    if (at.leaf || work_ > budget_work || !promising(at)) return;
    const layer_form before = form[at.layer];
    constexpr std::array<layer_form, 2> choices{layer_form::dense, layer_form::low_rank};
    std::array<node, 2> below;
    for (std::size_t c = 0; c < 2; ++c) {
      form[at.layer] = choices[c];
      below[c] = look(form);
    }
    const std::size_t better = below[1].bound < below[0].bound ? 1 : 0;
    for (const std::size_t c : {better, 1 - better}) {
      form[at.layer] = choices[c];
      branch(form, below[c]);
    }
    form[at.layer] = before;
  }
  // Whether a branch may contain a better state than the best one found.
  bool promising(const node& at) const {
    return at.bound < infinity && (!best_ || at.bound < (1.0 - budget_tolerance) * least_);
  }

  /// Prices per unit of cost: the weights divided by the available amounts.
  budget_vector price_of(const budget_vector& weights) const {
    budget_vector price{};
    for (const std::size_t k : limited_) price[k] = weights[k] / scale_[k];
    return price;
  }

  /// Chooses the state for the prices `factor` * `unit`.
  void choose(const budget_vector& unit, double factor, state& to) {
    budget_vector price = unit;
    for (double& one : price) one *= factor;
    problem_.choose(price, *form_, to);
    work_ += form_->size();
  }

  /// Finds two neighbouring factors of `unit`: low_, at which the state (above_) is too much, and high_, at
  /// which the state (below_) is not. Returns false if the state is too much at every factor. If it is too
  /// much at no factor, returns true with low_ = high_ = 0.
  template <class TooMuch>
  bool bracket(const budget_vector& unit, const TooMuch& too_much) {
    const double highest = problem_.highest_price(unit), guess = high_;
    low_ = high_ = 0.0;
    choose(unit, 0.0, above_);
    if (!too_much(above_)) {
      below_ = above_;
      return true;
    }
    high_ = highest;
    const auto test = [&](double factor) {
      choose(unit, factor, spare_);
      const bool more = too_much(spare_);
      std::swap(spare_, more ? above_ : below_);
      (more ? low_ : high_) = factor;
    };
    // The factor changes little from one search to the next, so the last one is tried first.
    if (guess > 0.0 && 1.2 * guess < highest) {
      test(1.2 * guess);
      if (high_ < highest) test(guess / 1.2);
    }
    if (high_ == highest) test(highest);
    if (low_ == highest) return false;
    while (!prices_agree(low_, high_, price_bits)) test(price_between(low_, high_));
    return true;
  }

  /// The relative excess of each resource's cost over the available amount, at the prices at which the
  /// weighted sum of all costs equals the available sum. The costs are interpolated between the two states
  /// around these prices, as if layers were divisible.
  budget_vector excess(const budget_vector& weights) {
    const budget_vector unit = price_of(weights);
    budget_vector room{};  // room_ with 0 for unlimited resources
    for (const std::size_t k : limited_) room[k] = room_[k];
    const double allowed = dot(unit, room);
    if (!bracket(unit, [&](const state& s) { return dot(unit, s.cost) > allowed; })) {
      bound_ = infinity;
      return {};
    }
    const double above = dot(unit, above_.cost), below = dot(unit, below_.cost);
    bound_ = std::max(bound_, problem_.lost(above_) + low_ * (above - allowed));
    bound_ = std::max(bound_, problem_.lost(below_) + high_ * (below - allowed));
    const double part = above > below ? std::clamp((allowed - below) / (above - below), 0.0, 1.0) : 0.0;
    budget_vector result{};
    for (const std::size_t k : limited_) {
      result[k] = (below_.cost[k] + part * (above_.cost[k] - below_.cost[k]) - room[k]) / scale_[k];
    }
    return result;
  }

  /// Nested bisection: distributes the weight `share` over the first last + 1 limited resources such that
  /// none of them exceeds its available amount, and returns the excess of all resources. Appends the weights
  /// on the other side of the last step to candidates_.
  budget_vector settle(std::size_t last, double share, budget_vector& weights) {
    const std::size_t resource = limited_[last];
    if (last == 0) {
      weights[resource] = share;
      return excess(weights);
    }
    weights[resource] = 0.0;
    budget_vector found = settle(last - 1, share, weights);
    if (found[resource] <= 0.0) return found;
    const auto set = [&](double part) {
      weights[resource] = share * part;
      found = settle(last - 1, share * (1.0 - part), weights);
    };
    double low = 0.0, high = 1.0;
    for (int step = limited_.size() < 3 ? 20 : 14; step > 0 && bound_ < infinity; --step) {
      const double middle = 0.5 * (low + high);
      set(middle);
      (found[resource] > 0.0 ? low : high) = middle;
    }
    if (last + 1 == limited_.size()) {
      set(low);
      candidates_.push_back(weights);
    }
    set(high);
    return found;
  }

  /// Starts at the lowest prices of these weights at which all limits hold, and buys what still fits.
  void finish(const budget_vector& weights) {
    const budget_vector unit = price_of(weights);
    if (!bracket(unit, [this](const state& s) { return !holds(s.cost); })) return;
    work_ += budget_filler(problem_, *form_, unit)(below_, plus_scaled(room_, -1.0, below_.cost));
    const double lost = problem_.lost(below_);
    if (best_ && least_ <= lost) return;
    best_ = below_;
    least_ = lost;
  }

  const budget_problem& problem_;
  budget_vector room_{}, scale_{};    // available amount of each resource; divisor of its prices
  std::vector<std::size_t> limited_;  // resources with a limit
  const forms* form_ = nullptr;
  state above_, below_, spare_;            // the states around the last price (see bracket), and memory
  double low_ = 0.0, high_ = 0.0;          // multiples of the price unit that lead to above_ and below_
  std::vector<budget_vector> candidates_;  // weights of the resources to finish with
  double bound_ = 0.0;                     // lower bound on the loss of states of these forms
  std::optional<state> best_;              // state of least loss found
  double least_ = 0.0;                     // loss of best_
  std::size_t work_ = 0;                   // layers and components examined so far
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
