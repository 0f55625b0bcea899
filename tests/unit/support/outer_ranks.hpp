// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/distributed/rare_exchange.hpp>

/// The formulas of rare_exchange written down serially, in double, for all ranks at once.
namespace outer_ranks {

using namespace pufferfish;

/// A local step of a rank: towards a random point of its own.
template <class T>
void local_step(std::span<T> values, int rank, std::uint64_t step) {
  std::vector<T> target(values.size());
  fill_normal(std::span<T>(target), 1.0, random_stream(step + 1, static_cast<std::uint64_t>(rank) + 3));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] -= T(0.125) * (values[i] - target[i]);
}

class serial_ranks {
 public:
  using vector = std::vector<double>;
  /// Turns the ranks' outer gradients of a fragment into one.
  using reduction = std::function<vector(const std::vector<vector>&, std::size_t fragment)>;

  serial_ranks(vector start, int ranks, const rare_exchange_options& options,
               std::vector<gradient_bucket> fragments, reduction reduce)
      : theta(start),
        v(start.size(), 0.0),
        local(static_cast<std::size_t>(ranks), start),
        options_(options),
        fragments_(std::move(fragments)),
        reduce_(std::move(reduce)),
        steps_since_(fragments_.size(), 0),
        round_(options.local_steps),
        next_round_(options.local_steps) {}

  vector theta, v;
  std::vector<vector> local;

  /// H of the rounds that start from now on.
  void set_next_round(index_t steps) {
    next_round_ = steps;
    if (position_ == 0) round_ = steps;
  }

  void step_done() {
    ++time_;
    ++position_;
    for (index_t& steps : steps_since_) ++steps;
    while (!under_way_.empty() && under_way_.front().end <= time_) complete();
    for (std::size_t f = 0; f < fragments_.size(); ++f) {
      const double due =
          static_cast<double>(round_) * static_cast<double>(f + 1) / static_cast<double>(fragments_.size());
      if (position_ != static_cast<index_t>(std::ceil(due - 1e-9))) continue;
      for (bool again = true; again;) {
        again = false;
        for (const message& one : under_way_) again = again || one.fragment == f;
        if (again) complete();
      }
      const vector change = take(f);
      if (options_.delay == 0) {
        apply(f, change, 0.0);
      } else {
        under_way_.push_back({f, time_ + options_.delay, change});
      }
    }
    if (position_ == round_) restart_round();
  }

  void synchronize() {
    while (!under_way_.empty()) complete();
    for (std::size_t f = 0; f < fragments_.size(); ++f) {
      if (steps_since_[f] > 0) apply(f, take(f), 0.0);
    }
    for (vector& one : local) one = theta;
    restart_round();
  }

 private:
  struct message {
    std::size_t fragment;
    index_t end;
    vector change;
  };

  void restart_round() {
    position_ = 0;
    round_ = next_round_;
  }
  vector take(std::size_t f) {
    std::vector<vector> changes;
    for (const vector& one : local) {
      changes.emplace_back();
      for (std::size_t i = begin(f); i < end(f); ++i) changes.back().push_back(theta[i] - one[i]);
    }
    steps_since_[f] = 0;
    return reduce_(changes, f);
  }
  void complete() {
    const message one = under_way_.front();
    under_way_.erase(under_way_.begin());
    apply(one.fragment, one.change, options_.mixing);
  }
  void apply(std::size_t f, const vector& change, double alpha) {
    const double mu = options_.outer_momentum;
    for (std::size_t i = begin(f); i < end(f); ++i) {
      const double d = change[i - begin(f)];
      v[i] = mu * v[i] + d;
      theta[i] -= options_.outer_rate * (options_.nesterov ? d + mu * v[i] : v[i]);
      for (vector& one : local) one[i] = alpha * one[i] + (1.0 - alpha) * theta[i];
    }
  }
  std::size_t begin(std::size_t f) const { return static_cast<std::size_t>(fragments_[f].offset); }
  std::size_t end(std::size_t f) const { return begin(f) + static_cast<std::size_t>(fragments_[f].size); }

  rare_exchange_options options_;
  std::vector<gradient_bucket> fragments_;
  reduction reduce_;
  std::vector<index_t> steps_since_;
  std::vector<message> under_way_;
  index_t round_, next_round_, position_ = 0, time_ = 0;
};

/// The mean of the ranks' vectors, added in the order of the ranks.
inline std::vector<double> mean_of_ranks(const std::vector<std::vector<double>>& all, std::size_t) {
  std::vector<double> sum(all[0].size(), 0.0);
  for (const auto& one : all) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += one[i];
  }
  for (double& value : sum) value /= static_cast<double>(all.size());
  return sum;
}

}  // namespace outer_ranks
