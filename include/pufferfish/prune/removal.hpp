// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `removal_rule`, `removal_share`, `removal_scope`: rules for the number of weights that are pruned, and for
/// ties. The file also has the selection of weights that all pruning criteria share.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <pufferfish/prune/mask.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Rule for the weights that are removed when `count` weights are to be removed. Weights are sorted by their
/// criterion, those to be removed first; t is the criterion at a given position of this order, counted from
/// 0.
enum class removal_rule {
  exact,     ///< the first `count`; among ties, those earlier in the arena
  and_next,  ///< all up to t at position `count`, including ties: one more (reference program of the lottery
             ///< ticket hypothesis, Frankle and Carbin, ICLR 2019)
  but_last  ///< all before t at position `count` - 1, without its ties: one less (reference program of GraSP,
            ///< Wang, Zhang and Grosse, ICLR 2020)
};

/// The number of weights to which a share of removed weights refers.
enum class removal_share {
  of_remaining,  ///< ceil(share x remaining weights) more weights are removed
  of_whole       ///< weights are removed until floor(share x prunable weights) are pruned in all
};

/// Whether the weights of all layers are ranked together, or those of each layer separately.
enum class removal_scope { global, layers };

namespace detail {

/// Throws value_error unless 0 <= share <= 1.
inline void check_removal_share(const char* who, double share) {
  if (!(share >= 0.0 && share <= 1.0)) {
    throw_error<value_error>({who, ": a share of ", share, "; it must be in 0 .. 1"});
  }
}

/// Number of weights to remove next, of `kept` remaining ones of `total`: see removal_share. 0 if more are
/// pruned already. Products are computed in double.
inline index_t removal_count(double share, removal_share of, index_t kept, index_t total) {
  if (of == removal_share::of_remaining) {
    return std::min(kept, static_cast<index_t>(std::ceil(share * static_cast<double>(kept))));
  }
  const auto wanted = static_cast<index_t>(std::floor(share * static_cast<double>(total)));
  return std::max<index_t>(0, wanted - (total - kept));
}

/// Removes weights of the tensors first .. last - 1, those of smallest key first. key_of(tensor, element)
/// returns an unsigned integer; it is called twice per remaining weight and must return equal keys. Returns
/// the number of removed weights: `count` for removal_rule::exact. Linear time on average, and one key per
/// remaining weight. Throws value_error, with the mask unchanged, if `count` is negative or above the number
/// of remaining weights of these tensors.
template <class KeyOf>
index_t remove_smallest(weight_mask& mask, std::size_t first, std::size_t last, index_t count,
                        removal_rule rule, const KeyOf& key_of) {
  std::vector<std::invoke_result_t<const KeyOf&, std::size_t, index_t>> keys;
  mask.for_each_kept(first, last, [&](std::size_t t, index_t i) { keys.push_back(key_of(t, i)); });
  const auto kept = static_cast<index_t>(keys.size());
  if (count < 0 || count > kept) {
    throw_error<value_error>({"weight_mask: ", count, " weights to remove of ", kept, " that remain"});
  }
  if (rule == removal_rule::and_next && count == kept) rule = removal_rule::exact;
  if (count == 0 && rule != removal_rule::and_next) return 0;
  const auto limit_at = keys.begin() + (rule == removal_rule::and_next ? count : count - 1);
  std::nth_element(keys.begin(), limit_at, keys.end());
  const auto limit = *limit_at;
  // Number of weights to remove among those whose key is the limit.
  index_t ties = rule == removal_rule::and_next ? kept : 0, removed = 0;
  if (rule == removal_rule::exact) {
    ties = count - std::count_if(keys.begin(), limit_at, [&](auto key) { return key < limit; });
  }
  mask.for_each_kept(first, last, [&](std::size_t t, index_t i) {
    const auto key = key_of(t, i);
    if (key > limit || (key == limit && ties-- <= 0)) return;
    mask.remove(t, i);
    ++removed;
  });
  return removed;
}

/// Removes a share of the weights, those of smallest key first; `of` is the number that the share refers to.
/// With removal_scope::layers the count is computed for each prunable tensor. Returns the number of removed
/// weights, which removal_rule may make one more or fewer than the count. The share must be in 0 .. 1
/// (check_removal_share). `key_of` is that of remove_smallest.
template <class KeyOf>
index_t remove_share(weight_mask& mask, double share, removal_share of, removal_scope scope,
                     removal_rule rule, const KeyOf& key_of) {
  const std::size_t tensors = mask.tensors().size();
  if (scope == removal_scope::global) {
    const index_t count = removal_count(share, of, mask.kept(), mask.prunable());
    return remove_smallest(mask, 0, tensors, count, rule, key_of);
  }
  index_t removed = 0;
  for (std::size_t t = 0; t < tensors; ++t) {
    const masked_tensor& tensor = mask.tensors()[t];
    if (!tensor.prunable) continue;
    const index_t count = removal_count(share, of, tensor.kept, tensor.size);
    removed += remove_smallest(mask, t, t + 1, count, rule, key_of);
  }
  return removed;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
