// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `select_candidates`: the layers that a policy factorizes if their ranks are low enough.

#include <vector>

#include <pufferfish/lowrank/selection.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The choices of `select` for callers that determine the ranks without policy.rank. A layer is chosen unless
/// policy.first_layer, last_layer_dense, shortcuts_dense, embeddings_dense or also_if keeps it dense, or even
/// rank 1 does not make it smaller. The policy's ranks, budget and keep_dense_if_larger are ignored. Throws
/// the errors of `select`.
PUFFERFISH_COLD inline std::vector<layer_choice> select_candidates(const std::vector<layer_info>& layers,
                                                                   const factorize_policy& policy,
                                                                   const char* caller) {
  factorize_policy any_rank = policy;
  any_rank.rank = fixed_rank{1};
  any_rank.budget.reset();
  any_rank.ranks.reset();
  any_rank.embedding_rank.reset();
  any_rank.keep_dense_if_larger = true;
  return select(layers, any_rank, caller);
}

PUFFERFISH_NAMESPACE_END
