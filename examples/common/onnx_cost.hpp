// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Multiply-adds, constants and outputs of the nodes of an ONNX model, by ONNX's shape inference.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <exception>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/onnx/weight_finder.hpp>

#pragma push_macro("MAP_TYPE")
#undef MAP_TYPE
#include <onnx/shape_inference/implementation.h>
#pragma pop_macro("MAP_TYPE")

#include "text.hpp"

namespace examples {

using pufferfish::index_t;

/// Shapes of inputs by name.
using onnx_shapes = std::map<std::string, std::vector<index_t>>;

/// A node of the main graph.
struct onnx_node_cost {
  double macs = 0.0;  ///< of all samples
  /// Shapes of the floating-point constants that no earlier node reads.
  std::vector<std::vector<index_t>> constants;
};

/// The nodes of a model in their order; the first one has the constants that only subgraphs read, too.
struct onnx_cost {
  std::vector<onnx_node_cost> nodes;
  double samples = 1.0;  ///< first extent of the first input
  double outputs = 0.0;  ///< floating-point elements of the outputs of all nodes; NaN: a shape is not known
};

namespace detail {

/// Gives each input the shape that `shapes` has for it, else its own. A first extent that is free becomes 1;
/// other free extents have to be known from an input with an extent of the same name. Throws value_error,
/// naming the input, if an extent stays free, a shape has another number of extents, or no input has a name.
class onnx_input_shapes {
 public:
  onnx_input_shapes(onnx::ModelProto& model, const onnx_shapes& shapes)
      : graph_(*model.mutable_graph()), shapes_(shapes) {}

  /// Returns the first extent of the first input; 1 if there is none.
  index_t operator()() {
    std::set<std::string> constants;
    for (const auto& one : graph_.initializer()) constants.insert(one.name());
    std::vector<onnx::ValueInfoProto*> inputs;
    for (auto& one : *graph_.mutable_input()) {
      if (constants.count(one.name()) == 0 && one.type().has_tensor_type()) inputs.push_back(&one);
    }
    std::size_t used = 0;
    for (onnx::ValueInfoProto* const one : inputs) used += set(*one) ? 1U : 0U;
    if (used != shapes_.size())
      throw pufferfish::value_error("--input-shape: the model has " + names(inputs));
    for (onnx::ValueInfoProto* const one : inputs) complete(*one);
    for (auto* const values : {graph_.mutable_value_info(), graph_.mutable_output()}) {
      for (auto& one : *values) rename(one);
    }
    const bool has_extents = !inputs.empty() && shape_of(*inputs[0]).dim_size() > 0;
    return has_extents ? shape_of(*inputs[0]).dim(0).dim_value() : 1;
  }

 private:
  static onnx::TensorShapeProto& shape_of(onnx::ValueInfoProto& value) {
    return *value.mutable_type()->mutable_tensor_type()->mutable_shape();
  }
  static std::string quoted(const onnx::ValueInfoProto& value) {
    return pufferfish::detail::quote_name(value.name());
  }
  static std::string names(const std::vector<onnx::ValueInfoProto*>& inputs) {
    std::string text = "the inputs";
    for (const onnx::ValueInfoProto* const one : inputs) text += " " + quoted(*one);
    return text;
  }

  bool set(onnx::ValueInfoProto& input) {
    const auto found = shapes_.find(input.name());
    if (found == shapes_.end()) return false;
    const bool ranked = input.type().tensor_type().has_shape();
    onnx::TensorShapeProto& shape = shape_of(input);
    while (!ranked && shape.dim_size() < static_cast<int>(found->second.size())) shape.add_dim();
    if (shape.dim_size() != static_cast<int>(found->second.size())) {
      throw pufferfish::value_error(
          format("--input-shape: input %s has %d extents", quoted(input).c_str(), shape.dim_size()));
    }
    for (int d = 0; d < shape.dim_size(); ++d) {
      auto& extent = *shape.mutable_dim(d);
      const index_t wanted = found->second[static_cast<std::size_t>(d)];
      if (extent.has_dim_param()) extents_.emplace(extent.dim_param(), wanted);
      // The shapes that the file has for other values are of the old extent.
      replaced_ = replaced_ || (extent.has_dim_value() && extent.dim_value() != wanted);
      extent.set_dim_value(wanted);
    }
    return true;
  }

  void complete(onnx::ValueInfoProto& input) {
    const auto refuse = [&](const std::string& what) {
      throw pufferfish::value_error(format("input %s has %s; --input-shape NAME=2x3x4 gives it one",
                                           quoted(input).c_str(), what.c_str()));
    };
    if (!input.type().tensor_type().has_shape()) refuse("no shape");
    onnx::TensorShapeProto& shape = shape_of(input);
    for (int d = 0; d < shape.dim_size(); ++d) {
      auto& extent = *shape.mutable_dim(d);
      if (extent.has_dim_value() && extent.dim_value() > 0) continue;
      const std::string name = extent.dim_param();
      if (d == 0 && !name.empty()) extents_.emplace(name, 1);
      const auto known = extents_.find(name);
      if (d > 0 && (name.empty() || known == extents_.end())) refuse(format("no fixed extent %d", d));
      extent.set_dim_value(name.empty() ? 1 : known->second);
    }
  }

  // Replaces the names of extents by numbers in a shape that the file has for a value.
  void rename(onnx::ValueInfoProto& value) {
    if (!value.type().tensor_type().has_shape()) return;
    if (replaced_) {
      value.mutable_type()->mutable_tensor_type()->clear_shape();
      return;
    }
    for (auto& extent : *shape_of(value).mutable_dim()) {
      const auto known = extents_.find(extent.dim_param());
      if (extent.has_dim_param() && known != extents_.end()) extent.set_dim_value(known->second);
    }
  }

  onnx::GraphProto& graph_;
  const onnx_shapes& shapes_;
  std::map<std::string, index_t> extents_;
  bool replaced_ = false;
};

/// Counts the multiply-adds of nodes by the shapes of values.
class onnx_counter {
 public:
  onnx_counter(const onnx::GraphProto& graph, const pufferfish::detail::constant_map& constants)
      : constants_(constants) {
    for (const auto* const values : {&graph.input(), &graph.output(), &graph.value_info()}) {
      for (const auto& one : *values) types_.emplace(one.name(), &one.type().tensor_type());
    }
  }

  /// Conv, and ConvTranspose with its input for y: positions of y times elements of the weight. Gemm and
  /// MatMul: elements of y times summands. LSTM, GRU, RNN: rows of x times elements of both weights.
  double macs(const onnx::NodeProto& node, const onnx::TensorProto& weight) const {
    const std::string& op = node.op_type();
    const int rank = weight.dims_size();
    if (op == "Conv" || op == "ConvTranspose") {
      const std::vector<double> of = extents(node, op == "Conv" ? node.output(0) : node.input(0));
      return of.size() < 2 ? 0.0 : product(of) / of[1] * elements(weight);
    }
    if (op == "Gemm" || op == "MatMul") {
      int summed = rank < 2 ? 0 : rank - 2;
      if (op == "Gemm" && pufferfish::detail::int_of(node, "transB", 0) != 0) summed = 1;
      if (op == "MatMul" && constants_.count(node.input(0)) > 0) summed = rank - 1;
      return summed >= rank
                 ? 0.0
                 : product(extents(node, node.output(0))) * static_cast<double>(weight.dims(summed));
    }
    if (op != "LSTM" && op != "GRU" && op != "RNN") return 0.0;
    const std::vector<double> x = extents(node, node.input(0));
    const auto hidden = constants_.find(node.input_size() > 2 ? node.input(2) : "");
    const double more = hidden == constants_.end() ? 0.0 : elements(*hidden->second);
    return x.size() < 2 ? 0.0 : x[0] * x[1] * (elements(weight) + more);
  }

  /// Elements of an output of a node; 0: no floating-point tensor, NaN: the shape is not known.
  double outputs(const std::string& name) const {
    if (name.empty()) return 0.0;
    const auto found = types_.find(name);
    if (found == types_.end()) return std::numeric_limits<double>::quiet_NaN();
    onnx::TensorProto like;
    like.set_data_type(found->second->elem_type());
    if (!pufferfish::detail::floating_dtype(like)) return 0.0;
    const auto shape = known_extents(name);
    return shape ? product(*shape) : std::numeric_limits<double>::quiet_NaN();
  }

 private:
  static double product(const std::vector<double>& extents) {
    double all = 1.0;
    for (const double one : extents) all *= one;
    return all;
  }
  static double elements(const onnx::TensorProto& tensor) {
    return product({tensor.dims().begin(), tensor.dims().end()});
  }
  std::optional<std::vector<double>> known_extents(const std::string& name) const {
    const auto found = types_.find(name);
    if (found == types_.end() || !found->second->has_shape()) return std::nullopt;
    std::vector<double> extents;
    for (const auto& one : found->second->shape().dim()) {
      if (!one.has_dim_value() || one.dim_value() < 1) return std::nullopt;
      extents.push_back(static_cast<double>(one.dim_value()));
    }
    return extents;
  }
  std::vector<double> extents(const onnx::NodeProto& node, const std::string& name) const {
    const auto known = known_extents(name);
    if (known) return *known;
    throw pufferfish::value_error("node " + pufferfish::detail::describe_node(node) + ": the shape of " +
                                  pufferfish::detail::quote_name(name) +
                                  " is not known; --input-shape may help");
  }

  const pufferfish::detail::constant_map& constants_;
  std::map<std::string, const onnx::TypeProto_Tensor*> types_;
};

}  // namespace detail

/// The cost of the model at `path`. Products with constant weights count, those that factorize_onnx would
/// leave as well; products of two activations, as in attention, and nodes of subgraphs do not. Throws
/// io_error for a file that is no model, and value_error, naming input or node, for shapes that are not
/// known.
inline onnx_cost cost_of_onnx(const std::string& path, const onnx_shapes& shapes) {
  using namespace pufferfish::detail;
  onnx::ModelProto model = read_onnx_model(path);
  check_onnx_order(model.graph(), path);
  onnx_cost cost;
  cost.samples = static_cast<double>(detail::onnx_input_shapes(model, shapes)());
  try {
    onnx::shape_inference::InferShapes(model, onnx::OpSchemaRegistry::Instance(), {false, 0, true});
  } catch (const std::exception& e) {
    throw pufferfish::io_error(path + ": ONNX's shape inference: " + std::string(e.what()).substr(0, 2000));
  }
  const onnx::GraphProto& graph = model.graph();
  const constant_map constants = constants_of(graph);
  const detail::onnx_counter count(graph, constants);
  cost.nodes.resize(static_cast<std::size_t>(std::max(1, graph.node_size())));
  for (const onnx_weight& weight : weight_finder(model, constants)()) {
    for (const int node : weight.nodes)
      cost.nodes[static_cast<std::size_t>(node)].macs += count.macs(graph.node(node), *weight.tensor);
  }
  std::set<std::string> seen;
  const auto add = [&](onnx_node_cost& to, const std::string& name) {
    const auto found = constants.find(name);
    const auto dtype = found == constants.end() ? std::nullopt : floating_dtype(*found->second);
    if (!dtype || !seen.insert(name).second) return;
    byte_size(*found->second, *dtype, path);  // refuses extents without a product
    to.constants.push_back(shape_of(*found->second));
  };
  for (int i = 0; i < graph.node_size(); ++i) {
    for (const std::string& name : graph.node(i).input()) add(cost.nodes[static_cast<std::size_t>(i)], name);
    if (graph.node(i).op_type() == "Constant") continue;
    for (const std::string& name : graph.node(i).output()) cost.outputs += count.outputs(name);
  }
  for (const auto& [name, tensor] : constants) add(cost.nodes.front(), name);
  return cost;
}

}  // namespace examples
