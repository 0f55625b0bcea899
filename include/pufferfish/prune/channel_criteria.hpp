// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Criteria that choose the channels to remove: `norm_scales`, `filter_norms`, `prune_channels`.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/prune/removal.hpp>
#include <pufferfish/prune/slice/slice_channels.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Scores of the output channels of a layer, not negative; channels of small scores are removed first.
struct channel_scores {
  std::string layer;           ///< name of the layer that produces the channels
  std::vector<double> scores;  ///< of each channel
};

namespace detail {

/// Sum of |w| of slice `at` of a matrix along a dimension: of row `at` for 0, of column `at` for 1.
template <class T>
double slice_norm(const tensor_view<const T, 4>& matrix, std::size_t dimension, index_t at) {
  const tensor_view<const T, 4> part = matrix.slice(dimension, at, 1);
  double sum = 0.0;
  for (index_t o = 0; o < part.extent(0); ++o) {
    for (index_t i = 0; i < part.extent(1); ++i) {
      for (index_t y = 0; y < part.extent(2); ++y) {
        for (index_t x = 0; x < part.extent(3); ++x) sum += std::abs(static_cast<double>(part(o, i, y, x)));
      }
    }
  }
  return sum;
}

/// |weight| of each channel of a batch norm.
template <class T>
std::vector<double> scales_of(BatchNorm<T>& norm) {
  const norm_buffers<parameter_t<T>> of(norm);
  std::vector<double> scales;
  for (index_t c = 0; c < norm.channels(); ++c) scales.push_back(std::abs(static_cast<double>(of.weight[c])));
  return scales;
}

/// The scales of the channels of a group, which must have a batch norm: group.scale != nullptr. A batch norm
/// before the ChannelSelect scales the whole stream; the scales of the passed channels are selected.
template <class T, class Device>
std::vector<double> scales_of(const group_slots<T, Device>& group) {
  std::vector<double> scales = scales_of(*group.scale->template target<BatchNorm<T>>());
  if (group.select() == nullptr || !group.norms.empty()) return scales;
  std::vector<double> passed;
  for (const index_t c : group.select()->channels()) passed.push_back(scales[static_cast<std::size_t>(c)]);
  return passed;
}

/// Calls f(group) for the groups of a model while their values are on the host.
template <class Root, class Device, class F>
void for_each_group(const model<Root, Device>& net, group_choice choice, F&& f) {
  net.read_on_host([&](const Root&) {
    for (const auto& group : find_groups(net, choice)) f(group);
  });
}

}  // namespace detail

/// Scores of each channel group that has a batch norm channel_group::scale: |weight| of this batch norm, the
/// criterion of network slimming (Liu et al., ICCV 2017) and Early-Bird tickets. The scales of a network that
/// was trained with scale_sparsity say most. Groups without a batch norm are left out. A device's values are
/// copied to the host.
template <class Root, class Device>
std::vector<channel_scores> norm_scales(const model<Root, Device>& net,
                                        group_choice choice = group_choice::normed) {
  std::vector<channel_scores> result;
  detail::for_each_group(net, choice, [&](const auto& group) {
    if (group.scale != nullptr) result.push_back({group.info.producer, detail::scales_of(group)});
  });
  return result;
}

/// |weight| of all batch norms of a model, also of those that belong to no channel group, in execution order.
/// They are the `others` of prune_channels with channel_rule::reference.
template <class Root, class Device>
std::vector<double> all_norm_scales(const model<Root, Device>& net) {
  using T = typename Root::value_type;
  std::vector<double> result;
  net.read_on_host([&](const Root&) {
    net.for_each_layer([&](const std::string&, const any_layer<T, Device>& layer) {
      auto* norm = const_cast<any_layer<T, Device>&>(layer).template target<BatchNorm<T>>();
      if (norm == nullptr) return;
      const std::vector<double> scales = detail::scales_of(*norm);
      result.insert(result.end(), scales.begin(), scales.end());
    });
  });
  return result;
}

/// Scores of each channel group: sum of |w| over the inputs of each output channel of its producer (Li et
/// al., Pruning filters for efficient ConvNets, ICLR 2017); of a low-rank layer, over the row of up down; of
/// a LowRankNormConv, over the row of up. Of channels of a residual stream: sum of |w| over the weights of
/// the consumer that read each of them. Norms are comparable within a layer: use removal_scope::layers.
template <class Root, class Device>
std::vector<channel_scores> filter_norms(const model<Root, Device>& net,
                                         group_choice choice = group_choice::normed) {
  using T = typename Root::value_type;
  using P = parameter_t<T>;
  std::vector<channel_scores> result;
  detail::for_each_group(net, choice, [&](const auto& group) {
    const bool inputs = group.branch != nullptr;
    any_layer<T, Device>* layer = inputs ? group.consumer : group.producer;
    if (auto* conv = layer->template target<LowRankNormConv<T, Device>>()) layer = &(*conv)[inputs ? 0 : 2];
    const any_layer<T, Device> dense = layer->ranks().empty() ? *layer : detail::merged(*layer);
    const layer_weights<P> weights = dense.weights({});
    channel_scores& row = result.emplace_back(channel_scores{group.info.producer, {}});
    for (index_t c = 0; c < group.info.channels; ++c) {
      double sum = 0.0;
      for (index_t p = 0; p < (inputs ? group.info.pixels : 1); ++p) {
        sum += detail::slice_norm<P>(weights.matrices[0].view, inputs ? 1 : 0, p * group.info.channels + c);
      }
      row.scores.push_back(sum);
    }
  });
  return result;
}

/// The rule for the number of channels that prune_channels removes, and for ties.
enum class channel_rule {
  exact,     ///< the floor(share x channels) smallest scores; of ties, the earlier layer and channel first
  reference  ///< all scores not above the one at position int(share x all scores) of the sorted scores, i.e.
             ///< one more than `exact` (reference program of Early-Bird tickets, You et al., ICLR 2020)
};

/// Treatment of a layer that would lose all channels.
enum class last_channel {
  keep,   ///< the channel of the largest score remains; with channel_rule::reference it is channel 0
  refuse  ///< prune_channels throws value_error with the layer's name
};

/// Options of prune_channels.
struct channel_options {
  double share = 0.5;                           ///< share of the channels to remove, 0 .. 1
  removal_scope scope = removal_scope::global;  ///< channels that are ranked together
  channel_rule rule = channel_rule::exact;      ///< number of channels, and ties
  last_channel last = last_channel::keep;       ///< for a layer that would lose all
};

namespace detail {

/// Throws value_error without any score, and for one that is not finite.
inline void check_scores(const std::vector<channel_scores>& scores, std::span<const double> others) {
  if (scores.empty()) {
    throw_error<value_error>(
        {"prune_channels: the network has no channels that can be removed: they need a convolution, a batch "
         "norm and one layer that reads them"});
  }
  for (const channel_scores& one : scores) {
    for (std::size_t c = 0; c < one.scores.size(); ++c) {
      if (std::isfinite(one.scores[c])) continue;
      throw_error<value_error>(
          {"prune_channels: channel ", c, " of ", one.layer, " has score ", one.scores[c]});
    }
  }
  for (const double score : others) {
    if (!std::isfinite(score)) throw_error<value_error>({"prune_channels: a score is ", score});
  }
}

/// Clears the marks of `mask`[first .. last) by the rule. `others`: further scores that the reference rule
/// sorts with them.
inline void mark_channels(const std::vector<channel_scores>& scores, std::size_t first, std::size_t last,
                          const channel_options& options, std::span<const double> others,
                          channel_mask& mask) {
  struct place {
    double score;
    std::size_t layer, channel;
  };
  std::vector<place> all;
  std::vector<double> sorted(others.begin(), others.end());
  for (std::size_t l = first; l < last; ++l) {
    for (std::size_t c = 0; c < scores[l].scores.size(); ++c) all.push_back({scores[l].scores[c], l, c});
    if (others.empty()) sorted.insert(sorted.end(), scores[l].scores.begin(), scores[l].scores.end());
  }
  if (options.rule == channel_rule::exact) {
    const auto count = static_cast<std::size_t>(std::floor(options.share * static_cast<double>(all.size())));
    // Stable: of equal scores, those of earlier layers and channels stay first.
    std::stable_sort(all.begin(), all.end(),
                     [](const place& a, const place& b) { return a.score < b.score; });
    for (std::size_t i = 0; i < count; ++i) mask[all[i].layer].keep[all[i].channel] = false;
    return;
  }
  if (sorted.empty()) return;
  std::sort(sorted.begin(), sorted.end());
  const auto at = static_cast<std::size_t>(options.share * static_cast<double>(sorted.size()));
  const double threshold = sorted[std::min(at, sorted.size() - 1)];
  for (const place& one : all) mask[one.layer].keep[one.channel] = one.score > threshold;
}

}  // namespace detail

/// Makes the mask that removes a share of the channels: those of the smallest scores. With
/// removal_scope::layers the share applies to each layer. At least one channel of a layer remains, or the
/// call is refused, as options.last says; fewer channels are removed then. `others`: with
/// channel_rule::reference, the scores that are sorted to find the threshold (all_norm_scales; the reference
/// program sorts the scales of all batch norms); empty: `scores`. Equal networks give equal masks on all
/// ranks. Throws value_error for a share outside 0 .. 1, without scores (no channel of the network can be
/// removed), and for a score that is not finite.
///
/// \code
/// slice_channels(net, prune_channels(norm_scales(net), {.share = 0.5}));
/// slice_channels(net, prune_channels(filter_norms(net), {.share = 0.3, .scope = removal_scope::layers}));
/// \endcode
inline channel_mask prune_channels(const std::vector<channel_scores>& scores,
                                   const channel_options& options = {}, std::span<const double> others = {}) {
  detail::check_removal_share("prune_channels", options.share);
  if (options.share > 0.0) detail::check_scores(scores, others);
  channel_mask mask;
  for (const channel_scores& one : scores) {
    mask.push_back({one.layer, std::vector<bool>(one.scores.size(), true)});
  }
  const std::size_t step =
      options.scope == removal_scope::layers ? 1 : std::max<std::size_t>(1, scores.size());
  for (std::size_t first = 0; first < scores.size(); first += step) {
    detail::mark_channels(scores, first, std::min(first + step, scores.size()), options, others, mask);
  }
  for (std::size_t l = 0; l < mask.size(); ++l) {
    if (mask[l].kept() > 0 || mask[l].keep.empty()) continue;
    if (options.last == last_channel::refuse) {
      detail::throw_error<value_error>({mask[l].layer, ": a share of ", options.share, " removes all of its ",
                                        mask[l].channels(), " channels"});
    }
    const auto& of = scores[l].scores;
    const auto largest = std::max_element(of.begin(), of.end()) - of.begin();
    mask[l].keep[options.rule == channel_rule::reference ? 0 : static_cast<std::size_t>(largest)] = true;
  }
  return mask;
}

PUFFERFISH_NAMESPACE_END
