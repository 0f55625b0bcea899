// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: compares the names of a model's tensors with those of a file.

#include <algorithm>
#include <string>
#include <vector>

#include <pufferfish/io/safetensors.hpp>
#include <pufferfish/nn/model.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Calls f(entry) for each parameter of a store, then for each buffer.
template <class Store, class F>
void for_each_entry(const Store& store, F&& f) {
  for (const auto& entry : store.parameters()) f(entry);
  for (const auto& entry : store.buffer_entries()) f(entry);
}

/// The extents of a parameter in the frameworks' order of dimensions.
inline std::vector<index_t> shape_of(const logical_layout& layout) {
  return {layout.shape.begin(), layout.shape.begin() + layout.dims};
}

/// Text of at most ten of the names, in quotes, joined by commas.
inline std::string list_names(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(names.size(), 10); ++i) {
    text += (i > 0 ? ", " : "") + quote_name(names[i]);
  }
  return text + (names.size() > 10 ? " and " + std::to_string(names.size() - 10) + " more" : "");
}

/// Difference between the names of a model and those of a file: `missing` are not in the file, `unexpected`
/// not in the model.
struct name_difference {
  std::vector<std::string> missing, unexpected;

  /// Whether the names are equal.
  bool empty() const { return missing.empty() && unexpected.empty(); }
  /// Text for the end of an error message; `model` is what the message calls the model.
  std::string text(const std::string& model) const {
    return (missing.empty() ? "" : "; missing in the file: " + list_names(missing)) +
           (unexpected.empty() ? "" : "; unknown to the " + model + ": " + list_names(unexpected));
  }
};

/// Compares the names of a store with those of a file. lacks(name): whether a name of the store counts as
/// missing; ignores(name): whether a name of the file is not compared.
template <class Store, class Lacks, class Ignores>
name_difference compare_names(const Store& store, const safetensors_file& file, Lacks&& lacks,
                              Ignores&& ignores) {
  name_difference result;
  std::vector<std::string> known;
  for_each_entry(store, [&](const auto& entry) {
    known.push_back(entry.name);
    if (lacks(entry.name)) result.missing.push_back(entry.name);
  });
  std::sort(known.begin(), known.end());
  for (const std::string& name : file.tensor_names()) {
    if (!ignores(name) && !std::binary_search(known.begin(), known.end(), name)) {
      result.unexpected.push_back(name);
    }
  }
  return result;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
