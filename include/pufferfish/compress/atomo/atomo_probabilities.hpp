// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The probabilities with which ATOMO keeps the atoms of a gradient.

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include <pufferfish/core/message.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The sum of the magnitudes of weights up to a level, and the number of weights above the level.
struct atomo_tail {
  double sum = 0;
  double above = 0;
};

/// The saturation M of ATOMO's probabilities p_i = min(1, |weight_i| / M), where the sum of all p_i is
/// `sparsity`. Atoms with |weight_i| > M are always kept. M = 0 if all atoms are kept, since at most
/// `sparsity` of them have a nonzero weight, or if the sum of magnitudes is not finite.
///
/// The sequential rule takes weights of descending magnitude, i = 0, 1, ..; while
/// s |w_i| > sum of |w_j| for j >= i, p_i = 1 and s decreases by 1; then M = that sum / s. Here M is found
/// without sorting: M_0 = infinity, M_n+1 = sum of magnitudes <= M_n / (s - number of magnitudes > M_n),
/// until that number stays the same. M_n decreases, and no atom saturates that the sequential rule would not
/// saturate. Few rounds are needed in practice; n weights need at most min(n, s) + 1.
///
/// `tail(level)` returns the atomo_tail; it is called once per round. Wang, Sievert, Liu, Charles,
/// Papailiopoulos and Wright, ATOMO (NeurIPS 2018), algorithm 1.
class atomo_saturation {
 public:
  /// `total`: the sum of all magnitudes; `atoms`: the number of weights that are not zero.
  atomo_saturation(double sparsity, double total, double atoms)
      : sparsity_(sparsity), level_(total / sparsity), found_(false) {
    if (!(atoms > sparsity) || !std::isfinite(total)) {
      level_ = 0;
      found_ = true;
    }
  }

  /// M; while !found(), an upper bound of M.
  double level() const { return level_; }
  bool found() const { return found_; }

  /// One round. `tail` is the atomo_tail of level().
  void refine(const atomo_tail& tail) {
    const double left = sparsity_ - tail.above;
    // Because of rounding, the saturated atoms may use up the sparsity.
    found_ = !(tail.above > above_) || !(left > 0.0);
    if (found_) return;
    above_ = tail.above;
    level_ = tail.sum / left;
  }

 private:
  double sparsity_, level_;
  double above_ = 0;
  bool found_;
};

/// Throws value_error, naming option and value, unless `value` is positive and finite.
inline void check_positive(const char* codec, const char* option, double value) {
  if (!(value > 0.0 && std::isfinite(value))) {
    throw_error<value_error>({codec, ": ", option, " ", value, " is not a positive number"});
  }
}

}  // namespace detail

/// p_i of all atoms, in the order of `weights`, whose signs do not matter. Atoms of weight 0 have probability
/// 0. The sum is min(sparsity, number of weights that are not zero) up to rounding. Keeping atom i with
/// probability p_i and weight_i / p_i as its value is unbiased; among all p of this sum, the variance sum of
/// weight_i^2 (1 / p_i - 1) is the least. Throws value_error unless sparsity is positive and finite.
///
/// \code
/// atomo_probabilities(std::vector<double>{4, 2, 1, 1}, 2);  // {1, 0.5, 0.25, 0.25}, of variance 10
/// \endcode
inline std::vector<double> atomo_probabilities(std::span<const double> weights, double sparsity) {
  detail::check_positive("ATOMO", "sparsity", sparsity);
  const auto tail_of = [&](double level) {
    detail::atomo_tail tail;
    for (const double weight : weights) {
      const double magnitude = std::abs(weight);
      tail.sum += magnitude > level ? 0.0 : magnitude;
      tail.above += magnitude > level ? 1.0 : 0.0;
    }
    return tail;
  };
  detail::atomo_saturation saturation(sparsity, tail_of(std::numeric_limits<double>::infinity()).sum,
                                      tail_of(0.0).above);
  while (!saturation.found()) saturation.refine(tail_of(saturation.level()));
  std::vector<double> result;
  for (const double weight : weights) {
    const double magnitude = std::abs(weight);
    const bool saturates = magnitude > saturation.level();
    result.push_back(saturates ? 1.0 : magnitude > 0.0 ? magnitude / saturation.level() : 0.0);
  }
  return result;
}

PUFFERFISH_NAMESPACE_END
