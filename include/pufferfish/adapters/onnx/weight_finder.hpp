// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `weight_finder` lists the constants of an ONNX graph that nodes use as weight matrices, with the
/// reason why a weight cannot be replaced by factors.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/onnx/tensors.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Place of a weight matrix W [out][in] in a product.
enum class onnx_role {
  conv,     ///< Conv: [out][in / groups][kernel...]
  gemm,     ///< Gemm: W or, with `transposed`, its transpose
  product,  ///< MatMul: x W^T; the constant is the transpose
  applied,  ///< MatMul: W x
  gates     ///< input side of an LSTM, GRU or RNN of one direction: [1][out][in], all gates stacked
};

/// A constant that at least one node uses as its weight.
struct onnx_weight {
  std::string name{};                         ///< name of the constant
  const onnx::TensorProto* tensor = nullptr;  ///< the constant; owned by the model
  onnx_role role{};                           ///< place of the matrix in its nodes
  bool transposed = false;                    ///< whether the constant is [in][out]
  index_t groups = 1;                         ///< of a convolution
  std::vector<index_t> shape{};  ///< [out][in], or [out][in / groups][kernel elements][1] of a convolution
  std::string bias{};            ///< constant [out] that is added to the product; empty: none
  std::string reason{};          ///< why the weight has to stay; empty: it may be factorized
  std::vector<int> nodes{};      ///< numbers of the nodes that use it
};

/// Returns the attribute of a node by name, or nullptr if the node does not have it.
inline const onnx::AttributeProto* attribute_of(const onnx::NodeProto& node, const std::string& name) {
  for (const auto& one : node.attribute()) {
    if (one.name() == name) return &one;
  }
  return nullptr;
}
/// Returns the value of an integer attribute, or `otherwise` if the node does not have the attribute.
inline std::int64_t int_of(const onnx::NodeProto& node, const std::string& name, std::int64_t otherwise) {
  const onnx::AttributeProto* const one = attribute_of(node, name);
  return one != nullptr ? one->i() : otherwise;
}

/// Finds the weights of the main graph, each once, in the order of the first node that uses it. Considered
/// are Conv, Gemm, MatMul with one constant, LSTM, GRU and RNN; ConvTranspose and embeddings are listed with
/// the reason why they stay. `model` and `constants` must outlive the object, and the pointers in the result
/// are valid as long as the model is unchanged. Of a recurrent layer only the input side is considered; the
/// matrix of the hidden state, input 2 of the node, always stays.
///
///     const constant_map constants = constants_of(model.graph());
///     const std::vector<onnx_weight> weights = weight_finder(model, constants)();
class weight_finder {
 public:
  /// Counts the uses of all values, in subgraphs too. A use as an output of the graph counts as well.
  weight_finder(const onnx::ModelProto& model, const constant_map& constants)
      : model_(model), constants_(constants) {
    count_uses(model.graph(), false);
    for (const auto& one : model.graph().output()) ++uses_[one.name()];
    for (const auto& one : model.graph().input()) inputs_.insert(one.name());
  }

  /// Returns the weights. A weight has to stay, with a reason, if a node uses it for another purpose, if a
  /// subgraph uses it, if it is a default value of a graph's input (from version 4 of the format), or if its
  /// elements are not floating-point numbers. To be called once.
  std::vector<onnx_weight> operator()() {
    for (int i = 0; i < model_.graph().node_size(); ++i) look_at(i);
    for (onnx_weight& one : weights_) {
      if (!one.reason.empty()) continue;
      if (uses_[one.name] != static_cast<int>(one.nodes.size())) one.reason = "used by other nodes, too";
      if (nested_.count(one.name) > 0) one.reason = "used in a subgraph";
      if (inputs_.count(one.name) > 0 && model_.ir_version() >= 4) one.reason = "an input of the model";
      if (!floating_dtype(*one.tensor)) one.reason = "no floating-point type";
    }
    return std::move(weights_);
  }

 private:
  // Counts in uses_ how many inputs of nodes read each value, and collects in nested_ the values that a
  // subgraph reads or returns.
  void count_uses(const onnx::GraphProto& graph, bool nested) {
    for (const auto& node : graph.node()) {
      for (const std::string& name : node.input()) {
        if (nested) nested_.insert(name);
        ++uses_[name];
      }
      for (const auto& attribute : node.attribute()) {
        if (attribute.has_g()) count_uses(attribute.g(), true);
        for (const auto& inner : attribute.graphs()) count_uses(inner, true);
      }
    }
    for (const auto& one : graph.output()) {
      if (nested) nested_.insert(one.name());
    }
  }

  // Returns the constant that is the given input of a node; nullptr if there is no such input, or if the
  // input is computed or fed.
  const onnx::TensorProto* constant(const onnx::NodeProto& node, int input) const {
    if (input >= node.input_size()) return nullptr;
    const auto found = constants_.find(node.input(input));
    return found == constants_.end() ? nullptr : found->second;
  }

  // Records the weight of node `number`, if the node belongs to the standard operators and uses one.
  void look_at(int number) {
    const onnx::NodeProto& node = model_.graph().node(number);
    if (!node.domain().empty() && node.domain() != "ai.onnx") return;
    // The checker has not seen models of newer opsets.
    if (node.input_size() < 2 || node.output_size() < 1) return;
    const std::string& op = node.op_type();
    if (op == "Conv") {
      add(number, 1, conv(node));
    } else if (op == "Gemm") {
      add(number, 1, gemm(node));
    } else if (op == "MatMul") {
      const bool left = constant(node, 0) != nullptr, right = constant(node, 1) != nullptr;
      if (left != right) add(number, left ? 0 : 1, matmul(node, left ? 0 : 1));
    } else if (op == "LSTM" || op == "GRU" || op == "RNN") {
      add(number, 1, gates(node));
    } else if (op == "ConvTranspose") {
      add(number, 1, {.reason = "a transposed convolution"});
    } else if (op == "Gather" || op == "GatherElements") {
      const onnx::TensorProto* const table = constant(node, 0);
      if (table != nullptr && table->dims_size() == 2) add(number, 0, {.reason = "an embedding"});
    }
  }

  // These four functions describe the weight of one kind of node: role, shape, orientation, bias, and the
  // reason if the shape excludes factors. Without a constant weight the result is not used: see add().
  onnx_weight conv(const onnx::NodeProto& node) const {
    onnx_weight found{.role = onnx_role::conv, .groups = int_of(node, "group", 1)};
    const onnx::TensorProto* const w = constant(node, 1);
    if (w == nullptr) return found;
    // The product of the extents is computed below. It is known to fit in index_t only for floating-point
    // constants, whose size byte_size() has checked.
    if (!floating_dtype(*w)) return {.reason = "no floating-point type"};
    if (w->dims_size() < 3) return {.reason = std::to_string(w->dims_size()) + " dimensions"};
    index_t elements = 1;
    for (int d = 2; d < w->dims_size(); ++d) elements *= w->dims(d);
    found.shape = {w->dims(0), w->dims(1), elements, 1};
    if (found.groups < 1 || found.shape[0] % found.groups != 0) found.reason = "groups that do not fit";
    found.bias = bias(node, found.shape[0]);
    return found;
  }

  // With alpha or beta other than 1 the bias stays out of the record: alpha W x + beta c is then not W x + b.
  onnx_weight gemm(const onnx::NodeProto& node) const {
    onnx_weight found{.role = onnx_role::gemm, .transposed = int_of(node, "transB", 0) == 0};
    const onnx::TensorProto* const w = constant(node, 1);
    if (w == nullptr) return found;
    if (w->dims_size() != 2) return {.reason = std::to_string(w->dims_size()) + " dimensions"};
    found.shape = {w->dims(0), w->dims(1)};
    if (found.transposed) std::swap(found.shape[0], found.shape[1]);
    const auto* const alpha = attribute_of(node, "alpha");
    const auto* const beta = attribute_of(node, "beta");
    if ((alpha == nullptr || alpha->f() == 1.0F) && (beta == nullptr || beta->f() == 1.0F)) {
      found.bias = bias(node, found.shape[0]);
    }
    return found;
  }

  // `input`: number of the constant input, 0 for W x, 1 for x W^T. The constant exists.
  onnx_weight matmul(const onnx::NodeProto& node, int input) const {
    onnx_weight found{.role = input == 0 ? onnx_role::applied : onnx_role::product, .transposed = input == 1};
    const onnx::TensorProto* const w = constant(node, input);
    if (w->dims_size() != 2) return {.reason = std::to_string(w->dims_size()) + " dimensions"};
    found.shape = {w->dims(1), w->dims(0)};
    if (input == 0) std::swap(found.shape[0], found.shape[1]);
    return found;
  }

  // The layer's gates count as one matrix: they share the rank and the factor `down`.
  onnx_weight gates(const onnx::NodeProto& node) const {
    onnx_weight found{.role = onnx_role::gates};
    const onnx::TensorProto* const w = constant(node, 1);
    if (w == nullptr) return found;
    if (w->dims_size() != 3) return {.reason = std::to_string(w->dims_size()) + " dimensions"};
    found.shape = {w->dims(1), w->dims(2)};
    if (w->dims(0) != 1) found.reason = "a recurrent layer of two directions";
    return found;
  }

  // Returns the name of the node's third input if it is a constant vector of `outputs` elements and of the
  // type of the weight, else an empty name.
  std::string bias(const onnx::NodeProto& node, index_t outputs) const {
    const onnx::TensorProto* const b = constant(node, 2);
    const bool fits = b != nullptr && b->dims_size() == 1 && b->dims(0) == outputs &&
                      b->data_type() == constant(node, 1)->data_type();
    return fits ? node.input(2) : "";
  }

  // Records a use of the constant `input` of node `number`. If an earlier node uses the same constant, the
  // two uses must agree in role, orientation, groups and shape, or else the weight has to stay; a bias is
  // kept only if both nodes add the same one.
  void add(int number, int input, onnx_weight found) {
    const onnx::TensorProto* const tensor = constant(model_.graph().node(number), input);
    if (tensor == nullptr) return;
    found.name = model_.graph().node(number).input(input);
    found.tensor = tensor;
    found.nodes = {number};
    const auto [place, added] = index_.emplace(found.name, weights_.size());
    if (added) {
      weights_.push_back(std::move(found));
      return;
    }
    onnx_weight& known = weights_[place->second];
    known.nodes.push_back(number);
    if (known.reason.empty()) known.reason = found.reason;
    if (known.bias != found.bias) known.bias.clear();
    const bool same = known.role == found.role && known.transposed == found.transposed &&
                      known.groups == found.groups && known.shape == found.shape;
    if (known.reason.empty() && !same) known.reason = "used by nodes of several kinds";
  }

  const onnx::ModelProto& model_;
  const constant_map& constants_;
  std::vector<onnx_weight> weights_;
  std::map<std::string, std::size_t> index_;  // place in weights_ by name
  std::map<std::string, int> uses_;           // number of inputs of nodes, and outputs of the graph, by name
  std::set<std::string> nested_, inputs_;     // names used in subgraphs; names of the graph's inputs
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
