// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `prune_by_magnitude`: removes the weights of smallest |w|.

#include <pufferfish/compress/sparse/kth_largest.hpp>
#include <pufferfish/prune/removal.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of prune_by_magnitude. The defaults remove half of all prunable weights, ranked over all layers.
struct magnitude_options {
  double share = 0.5;                           ///< share of the weights to remove, 0 .. 1
  removal_share of = removal_share::of_whole;   ///< the number that the share refers to
  removal_scope scope = removal_scope::global;  ///< weights that are ranked together
  removal_rule rule = removal_rule::exact;      ///< treatment of ties
};

namespace detail {

/// Keys that sort weights by |w|: the bits of |w| as an unsigned integer. NaN is largest.
template <class T>
auto magnitudes_of(const parameter_store<T>& store) {
  return [places = places_of(store)](std::size_t tensor, index_t element) {
    return magnitude_key(places[tensor][element]);
  };
}

}  // namespace detail

/// Removes from the mask those of the remaining weights that have the smallest |w|. With a share f of the
/// remaining weights, ceil(f kept) weights are removed; with a share x of the whole, weights are removed
/// until floor(x prunable) are pruned in all. Scope `layers` applies the share to each tensor separately. Of
/// weights of equal magnitude, those earlier in the arena are removed first; +0 = -0. Returns the number of
/// removed weights. The weights' values do not change: see mask_weights.
///
/// Equal weights give equal masks on all ranks, so no communication is needed. NaN counts as the largest
/// magnitude. Takes linear time on average and one key of sizeof(T) bytes per remaining weight. Throws
/// value_error unless 0 <= share <= 1, state_error if the mask was made for other arenas or the values are on
/// a device. Han, Pool, Tran and Dally, "Learning both weights and connections for efficient neural
/// networks", NIPS 2015.
///
/// \code
/// weight_mask mask(net.store());
/// prune_by_magnitude(mask, net.store(), {.share = 0.8});  // 80 % of all prunable weights
/// prune_by_magnitude(mask, net.store(), {.share = 0.2, .of = removal_share::of_remaining});
/// \endcode
template <class T>
index_t prune_by_magnitude(weight_mask& mask, const parameter_store<T>& store,
                           const magnitude_options& options = {}) {
  detail::check_removal_share("prune_by_magnitude", options.share);
  if (!store.on_host()) {
    PUFFERFISH_THROW(state_error("prune_by_magnitude: the values are on a device: use model::on_host"));
  }
  mask.check_store(store);
  return detail::remove_share(mask, options.share, options.of, options.scope, options.rule,
                              detail::magnitudes_of(store));
}

/// Removes exactly `count` weights of smallest magnitude over all layers (as `rule` says if not `exact`), for
/// schedules that compute the count themselves. Returns the number of removed weights. Throws value_error if
/// the count is negative or above mask.kept(), state_error if the mask was made for other arenas or the
/// values are on a device; the mask is then unchanged.
template <class T>
index_t prune_smallest(weight_mask& mask, const parameter_store<T>& store, index_t count,
                       removal_rule rule = removal_rule::exact) {
  if (!store.on_host()) {
    PUFFERFISH_THROW(state_error("prune_smallest: the values are on a device: use model::on_host"));
  }
  mask.check_store(store);
  return detail::remove_smallest(mask, 0, mask.tensors().size(), count, rule, detail::magnitudes_of(store));
}

PUFFERFISH_NAMESPACE_END
