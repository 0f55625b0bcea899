// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the library's entries in the metadata of a checkpoint, and ranks of layers as the lists of names
/// and numbers that it stores.

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/io/json_numbers.hpp>
#include <pufferfish/lowrank/selection.hpp>
#include <pufferfish/nn/model.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

inline constexpr std::string_view checkpoint_prefix = "pufferfish.";
inline constexpr std::string_view checkpoint_format = "1";

inline std::string metadata_name(std::string_view name) {
  return std::string(checkpoint_prefix).append(name);
}

/// Digest of the arena layout: the offsets of flat state are valid for one layout only.
template <class Root, class Device>
std::string layout_digest(const model<Root, Device>& net) {
  return std::to_string(digest(std::string_view(net.structure())));
}

/// Ranks of a layer in a checkpoint's list: the first is "name", further ones are "name:2", "name:3", ... (in
/// old files "name:hidden"). A layer's own name that ends like that, perhaps followed by ":layer" any number
/// of times, is stored with one more ":layer".
inline constexpr std::string_view layer_suffix = ":layer";
inline constexpr std::string_view old_second_suffix = ":hidden";

inline bool looks_like_further_rank(std::string_view name) {
  while (name.ends_with(layer_suffix)) name.remove_suffix(layer_suffix.size());
  if (name.ends_with(old_second_suffix)) return true;
  const std::size_t colon = name.rfind(':');
  return colon != std::string_view::npos && colon + 1 < name.size() &&
         name.find_first_not_of("0123456789", colon + 1) == std::string_view::npos;
}

/// The list that is stored for these layers; ranks_from_numbers is its inverse.
inline named_numbers numbers_of(const std::vector<layer_rank>& ranks) {
  named_numbers numbers;
  for (const layer_rank& layer : ranks) {
    for (std::size_t i = 0; i < layer.ranks.size(); ++i) {
      std::string name = layer.name;
      if (i > 0) {
        name.append(1, ':').append(std::to_string(i + 1));
      } else if (looks_like_further_rank(name)) {
        name.append(layer_suffix);
      }
      numbers.emplace_back(std::move(name), layer.ranks[i]);
    }
  }
  return numbers;
}
/// Never throws: names that end in a further rank's suffix, but follow no such layer, are layers of their
/// own.
inline std::vector<layer_rank> ranks_from_numbers(const named_numbers& numbers) {
  std::vector<layer_rank> ranks;
  const auto is_further = [&ranks](const std::string& name) {
    if (ranks.empty() || !name.starts_with(ranks.back().name)) return false;
    const std::string_view suffix = std::string_view(name).substr(ranks.back().name.size());
    const std::size_t known = ranks.back().ranks.size();
    return suffix == ":" + std::to_string(known + 1) || (known == 1 && suffix == old_second_suffix);
  };
  for (const auto& [name, number] : numbers) {
    if (is_further(name)) {
      ranks.back().ranks.push_back(number);
    } else {
      const bool escaped = looks_like_further_rank(name) && name.ends_with(layer_suffix);
      ranks.push_back({name.substr(0, name.size() - (escaped ? layer_suffix.size() : 0)), number});
    }
  }
  return ranks;
}

/// Ranks sorted by the names of the layers.
inline std::vector<layer_rank> sorted_ranks(std::vector<layer_rank> ranks) {
  std::sort(ranks.begin(), ranks.end(),
            [](const layer_rank& a, const layer_rank& b) { return a.name < b.name; });
  return ranks;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
