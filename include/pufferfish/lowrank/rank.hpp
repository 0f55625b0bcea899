// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// How many singular values to keep: rank policies, and when keeping that many makes a layer smaller.

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <variant>

#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The same rank for every matrix. Must be in 1 .. min(rows, cols).
struct fixed_rank {
  index_t rank = 1;
};

/// max(1, floor(min(rows, cols) * ratio)), 0 < ratio <= 1. The paper uses 1/4.
struct rank_ratio {
  double ratio = 0.25;
};

/// The smallest rank whose kept energy, sum of the kept sigma^2 over ||A||_F^2, is at least `fraction` (0 ..
/// 1].
struct energy_kept {
  double fraction = 0.9;
};

/// The largest rank whose factors, rank * (rows + cols), have at most so many parameters. At least 1.
struct parameter_budget {
  index_t parameters = 0;
};

/// The largest rank whose factors have at most this fraction of the dense matrix's parameters. At least 1.
struct parameter_fraction {
  double fraction = 0.5;
};

using rank_policy = std::variant<fixed_rank, rank_ratio, energy_kept, parameter_budget, parameter_fraction>;

/// Parameters of the two factors of a rows x cols matrix.
constexpr index_t factor_parameters(index_t rows, index_t cols, index_t rank) { return rank * (rows + cols); }

/// The largest rank at which the factors have fewer parameters than the rows x cols matrix; 0 if there is
/// none.
constexpr index_t largest_shrinking_rank(index_t rows, index_t cols) {
  return rows + cols == 0 || rows * cols == 0 ? 0 : (rows * cols - 1) / (rows + cols);
}

namespace detail {

inline index_t smallest_rank_with_energy(std::span<const double> sigma, double squared_norm,
                                         double fraction) {
  double kept = 0.0;
  for (std::size_t i = 0; i < sigma.size(); ++i) {
    kept += sigma[i] * sigma[i];
    if (kept >= fraction * squared_norm) return static_cast<index_t>(i) + 1;
  }
  return static_cast<index_t>(sigma.size());
}

inline void require(bool valid, const std::string& text) {
  if (!valid) PUFFERFISH_THROW(value_error(text));
}

}  // namespace detail

/// The rank that `policy` asks for, of a rows x cols matrix with singular values `sigma` (descending, all of
/// them) and squared Frobenius norm `squared_norm`. Policies other than fixed_rank give a rank in 1 ..
/// min(rows, cols); a fixed rank is returned as it is. Throws value_error for a fraction or ratio outside (0,
/// 1].
inline index_t choose_rank(const rank_policy& policy, index_t rows, index_t cols,
                           std::span<const double> sigma, double squared_norm) {
  const index_t full = std::min(rows, cols);
  const auto clamp = [full](index_t rank) {
    return std::clamp<index_t>(rank, 1, std::max<index_t>(full, 1));
  };
  struct chooser {
    index_t rows, cols, full;
    std::span<const double> sigma;
    double squared_norm;

    index_t operator()(const fixed_rank& p) const { return p.rank; }
    index_t operator()(const rank_ratio& p) const {
      detail::require(p.ratio > 0.0 && p.ratio <= 1.0,
                      "rank_ratio: " + std::to_string(p.ratio) + " is not in (0, 1]");
      return static_cast<index_t>(std::floor(static_cast<double>(full) * p.ratio));
    }
    index_t operator()(const energy_kept& p) const {
      detail::require(p.fraction > 0.0 && p.fraction <= 1.0,
                      "energy_kept: " + std::to_string(p.fraction) + " is not in (0, 1]");
      return detail::smallest_rank_with_energy(sigma, squared_norm, p.fraction);
    }
    index_t operator()(const parameter_budget& p) const {
      detail::require(p.parameters > 0,
                      "parameter_budget: " + std::to_string(p.parameters) + " parameters is no budget");
      return p.parameters / std::max<index_t>(1, rows + cols);
    }
    index_t operator()(const parameter_fraction& p) const {
      detail::require(p.fraction > 0.0 && p.fraction <= 1.0,
                      "parameter_fraction: " + std::to_string(p.fraction) + " is not in (0, 1]");
      return static_cast<index_t>(p.fraction * static_cast<double>(rows * cols) /
                                  static_cast<double>(std::max<index_t>(1, rows + cols)));
    }
  };
  const index_t rank = std::visit(chooser{rows, cols, full, sigma, squared_norm}, policy);
  return std::holds_alternative<fixed_rank>(policy) ? rank : clamp(rank);
}

/// True if the policy needs the singular values (then a factorization cannot know its rank beforehand).
inline bool needs_spectrum(const rank_policy& policy) { return std::holds_alternative<energy_kept>(policy); }

/// Throws rank_error, naming `layer`, unless 1 <= rank <= min(rows, cols).
inline void check_rank(const std::string& layer, index_t rows, index_t cols, index_t rank) {
  if (rank < 1 || rank > std::min(rows, cols)) {
    PUFFERFISH_THROW(rank_error(layer + ": rank " + std::to_string(rank) + " of a " + std::to_string(rows) +
                                " x " + std::to_string(cols) + " matrix; it must be in 1 .. " +
                                std::to_string(std::min(rows, cols))));
  }
}

/// Throws rank_error, naming `layer`, if factors of this rank have no fewer parameters than the dense matrix.
inline void check_shrinks(const std::string& layer, index_t rows, index_t cols, index_t rank) {
  if (rank <= largest_shrinking_rank(rows, cols)) return;
  const index_t useful = largest_shrinking_rank(rows, cols);
  PUFFERFISH_THROW(rank_error(layer + ": rank " + std::to_string(rank) + " would need " +
                              std::to_string(factor_parameters(rows, cols, rank)) +
                              " parameters where the dense " + std::to_string(rows) + " x " +
                              std::to_string(cols) + " matrix has " + std::to_string(rows * cols) +
                              (useful > 0 ? "; factorizing shrinks it up to rank " + std::to_string(useful)
                                          : "; no rank shrinks it") +
                              " (keep the layer dense, or allow growth explicitly)"));
}

PUFFERFISH_NAMESPACE_END
