// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `transformer_policy`, `transformer_low_rank_policy`: which layers of a Transformer are factorized.

#include <charconv>
#include <cstddef>
#include <string>
#include <string_view>

#include <pufferfish/nn/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Policy of the paper (Wang et al., Pufferfish, MLSys 2021): all layers are factorized at a quarter of full
/// rank, except the first `dense_layers` of each stack and the table.
///
///     factorize(net, transformer_policy());                 // net: model<transformer<float>>
inline factorize_policy transformer_policy(index_t dense_layers = 1) {
  factorize_policy policy;
  policy.first_layer = 1;
  policy.last_layer_dense = false;
  policy.also_if = [dense_layers](const std::string& name, matrix_size) {
    constexpr std::string_view stack = "layer_stack.";
    const std::size_t at = name.find(stack);
    if (at == std::string::npos) return true;
    const char* const digits = name.data() + at + stack.size();
    index_t layer = dense_layers;  // for a name without a number there
    std::from_chars(digits, name.data() + name.size(), layer);
    return layer >= dense_layers;
  };
  return policy;
}

/// Policy of pure low rank: all layers of both stacks are factorized, at a quarter of full rank.
inline factorize_policy transformer_low_rank_policy() { return transformer_policy(0); }

PUFFERFISH_NAMESPACE_END
