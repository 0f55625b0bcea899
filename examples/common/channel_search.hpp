// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Channels to remove from a network for several shares at once, by the criteria of early_bird.

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <pufferfish/prune/early_bird.hpp>

#include "models.hpp"
#include "text.hpp"

namespace examples {

/// Early-Bird tickets (You et al., ICLR 2020): smallest scales of batch norms, once masks have settled.
/// Network slimming (Liu et al., ICCV 2017): smallest scales after all epochs. Filter norms (Li et al., ICLR
/// 2017): smallest sums of |w| of each layer's filters after all epochs.
enum class criterion { early_bird, slimming, filter_norms };
inline constexpr const char* criterion_names[] = {"early-bird", "slimming", "filter-norms"};

struct channel_search_options {
  criterion by = criterion::early_bird;
  std::vector<double> shares{0.5};
  pufferfish::early_bird_options masks;  ///< share aside
};

/// A ticket for each share: the channels that remain, and the number of epochs after which they were chosen.
/// Equal networks give equal tickets, so ranks need no communication.
class channel_search {
 public:
  using network = pufferfish::network<float>;
  using ticket_type = std::optional<pufferfish::early_bird_ticket>;

  explicit channel_search(const channel_search_options& o) : by_(o.by) {
    for (const double share : o.shares) {
      pufferfish::early_bird_options one = o.masks;
      one.share = share;
      all_.push_back({pufferfish::early_bird(one)});
    }
  }

  const ticket_type& ticket(std::size_t share) const { return all_[share].ticket; }
  /// Whether every share has a ticket.
  bool complete() const {
    return std::ranges::all_of(all_, [](const candidate& one) { return one.ticket.has_value(); });
  }

  /// Early-Bird: draws the masks after an epoch. Returns the positions of shares that have a ticket since
  /// this call. Other criteria: does nothing.
  std::vector<std::size_t> observe(const network& net, index_t epoch) {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < all_.size() && by_ == criterion::early_bird; ++i) {
      candidate& one = all_[i];
      if (one.ticket) continue;
      one.search.observe(net, epoch);
      nlohmann::ordered_json distance = nullptr;
      if (one.search.distance()) distance = *one.search.distance();
      one.distances.push_back({{"epoch", epoch}, {"distance", distance}});
      one.ticket = one.search.ticket();
      if (one.ticket) found.push_back(i);
    }
    return found;
  }

  /// The other criteria: chooses the channels of the trained network.
  void choose(const network& net, index_t epochs) {
    if (by_ == criterion::early_bird) return;
    for (candidate& one : all_) {
      pufferfish::channel_options layers{.share = one.search.options().share,
                                         .rule = one.search.options().rule};
      layers.scope = pufferfish::removal_scope::layers;
      one.ticket = pufferfish::early_bird_ticket{
          by_ == criterion::slimming
              ? one.search.draw(net)
              : pufferfish::prune_channels(pufferfish::filter_norms(net, one.search.options().groups),
                                           layers),
          epochs};
    }
  }

  /// The state of the searches for checkpoints, and back. Throws as early_bird::restore.
  nlohmann::ordered_json state() const {
    nlohmann::ordered_json j;
    for (const candidate& one : all_) {
      j.push_back({{"masks", one.search.to_text()}, {"distances", one.distances}});
    }
    return j;
  }
  void restore(const nlohmann::ordered_json& j, const std::string& source) {
    for (std::size_t i = 0; i < all_.size(); ++i) {
      all_[i].search.restore(j.at(i).at("masks").get<std::string>(), source);
      all_[i].ticket = all_[i].search.ticket();
      all_[i].distances = j.at(i).at("distances");
    }
  }

  /// The network without the channels that a ticket removes.
  static network sliced(network net, const ticket_type& by) {
    pufferfish::slice_channels(net, by->mask);
    return net;
  }

  /// What became of each share: its ticket and the size of its network. `whole`: the network of the search.
  nlohmann::ordered_json report(const network& whole, const extents<4>& image) const {
    nlohmann::ordered_json shares = nlohmann::ordered_json::array();
    for (const candidate& one : all_) {
      nlohmann::ordered_json j{{"share", one.search.options().share}, {"epoch", nullptr}};
      if (one.ticket) {
        const network small = sliced(whole, one.ticket);
        j.update({{"epoch", one.ticket->epoch},
                  {"channels", pufferfish::all_channels(one.ticket->mask)},
                  {"kept_channels", pufferfish::kept_channels(one.ticket->mask)},
                  {"parameters", small.parameter_count()},
                  {"macs", small.macs(image)}});
      }
      j["distances"] = one.distances;
      shares.push_back(j);
    }
    return shares;
  }

  /// The report as a table.
  static std::string table(const nlohmann::ordered_json& report) {
    text_table rows({"share", "ticket after epoch", "channels", "of", "parameters", "MACs"});
    for (const nlohmann::ordered_json& one : report) {
      std::vector<std::string> row{one["share"].dump()};
      for (const char* const name : {"epoch", "kept_channels", "channels", "parameters", "macs"}) {
        const auto value = one.find(name);
        row.push_back(value == one.end() || value->is_null() ? "-" : grouped(value->get<index_t>()));
      }
      rows.add(row);
    }
    return rows.str();
  }

 private:
  struct candidate {
    pufferfish::early_bird search;
    ticket_type ticket = {};
    nlohmann::ordered_json distances = nlohmann::ordered_json::array();
  };

  criterion by_;
  std::vector<candidate> all_;
};

}  // namespace examples
