// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: groups of ranks that hold equal values, and texts about them for errors.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <pufferfish/core/hash.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Ranks that hold the same value; ascending.
struct rank_group {
  std::uint64_t digest = 0;  ///< of the value
  std::vector<int> ranks;    ///< ranks that hold it
};

/// Groups ranks with equal digests; digests[r] is that of rank r. The smallest group is first, since it most
/// likely has the wrong value; of equal sizes, the group with the lowest rank.
inline std::vector<rank_group> group_ranks(std::span<const std::uint64_t> digests) {
  std::map<std::uint64_t, std::vector<int>> ranks;
  for (std::size_t i = 0; i < digests.size(); ++i) ranks[digests[i]].push_back(static_cast<int>(i));
  std::vector<rank_group> groups;
  for (const auto& [digest, members] : ranks) groups.push_back({digest, members});
  std::sort(groups.begin(), groups.end(), [](const rank_group& a, const rank_group& b) {
    if (a.ranks.size() != b.ranks.size()) return a.ranks.size() < b.ranks.size();
    return a.ranks.front() < b.ranks.front();
  });
  return groups;
}

/// Text about ranks, such as "rank 2 has", "ranks 0, 1, 3 have", "ranks 0-5, 7 have": runs of three or more
/// are joined.
inline std::string describe_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (last - i < 2) last = i;
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (last > i) text.append("-").append(std::to_string(ranks[last]));
    i = last + 1;
  }
  return text + (ranks.size() == 1 ? " has" : " have");
}

/// Number of groups that an error message lists.
inline constexpr std::size_t listed_groups = 4;

/// Joins "ranks ... have " + describe(group, number) of the first listed_groups groups by "; ", and names the
/// number of the groups that are left out.
template <class Describe>
std::string describe_groups(const std::vector<rank_group>& groups, const Describe& describe) {
  std::string text;
  for (std::size_t i = 0; i < std::min(groups.size(), listed_groups); ++i) {
    if (i > 0) text += "; ";
    text.append(describe_ranks(groups[i].ranks)).append(" ").append(describe(groups[i], i));
  }
  if (groups.size() > listed_groups) {
    text.append("; and ").append(std::to_string(groups.size() - listed_groups)).append(" more groups");
  }
  return text;
}

/// Returns line `number` (from 0) of a text, quoted; "nothing" after the last line. A text of n newlines has
/// n + 1 lines, so texts that differ at all differ in a line.
inline std::string line_of(std::string_view text, std::size_t number) {
  for (; number > 0; --number) {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos) return "nothing";
    text.remove_prefix(end + 1);
  }
  return std::string("\"").append(text.substr(0, text.find('\n'))).append("\"");
}

/// Number of the first line that is not the same in all texts. The texts must differ.
inline std::size_t first_difference(const std::vector<std::string>& texts) {
  for (std::size_t line = 0;; ++line) {
    const std::string first = line_of(texts.front(), line);
    for (const std::string& text : texts) {
      if (line_of(text, line) != first) return line;
    }
  }
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
