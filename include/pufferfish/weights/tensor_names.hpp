// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: names of tensors in weight files, as common networks use them.

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Whether a name is that of a weight: "weight" or "NAME.weight".
inline bool is_weight_name(std::string_view name) { return name == "weight" || name.ends_with(".weight"); }
/// A name without its last component: "layer1.conv.weight" -> "layer1.conv", "weight" -> "".
inline std::string_view stem_of(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
}
/// The last component of a name: "layer1.conv1.weight" -> "weight".
inline std::string_view last_of(std::string_view name) { return name.substr(name.rfind('.') + 1); }
/// Joins two parts of a name by a dot, unless the first part is empty.
inline std::string joined(std::string_view stem, std::string_view last) {
  return stem.empty() ? std::string(last) : std::string(stem) + "." + std::string(last);
}

/// Name of the factor `side` ("down" or "up") of a weight. X.weight becomes X.down.weight or X.up.weight, so
/// that a sequence of two layers called down and up loads the factors; a recurrent weight W becomes W.down or
/// W.up: factor_name("layer1.conv.weight", "down") is "layer1.conv.down.weight".
inline std::string factor_name(const std::string& weight, std::string_view side) {
  if (!is_weight_name(weight)) return weight + "." + std::string(side);
  return joined(joined(stem_of(weight), side), "weight");
}

/// The components of a name, which dots separate.
inline std::vector<std::string_view> components_of(std::string_view name) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t dot = name.find('.');
    parts.push_back(name.substr(0, dot));
    if (dot == std::string_view::npos) return parts;
    name.remove_prefix(dot + 1);
  }
}

/// Order of names: letter by letter, but with runs of digits compared as numbers: layer2 comes before
/// layer10.
inline bool natural_less(std::string_view a, std::string_view b) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  std::size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (is_digit(a[i]) && is_digit(b[j])) {
      const auto number = [&](std::string_view text, std::size_t& at) {
        while (at + 1 < text.size() && text[at] == '0' && is_digit(text[at + 1])) ++at;
        const std::size_t begin = at;
        while (at < text.size() && is_digit(text[at])) ++at;
        return text.substr(begin, at - begin);
      };
      const std::string_view left = number(a, i), right = number(b, j);
      if (left != right) return left.size() != right.size() ? left.size() < right.size() : left < right;
    } else if (a[i] != b[j]) {
      return static_cast<unsigned char>(a[i]) < static_cast<unsigned char>(b[j]);
    } else {
      ++i;
      ++j;
    }
  }
  return a.size() - i < b.size() - j;
}

/// Returns -1 for usual names of the first layer of a network (conv1, stem, patch_embed, ...), 1 for usual
/// names of the last (fc, classifier, head, lm_head, ...), otherwise 0. Prefixes module, model and backbone
/// are skipped.
inline int end_of_network(std::string_view stem) {
  std::vector<std::string_view> parts = components_of(stem);
  while (parts.size() > 1 && (parts[0] == "module" || parts[0] == "model" || parts[0] == "backbone")) {
    parts.erase(parts.begin());
  }
  const auto is_one_of = [](std::string_view name, std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (is_one_of(parts[0], {"conv1", "stem", "conv_stem", "conv_in", "patch_embed", "conv_proj"})) return -1;
  if (is_one_of(parts[0], {"fc", "classifier", "head", "heads", "lm_head", "cls", "score"})) return 1;
  return parts.size() == 1 && is_one_of(parts[0], {"linear", "decoder", "output", "out"}) ? 1 : 0;
}

/// Recognizes embeddings by the names they have in common networks: stems whose last component is wte, wpe,
/// shared or emb, begins with embed_, or ends with embedding, embeddings, embed or _emb.
inline bool looks_like_embedding(std::string_view stem) {
  const std::string_view own = stem.substr(stem.rfind('.') + 1);  // all of it if there is no dot
  return own == "wte" || own == "wpe" || own == "shared" || own == "emb" || own.starts_with("embed_") ||
         own.ends_with("embedding") || own.ends_with("embeddings") || own.ends_with("embed") ||
         own.ends_with("_emb");
}

/// Last component of the name of attention's packed projections.
inline constexpr std::string_view packed_projections = "in_proj_weight";

/// Splits the last component of a recurrent weight's name: "weight_ih_l0_reverse" -> {"weight_ih",
/// "_l0_reverse"}. Both views are empty for other weights.
inline std::pair<std::string_view, std::string_view> recurrent_name(std::string_view last) {
  const std::string_view side = last.substr(0, 9), layer = last.substr(std::min<std::size_t>(9, last.size()));
  if (side != "weight_ih" && side != "weight_hh") return {};
  if (!layer.empty() && layer.substr(0, 2) != "_l") return {};
  return {side, layer};
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
