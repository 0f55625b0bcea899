// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `channel_mask`: which channels of a network remain, one bit for each channel that may be removed.

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Marks of the output channels of one layer: true for each channel that remains.
struct channel_marks {
  std::string layer;       ///< name of the layer that produces the channels
  std::vector<bool> keep;  ///< of each channel: whether it remains

  index_t kept() const {
    return std::count(keep.begin(), keep.end(), true);
  }  ///< number of channels that remain
  index_t channels() const { return static_cast<index_t>(keep.size()); }
  friend bool operator==(const channel_marks&, const channel_marks&) = default;
};

/// Mask of a network: marks of its layers in execution order. Layers that are not listed keep all channels.
///
/// \code
/// channel_mask mask = whole_mask(channel_groups(net));  // keeps everything
/// mask[0].keep[3] = false;                              // channel 3 of the first group
/// slice_channels(net, mask);
/// \endcode
using channel_mask = std::vector<channel_marks>;

/// Number of remaining channels over all layers of a mask.
inline index_t kept_channels(const channel_mask& mask) {
  index_t kept = 0;
  for (const channel_marks& one : mask) kept += one.kept();
  return kept;
}
/// Number of channels over all layers of a mask, remaining or not.
inline index_t all_channels(const channel_mask& mask) {
  index_t all = 0;
  for (const channel_marks& one : mask) all += one.channels();
  return all;
}

/// Share of the bits that differ between two masks, 0 .. 1; 0 for masks without channels: the distance by
/// which Early-Bird tickets are found (You et al., ICLR 2020). Throws value_error, naming the layer, unless
/// both masks list the same layers with as many channels each.
inline double mask_distance(const channel_mask& a, const channel_mask& b) {
  index_t differing = 0;
  for (std::size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    if (i >= a.size() || i >= b.size() || a[i].layer != b[i].layer || a[i].channels() != b[i].channels()) {
      const auto line = [i](const channel_mask& of) {
        return i < of.size() ? detail::message({of[i].layer, " of ", of[i].channels(), " channels"})
                             : std::string("nothing");
      };
      detail::throw_error<value_error>({"mask_distance: the masks are of different networks: layer ", i,
                                        " is ", line(a), " and ", line(b)});
    }
    for (std::size_t c = 0; c < a[i].keep.size(); ++c) differing += a[i].keep[c] != b[i].keep[c] ? 1 : 0;
  }
  const index_t all = all_channels(a);
  return all == 0 ? 0.0 : static_cast<double>(differing) / static_cast<double>(all);
}

PUFFERFISH_NAMESPACE_END
