// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: draws singular triplets of a matrix from its Gram matrix, with ATOMO's probabilities.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <pufferfish/compress/atomo/atomo_probabilities.hpp>
#include <pufferfish/core/random.hpp>
#include <pufferfish/linalg/svd/symmetric_eigen.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A singular triplet (sigma, u, v) of A that is kept with probability p.
struct kept_triplet {
  double value = 0;             ///< the number sigma / p
  std::vector<double> v;        ///< right singular vector, of length one
  std::vector<double> weights;  ///< the vector v / sigma, so that u = A weights
};

/// Draws the triplets of A [rows x columns] to keep. `gram`: A^T A, of which the lower triangle is read;
/// `atoms`: min(rows, columns). Triplet i, by descending sigma, is kept if random.uniform(i) is below its
/// probability (atomo_probabilities). Singular values below sqrt(4 columns 2^-52) of the largest count as
/// zero; all count as zero if the largest is below 1e-30. If A is not finite, a single triplet whose value is
/// NaN is kept. The sparsity must be positive and finite. Deterministic: equal arguments give equal bits.
PUFFERFISH_COLD inline std::vector<kept_triplet> draw_triplets(const tensor<double, 2>& gram, index_t atoms,
                                                               double sparsity, const random_stream& random) {
  const index_t n = gram.extent(0);
  double trace = 0;
  for (index_t i = 0; i < n; ++i) trace += gram(i, i);
  if (!std::isfinite(trace)) {
    const std::vector<double> zeros(static_cast<std::size_t>(n), 0.0);
    return {{std::numeric_limits<double>::quiet_NaN(), zeros, zeros}};
  }
  if (trace < 1e-60) return {};
  const symmetric_eigen eigen(gram.view());
  const double noise = 4.0 * static_cast<double>(n) * std::numeric_limits<double>::epsilon();
  const double least = std::max(noise * eigen.values()[0], 1e-60);
  std::vector<double> sigmas;
  for (std::size_t i = 0; i < static_cast<std::size_t>(atoms); ++i) {
    sigmas.push_back(eigen.values()[i] > least ? std::sqrt(eigen.values()[i]) : 0.0);
  }
  const std::vector<double> probabilities = atomo_probabilities(sigmas, sparsity);
  std::vector<std::size_t> kept;
  for (std::size_t i = 0; i < sigmas.size(); ++i) {
    if (random.uniform(i) < probabilities[i]) kept.push_back(i);
  }
  if (kept.empty()) return {};
  const tensor<double, 2> vectors = eigen.vectors(static_cast<index_t>(kept.back()) + 1);
  std::vector<kept_triplet> result;
  for (const std::size_t i : kept) {
    const double* const v = vectors.data() + static_cast<index_t>(i) * n;
    kept_triplet& triplet = result.emplace_back();
    triplet.value = sigmas[i] / probabilities[i];
    triplet.v.assign(v, v + n);
    for (const double entry : triplet.v) triplet.weights.push_back(entry / sigmas[i]);
  }
  return result;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
