// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: pairs the weights of a network with the constants of an ONNX model by the order in which nodes
/// use them, for models whose exporter has not kept the names.

#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include <pufferfish/adapters/onnx/tensors.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The first use of a constant: its name, its shape, and the place in the first node that reads it.
struct onnx_use {
  /// Name of the constant in its graph.
  std::string name;
  std::vector<index_t> shape;
  std::string place;  ///< "input 1 of Conv"

  /// Whether the two may be the same weight: equal shape and equal place.
  bool fits(const onnx_use& other) const { return shape == other.shape && place == other.place; }
};

/// Appends to `to` the first use of each constant for which shape_of(name) returns a shape, not nullptr, in
/// the order of the nodes. Uses in a subgraph follow the inputs of its node. An Identity node does not count
/// as a use. `seen`: names of the constants that are in `to` already; names are added to it.
template <class ShapeOf>
void append_uses(const onnx::GraphProto& graph, const ShapeOf& shape_of, std::set<std::string>& seen,
                 std::vector<onnx_use>& to) {
  for (const onnx::NodeProto& node : graph.node()) {
    if (node.op_type() == "Identity") continue;
    std::string op = node.op_type();
    for (const auto& attribute : node.attribute()) {
      if (attribute.name() == "transB" && attribute.i() != 0) op += " with transB";
    }
    for (int i = 0; i < node.input_size(); ++i) {
      const std::string& name = node.input(i);
      const std::vector<index_t>* const shape = shape_of(name);
      if (shape == nullptr || !seen.insert(name).second) continue;
      to.push_back({name, *shape, message({"input ", i, " of ", op})});
    }
    for (const auto& attribute : node.attribute()) {
      if (attribute.has_g()) append_uses(attribute.g(), shape_of, seen, to);
    }
  }
}

/// Pairs each weight of `wanted` with one constant of `there`, and returns the constants' indices. The
/// indices increase, and the two of a pair have equal shapes and an equal `place`: the operator and the
/// number of its input, such as "input 1 of Conv". Constants between two pairs are left out. The earliest and
/// the latest choice are computed, and the pairing is unique if they are the same. Throws io_error if there
/// is no such pairing, naming the first weight without a constant, or more than one, naming the weight and
/// two candidates. `path` names the file in error texts.
inline std::vector<std::size_t> match_in_order(const std::vector<onnx_use>& wanted,
                                               const std::vector<onnx_use>& there, const std::string& path) {
  std::vector<std::size_t> first, last(wanted.size());
  for (std::size_t at = 0; at < there.size() && first.size() < wanted.size(); ++at) {
    if (there[at].fits(wanted[first.size()])) first.push_back(at);
  }
  if (first.size() < wanted.size()) {
    const onnx_use& missing = wanted[first.size()];
    const std::string after = first.empty() ? "" : " after " + quote_name(there[first.back()].name);
    throw_error<io_error>({path, ": the model has no constant ", quote_name(missing.name),
                           ", which the network has with shape ", shape_text(missing.shape),
                           ", and in the order of use none of another name", after, " is ", missing.place,
                           " and has this shape"});
  }
  // The choice is unique if the earliest constants are the latest ones, too.
  std::size_t end = there.size();
  for (std::size_t i = wanted.size(); i > 0; --i) {
    do --end;
    while (!there[end].fits(wanted[i - 1]));
    last[i - 1] = end;
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (first[i] == last[i]) continue;
    throw_error<io_error>({path, ": the model has no constant ", quote_name(wanted[i].name),
                           "; by shapes in the order of use, it may be ", quote_name(there[first[i]].name),
                           " or ", quote_name(there[last[i]].name), " of shape ",
                           shape_text(wanted[i].shape)});
  }
  return first;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
