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

/// Computes the saturation M of ATOMO's probabilities p_i = min(1, |w_i| / M), where w_i is the weight of
/// atom i (a singular triplet or an entry of a gradient), s = `sparsity`, and M is such that the sum of all
/// p_i is s. Atoms with |w_i| > M are always kept. M = 0 means that all atoms are kept: at most s of them
/// have a nonzero weight, or the sum of magnitudes is not finite.
///
/// The published rule sorts the weights by descending magnitude. For i = 0, 1, ..: if s |w_i| exceeds the sum
/// of |w_j| over j >= i, then p_i = 1 and s decreases by 1; else the rule ends with M = (sum of |w_j| over j
/// >= i) / s. This class finds M without sorting, by the iteration
///
///     M_0 = infinity,  M_(k+1) = (sum of all |w_i| <= M_k) / (s - number of |w_i| > M_k),
///
/// which ends when the number of |w_i| > M_k stays the same. M_k decreases, and no atom saturates that the
/// published rule would not saturate. Few iterations are needed in practice; n weights need at most
/// min(n, s) + 1 iterations. Source: Wang, Sievert, Liu, Charles, Papailiopoulos and Wright, ATOMO (NeurIPS
/// 2018), algorithm 1.
///
///     atomo_saturation search(sparsity, total, atoms);
///     while (!search.found()) search.refine(tail(search.level()));  // tail: the atomo_tail of a level
///     const double m = search.level();
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

  /// The saturation M if found() is true, else an upper bound of M.
  double level() const { return level_; }
  /// Whether level() is M.
  bool found() const { return found_; }

  /// Performs one iteration of the search for M. `tail` is the atomo_tail of level().
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

/// Throws value_error, naming codec, option and value, unless `value` is positive and finite.
inline void check_positive(const char* codec, const char* option, double value) {
  if (!(value > 0.0 && std::isfinite(value))) {
    throw_error<value_error>({codec, ": ", option, " ", value, " is not a positive number"});
  }
}

}  // namespace detail

/// Returns the probability p_i of keeping each atom, in the order of `weights`, whose signs do not matter. An
/// atom is an element of a sum that is sampled: a singular triplet or an entry of a gradient. Atoms of weight
/// 0 have probability 0. The sum of all p_i is S = min(sparsity, number of nonzero weights) up to rounding.
/// Keeping atom i with probability p_i and with the value weight_i / p_i is unbiased. Among all probabilities
/// with the sum S these have the least variance: sum over i of weight_i^2 (1 / p_i - 1). Throws value_error
/// unless sparsity is positive and finite.
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
