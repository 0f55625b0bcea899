// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Rank policies (how many singular values to keep), and the ranks at which factors make a layer smaller.

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <variant>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// One rank for all matrices. It must be in 1 .. min(rows, cols) of each matrix: rank_error is thrown
/// otherwise. The other policies limit the rank to this range instead.
struct fixed_rank {
  index_t rank = 1;
};

/// The rank max(1, floor(min(rows, cols) * ratio)) of a rows x cols matrix, 0 < ratio <= 1. Wang, Agarwal,
/// Papailiopoulos (Pufferfish, MLSys 2021) use 1/4.
struct rank_ratio {
  double ratio = 0.25;
};

/// The smallest rank whose kept energy, sum of the kept sigma^2 over ||A||_F^2, is at least `fraction`,
/// 0 < fraction <= 1.
/// The rank is 1 for a matrix of zeros. Needs the singular values, so the rank is not known before the
/// decomposition. With a weighted truncation, the weighted energy takes the place of the matrix's own
/// (matrix_truncation::spectrum).
struct energy_kept {
  double fraction = 0.9;
};

/// The largest rank whose factors have at most `parameters` parameters, rank * (rows + cols). At least 1, so
/// a budget below rows + cols is exceeded. For each matrix, not for the network (see network_budget).
struct parameter_budget {
  index_t parameters = 0;
};

/// The largest rank whose factors have at most this fraction of the dense matrix's parameters, 0 < fraction
/// <= 1. At least 1, so a fraction below (rows + cols) / (rows cols) is exceeded.
struct parameter_fraction {
  double fraction = 0.5;
};

/// How the rank of a matrix is chosen; see choose_rank. Matrices of one rank group get the largest rank that
/// the policy chooses for any of them.
///
/// \code
/// rank_policy policy = energy_kept{0.9};
/// index_t rank = choose_rank(rank_ratio{0.25}, 512, 256, {}, 0.0);  // 64; no spectrum needed
/// \endcode
using rank_policy = std::variant<fixed_rank, rank_ratio, energy_kept, parameter_budget, parameter_fraction>;

/// Number of parameters of the two factors of a rows x cols matrix: rank (rows + cols). It is also the number
/// of multiply-adds per input row.
constexpr index_t factor_parameters(index_t rows, index_t cols, index_t rank) { return rank * (rows + cols); }

/// The largest rank at which the factors have fewer parameters than the rows x cols matrix:
/// floor((rows cols - 1) / (rows + cols)); 0 if there is none.
constexpr index_t largest_shrinking_rank(index_t rows, index_t cols) {
  return rows + cols == 0 || rows * cols == 0 ? 0 : (rows * cols - 1) / (rows + cols);
}

namespace detail {

/// Throws value_error unless `first`, the number of the first layer to factorize, is in 1 .. layers. 2 is
/// always accepted: it is the default, the paper's choice, and keeps a network of one layer dense.
inline void check_first_layer(const char* what, index_t first, index_t layers) {
  if (first < 1 || (first > 2 && first > layers)) {
    throw_error<value_error>({what, " ", first, " is none of the network's layers: it has ", layers,
                              " with a weight matrix, counted from 1"});
  }
}

/// The smallest r with sigma[0]^2 + ... + sigma[r-1]^2 >= fraction squared_norm; sigma.size() if rounding
/// prevents it.
inline index_t smallest_rank_with_energy(std::span<const double> sigma, double squared_norm,
                                         double fraction) {
  double kept = 0.0;
  for (std::size_t i = 0; i < sigma.size(); ++i) {
    kept += sigma[i] * sigma[i];
    if (kept >= fraction * squared_norm) return static_cast<index_t>(i) + 1;
  }
  return static_cast<index_t>(sigma.size());
}

/// Throws value_error unless 0 < value <= 1 (also for NaN).
inline void require_fraction(const char* policy, double value) {
  if (!(value > 0.0 && value <= 1.0)) throw_error<value_error>({policy, ": ", value, " is not in (0, 1]"});
}

}  // namespace detail

/// The rank that `policy` selects for a rows x cols matrix with singular values `sigma` (descending, all of
/// them) and squared Frobenius norm `squared_norm`. Policies other than fixed_rank return a rank in 1 ..
/// min(rows, cols); a fixed rank is returned unchecked. Throws value_error for a fraction or ratio outside
/// (0, 1] and for a parameter_budget below 1.
/// `sigma` and `squared_norm` are read by energy_kept only; others may pass {} and 0.
PUFFERFISH_COLD inline index_t choose_rank(const rank_policy& policy, index_t rows, index_t cols,
                                           std::span<const double> sigma, double squared_norm) {
  const index_t full = std::min(rows, cols);
  const auto clamp = [full](index_t rank) {
    return std::clamp<index_t>(rank, 1, std::max<index_t>(full, 1));
  };
  // A chain of get_if: std::visit would generate a table of functions in every translation unit.
  if (const auto* p = std::get_if<fixed_rank>(&policy)) return p->rank;
  if (const auto* p = std::get_if<rank_ratio>(&policy)) {
    detail::require_fraction("rank_ratio", p->ratio);
    return clamp(static_cast<index_t>(std::floor(static_cast<double>(full) * p->ratio)));
  }
  if (const auto* p = std::get_if<energy_kept>(&policy)) {
    detail::require_fraction("energy_kept", p->fraction);
    return clamp(detail::smallest_rank_with_energy(sigma, squared_norm, p->fraction));
  }
  const index_t per_rank = std::max<index_t>(1, rows + cols);
  if (const auto* p = std::get_if<parameter_budget>(&policy)) {
    if (p->parameters <= 0) {
      detail::throw_error<value_error>({"parameter_budget: ", p->parameters, " parameters is no budget"});
    }
    return clamp(p->parameters / per_rank);
  }
  const double fraction = std::get_if<parameter_fraction>(&policy)->fraction;
  detail::require_fraction("parameter_fraction", fraction);
  return clamp(
      static_cast<index_t>(fraction * static_cast<double>(rows * cols) / static_cast<double>(per_rank)));
}

/// Text for messages: "ratio 0.25", "kept energy 0.9".
PUFFERFISH_COLD inline std::string describe(const rank_policy& policy) {
  if (const auto* p = std::get_if<fixed_rank>(&policy)) return detail::message({"rank ", p->rank});
  if (const auto* p = std::get_if<rank_ratio>(&policy)) return detail::message({"ratio ", p->ratio});
  if (const auto* p = std::get_if<energy_kept>(&policy))
    return detail::message({"kept energy ", p->fraction});
  if (const auto* p = std::get_if<parameter_budget>(&policy)) {
    return detail::message({"budget of ", p->parameters, " parameters"});
  }
  return detail::message(
      {"share ", std::get_if<parameter_fraction>(&policy)->fraction, " of the parameters"});
}

/// True if the policy needs the singular values, so that the rank is not known before the decomposition.
inline bool needs_spectrum(const rank_policy& policy) { return std::holds_alternative<energy_kept>(policy); }

/// Throws rank_error, naming `layer`, unless 1 <= rank <= min(rows, cols).
inline void check_rank(const std::string& layer, index_t rows, index_t cols, index_t rank) {
  if (rank < 1 || rank > std::min(rows, cols)) {
    detail::throw_error<rank_error>({layer, ": rank ", rank, " of a ", rows, " x ", cols,
                                     " matrix; it must be in 1 .. ", std::min(rows, cols)});
  }
}

/// Throws rank_error, naming `layer`, unless factors of this rank have fewer parameters than the matrix.
PUFFERFISH_COLD inline void check_shrinks(const std::string& layer, index_t rows, index_t cols,
                                          index_t rank) {
  if (rank <= largest_shrinking_rank(rows, cols)) return;
  const index_t useful = largest_shrinking_rank(rows, cols);
  const std::string advice =
      useful > 0 ? detail::message({"; factorizing shrinks it up to rank ", useful}) : "; no rank shrinks it";
  detail::throw_error<rank_error>({layer, ": rank ", rank, " would need ",
                                   factor_parameters(rows, cols, rank), " parameters where the dense ", rows,
                                   " x ", cols, " matrix has ", rows * cols, advice,
                                   " (keep the layer dense, or allow growth explicitly)"});
}

PUFFERFISH_NAMESPACE_END
