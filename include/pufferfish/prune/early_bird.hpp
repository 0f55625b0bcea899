// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `early_bird`: the search for Early-Bird tickets, masks of channels that stop changing early in training.

#include <algorithm>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <pufferfish/core/record_line.hpp>
#include <pufferfish/prune/channel_criteria.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of a search for an Early-Bird ticket; the defaults are the published ones. `latest`, for trainings
/// of few epochs, is not part of the published method.
struct early_bird_options {
  double share = 0.5;     ///< q: share of the channels that a mask removes; published: 0.3, 0.5, 0.7
  double distance = 0.1;  ///< largest share of differing bits between masks that count as equal
  std::size_t masks = 5;  ///< number of consecutive masks that must be that close to the last one; at least 2
  index_t latest = 0;     ///< the ticket is the mask after this epoch if none was found before; 0: no limit
  channel_rule rule = channel_rule::exact;
  /// Channels that may be removed. group_choice::select includes channels that the branches of residual
  /// blocks read.
  group_choice groups = group_choice::normed;
};

/// A ticket: the channels to keep, and the number of completed epochs after which it was drawn.
struct early_bird_ticket {
  channel_mask mask;
  index_t epoch = 0;
};

/// Searches for an Early-Bird ticket (You et al., ICLR 2020): after each epoch, a mask is drawn from the
/// scales of the batch norms (prune_channels); the ticket is the first mask whose distance to each of the
/// masks - 1 masks before it is at most options.distance, or the one of epoch options.latest. The network
/// trains with scale_sparsity meanwhile; afterwards it is sliced by the ticket and trains on with a new
/// optimizer. Several searches with other shares can observe one run. Equal networks give equal masks, so
/// ranks need no communication.
///
/// \code
/// early_bird search({.share = 0.5});
/// for (index_t epoch = 1; !search.ticket(); ++epoch) {
///   train_an_epoch(net);
///   search.observe(net, epoch);
/// }
/// slice_channels(net, search.ticket()->mask);
/// \endcode
class early_bird {
 public:
  /// Throws value_error for a share or a distance outside 0 .. 1, and for fewer than 2 masks.
  explicit early_bird(const early_bird_options& options = {}) : options_(options) {
    detail::check_removal_share("early_bird", options.share);
    detail::check_removal_share("early_bird, distance", options.distance);
    if (options.masks < 2) {
      detail::throw_error<value_error>({"early_bird: ", options.masks, " masks; at least 2"});
    }
  }

  const early_bird_options& options() const { return options_; }

  /// Draws the mask of a model after `epoch` completed epochs. Returns whether there is a ticket now. Does
  /// nothing once there is one. Throws value_error for a model of other channels than before.
  template <class Root, class Device>
  bool observe(const model<Root, Device>& net, index_t epoch) {
    return ticket_ ? true : observe(draw(net), epoch);
  }
  /// Adds a mask that was drawn already, as observe(net, epoch) does with the mask that it draws. Returns
  /// whether there is a ticket now. Throws value_error for a mask of other channels than before.
  bool observe(channel_mask mask, index_t epoch) {
    if (ticket_) return true;
    double largest = 0.0;
    for (const channel_mask& earlier : masks_) largest = std::max(largest, mask_distance(mask, earlier));
    distance_ = masks_.empty() ? std::nullopt : std::optional(largest);
    masks_.push_back(std::move(mask));
    const bool all = masks_.size() == options_.masks;
    if ((all && largest <= options_.distance) || (options_.latest > 0 && epoch >= options_.latest)) {
      ticket_ = early_bird_ticket{masks_.back(), epoch};
    }
    if (all) masks_.pop_front();
    return ticket_.has_value();
  }

  /// The mask that observe() draws from a model.
  template <class Root, class Device>
  channel_mask draw(const model<Root, Device>& net) const {
    std::vector<double> others;
    if (options_.rule == channel_rule::reference) others = all_norm_scales(net);
    return prune_channels(norm_scales(net, options_.groups), {.share = options_.share, .rule = options_.rule},
                          others);
  }

  /// Largest distance of the last mask to those before it that are remembered; nullopt before the second
  /// mask.
  std::optional<double> distance() const { return distance_; }
  const std::optional<early_bird_ticket>& ticket() const { return ticket_; }

  /// Text of the masks that are remembered, for checkpoints: lines "mask" or "ticket 7", each followed by
  /// lines "layer conv1 0110".
  std::string to_text() const {
    std::string text;
    for (const channel_mask& mask : masks_) text += "mask\n" + lines_of(mask);
    if (ticket_) text += detail::message({"ticket ", ticket_->epoch, "\n"}) + lines_of(ticket_->mask);
    return text;
  }
  /// Restores the state that to_text has stored; distance() is unknown until the next mask. `source`: the
  /// file's name in errors. Throws io_error for other text, and state_error for that of a search of more
  /// masks; the object is unchanged then.
  void restore(std::string_view text, const std::string& source) {
    early_bird other(options_);
    channel_mask* current = nullptr;
    detail::for_each_line(text, [&](std::string_view line) {
      detail::record_line words(line);
      std::string kind, name, bits;
      if (line == "mask") {
        current = &other.masks_.emplace_back();
      } else if (index_t epoch = 0; line.starts_with("ticket ") && !other.ticket_ &&
                                    detail::record_line(line).read(kind, epoch).complete()) {
        current = &other.ticket_.emplace(early_bird_ticket{{}, epoch}).mask;
      } else if (current == nullptr || !words.read(kind, name, bits).complete() || kind != "layer" ||
                 bits.find_first_not_of("01") != std::string::npos) {
        detail::throw_error<io_error>({source, ": this is no line of an Early-Bird search: ", line});
      } else {
        channel_marks& marks = current->emplace_back(channel_marks{name, {}});
        for (const char bit : bits) marks.keep.push_back(bit == '1');
      }
    });
    if (other.masks_.size() >= options_.masks) {
      detail::throw_error<state_error>({source, ": ", other.masks_.size(),
                                        " masks are remembered; a search of ", options_.masks,
                                        " masks keeps fewer"});
    }
    *this = std::move(other);
  }

 private:
  // A mask as lines "layer name 1101...", one for each layer.
  static std::string lines_of(const channel_mask& mask) {
    std::string text;
    for (const channel_marks& one : mask) {
      text += "layer " + detail::quote_word(one.layer) + " ";
      for (const bool kept : one.keep) text += kept ? '1' : '0';
      text += "\n";
    }
    return text;
  }

  early_bird_options options_;
  std::deque<channel_mask> masks_;  // the last (options.masks - 1) masks
  std::optional<double> distance_;
  std::optional<early_bird_ticket> ticket_;
};

PUFFERFISH_NAMESPACE_END
