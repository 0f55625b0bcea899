// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: entries of a checkpoint for a network's structure: the library's entries in the metadata, ranks
/// of layers as lists of names and numbers, and the widths of channel groups in the shapes of tensors.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/core/version.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/io/json_numbers.hpp>
#include <pufferfish/io/safetensors.hpp>
#include <pufferfish/lowrank/selection.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/switch/annealing.hpp>
#include <pufferfish/nn/switch/factor_norms.hpp>
#include <pufferfish/prune/slice/slice_channels.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

inline constexpr std::string_view checkpoint_prefix = "pufferfish.";  ///< of the library's metadata entries
inline constexpr std::string_view checkpoint_format = "1";            ///< version of the format

/// Name of a metadata entry of the library: "pufferfish.NAME".
inline std::string metadata_name(std::string_view name) {
  return std::string(checkpoint_prefix).append(name);
}

/// Digest of bytes at about the speed of memory: each of four independent hashers takes every fourth word.
inline std::uint64_t fast_digest(std::span<const std::uint8_t> bytes) {
  std::array<hasher, 4> lanes;
  std::array<std::uint64_t, 4> words;
  std::size_t at = 0;
  for (; bytes.size() - at >= sizeof(words); at += sizeof(words)) {
    std::memcpy(words.data(), bytes.data() + at, sizeof(words));
    for (std::size_t lane = 0; lane < lanes.size(); ++lane) lanes[lane].number(words[lane]);
  }
  hasher all;
  for (const hasher& lane : lanes) all.number(lane.digest());
  return all.values(bytes.subspan(at)).digest();
}

/// Digest of tensors, in the order of their names: names and bytes. A safetensors file has no checksum of its
/// own, and almost any bytes are valid weights.
inline std::string data_digest(
    std::vector<std::pair<std::string_view, std::span<const std::uint8_t>>> tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  hasher content;
  for (const auto& [name, bytes] : tensors) content.text(name).number(fast_digest(bytes));
  return hexadecimal(content.digest());
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

/// Whether a name ends in ":NUMBER" or ":hidden", perhaps followed by ":layer" any number of times. Such a
/// layer name needs one more ":layer" in the list, because it would be read as a further rank.
inline bool looks_like_further_rank(std::string_view name) {
  while (name.ends_with(layer_suffix)) name.remove_suffix(layer_suffix.size());
  if (name.ends_with(old_second_suffix)) return true;
  const std::size_t colon = name.rfind(':');
  return colon != std::string_view::npos && colon + 1 < name.size() &&
         name.find_first_not_of("0123456789", colon + 1) == std::string_view::npos;
}

/// Encodes the ranks of layers as the list of named numbers that a checkpoint stores; ranks_from_numbers
/// inverts it.
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
/// Decodes the list that numbers_of has made. Never throws: a name that ends in a further rank's suffix, but
/// follows no such layer, is read as a layer.
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

/// Returns the ranks sorted by the names of the layers.
inline std::vector<layer_rank> sorted_ranks(std::vector<layer_rank> ranks) {
  std::sort(ranks.begin(), ranks.end(),
            [](const layer_rank& a, const layer_rank& b) { return a.name < b.name; });
  return ranks;
}

/// Makes the library's metadata for a checkpoint of `net` that also stores arrays of these names and sizes.
/// `path` names the file in the errors of encode_json_numbers.
template <class Root, class Device>
safetensors_metadata checkpoint_metadata(const model<Root, Device>& net, const named_numbers& states,
                                         const std::string& path) {
  const auto encode = [&](const std::vector<layer_rank>& layers) {
    return encode_json_numbers(numbers_of(layers), path);
  };
  safetensors_metadata metadata;
  metadata[metadata_name("format")] = checkpoint_format;
  metadata[metadata_name("version")] = PUFFERFISH_VERSION_STRING;
  metadata[metadata_name("layout")] = layout_digest(net);
  metadata[metadata_name("ranks")] = encode(low_rank_layers(net));
  metadata[metadata_name("factor_norms")] = encode(factor_norm_layers(net));
  if (const std::vector<layer_rank> annealed = annealed_layers(net); !annealed.empty()) {
    metadata[metadata_name("annealed")] = encode(annealed);
  }
  metadata[metadata_name("states")] = encode_json_numbers(states, path);
  return metadata;
}

/// Shape of a layer's tensor `part` (of the dense layer) in a file, or of its tensor `factor` (of the
/// low-rank layer); empty if the file has neither, or one of them without elements.
inline std::vector<index_t> stored_shape(const safetensors_file& file, const std::string& layer,
                                         const char* part, const char* factor) {
  for (const char* const name : {part, factor}) {
    const std::string tensor = join_name(layer, name);
    if (file.contains(tensor) && file.tensor(tensor).count() > 0) return file.tensor(tensor).shape;
  }
  return {};
}

/// Widths that the network's channel groups have in a file. A group keeps its width if producer and consumer
/// do not agree, or if it would grow and is low-rank in the file, whose size then does not limit the dense
/// one.
template <class Root, class Device>
std::vector<layer_width> stored_widths(const model<Root, Device>& net, const safetensors_file& file) {
  std::vector<layer_width> widths;
  for (const channel_group& group : channel_groups(net, group_choice::any)) {
    if (group.stream > 0) {  // all channels if the file has no ChannelSelect
      const std::string list = join_name(group.producer, "channels");
      widths.push_back({group.producer, file.contains(list) ? file.tensor(list).count() : group.stream});
      continue;
    }
    const std::vector<index_t> out = stored_shape(file, group.producer, "weight", "up.weight");
    const std::vector<index_t> in = stored_shape(file, group.consumer, "weight", "down.weight");
    const bool agree = out.size() > 1 && in.size() > 1 && in[1] == out[0] * group.pixels;
    const bool dense = file.contains(join_name(group.producer, "weight")) &&
                       file.contains(join_name(group.consumer, "weight"));
    const bool usable = agree && (dense || out[0] < group.channels);
    widths.push_back({group.producer, usable ? out[0] : group.channels});
  }
  return widths;
}

/// Copies the elements of a tensor from bytes of a file to a view of any strides, in the order of the view's
/// indices. The bytes need no alignment; there must be as many as the view has elements.
template <class T>
void read_strided(std::span<const std::uint8_t> bytes, const tensor_view<T, 4>& to) {
  const std::uint8_t* from = bytes.data();
  for (index_t a = 0; a < to.extent(0); ++a) {
    for (index_t b = 0; b < to.extent(1); ++b) {
      for (index_t c = 0; c < to.extent(2); ++c) {
        for (index_t d = 0; d < to.extent(3); ++d, from += sizeof(T)) {
          std::memcpy(&to(a, b, c, d), from, sizeof(T));
        }
      }
    }
  }
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
