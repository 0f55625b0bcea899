// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the metadata of a file with factors. They distinguish factors from other tensors with
/// such names, and record how the dense weights are restored.

#include <map>
#include <string>
#include <string_view>

#include <pufferfish/io/json_numbers.hpp>
#include <pufferfish/io/safetensors_header.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Lists of the factorized weights of a file, by the names of the dense weights. Each list is a line of JSON
/// under a metadata key of its own, such as {"layer1.0.conv2.weight":16}. Files written before `parts` and
/// `embeddings` existed have only `ranks`.
///
/// \code
/// pufferfish.low_rank        {"layer1.0.conv2.weight":16,"rnn.weight_ih_l0":8}
/// pufferfish.low_rank.parts  {"rnn.weight_ih_l0":4}
/// \endcode
///
/// Invariants that read() checks: names of `parts` and `embeddings` are also in `ranks`; a weight has at
/// least one matrix; an embedding has the rank that `ranks` says and one matrix. Whether the factors exist in
/// the file is not checked here: pair_finder does this.
struct factor_lists {
  static constexpr std::string_view ranks_key = "pufferfish.low_rank";
  static constexpr std::string_view parts_key = "pufferfish.low_rank.parts";
  static constexpr std::string_view embeddings_key = "pufferfish.low_rank.embeddings";

  using list = std::map<std::string, index_t>;
  list ranks;       ///< rank of every factorized weight
  list parts;       ///< number of matrices of each weight that has more than one
  list embeddings;  ///< rank of each weight that is an embedding

  /// Adds a weight, in place of an earlier entry of the same name: a file may be factorized again. `parts`
  /// has only weights of more than one matrix.
  void add(const std::string& name, index_t rank, index_t part_count, bool embedding) {
    parts.erase(name);
    embeddings.erase(name);
    ranks[name] = rank;
    if (part_count > 1) parts[name] = part_count;
    if (embedding) embeddings[name] = rank;
  }

  /// Whether the metadata list factors at all, possibly none: merge_weights then does not look for pairs by
  /// name.
  static bool listed(const safetensors_metadata& metadata) {
    return metadata.count(std::string(ranks_key)) > 0;
  }

  /// Reads the lists from `metadata`; all are empty if there are none. `where` names the file in errors.
  /// Throws io_error for text that is not such a list, and for lists that contradict each other; the text
  /// names the key and the weight.
  static factor_lists read(const safetensors_metadata& metadata, const std::string& where) {
    const auto list_of = [&](std::string_view key) {
      const auto found = metadata.find(std::string(key));
      if (found == metadata.end()) return list();
      const named_numbers numbers = parse_json_numbers(found->second, where + ": metadata " + found->first);
      return list(numbers.begin(), numbers.end());
    };
    factor_lists lists{list_of(ranks_key), list_of(parts_key), list_of(embeddings_key)};
    const auto refuse = [&](std::string_view key, const std::string& name, index_t number,
                            const std::string& why) {
      throw_error<io_error>(
          {where, ": metadata ", std::string(key), ": ", quote_name(name), " has ", number, "; ", why});
    };
    const std::string unlisted = std::string(ranks_key) + " has no such name";
    for (const auto& [name, count] : lists.parts) {
      if (lists.ranks.count(name) == 0) refuse(parts_key, name, count, unlisted);
      if (count < 1) refuse(parts_key, name, count, "a weight has at least one matrix");
    }
    for (const auto& [name, rank] : lists.embeddings) {
      const auto found = lists.ranks.find(name);
      if (found == lists.ranks.end()) refuse(embeddings_key, name, rank, unlisted);
      if (found->second != rank) {
        refuse(embeddings_key, name, rank, std::string(ranks_key) + " has " + std::to_string(found->second));
      }
      if (lists.parts.count(name) > 0) {
        refuse(embeddings_key, name, rank, std::string(parts_key) + " lists it, and a table is one matrix");
      }
    }
    return lists;
  }

  /// Replaces all three lists in `metadata`: `ranks` is always written, the others if they have entries.
  /// Other keys stay. `where` names the file in errors, which are those of encode_json_numbers.
  void write(safetensors_metadata& metadata, const std::string& where) const {
    erase(metadata);
    const auto put = [&](std::string_view key, const list& numbers) {
      metadata[std::string(key)] = encode_json_numbers({numbers.begin(), numbers.end()}, where);
    };
    put(ranks_key, ranks);
    if (!parts.empty()) put(parts_key, parts);
    if (!embeddings.empty()) put(embeddings_key, embeddings);
  }

  /// Removes all three lists from `metadata`, as merge_weights does.
  static void erase(safetensors_metadata& metadata) {
    for (const std::string_view key : {ranks_key, parts_key, embeddings_key}) {
      metadata.erase(std::string(key));
    }
  }
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
