// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: replaces weights of an ONNX model by factors, and the nodes that use them by pairs of nodes.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/onnx/weight_finder.hpp>
#include <pufferfish/weights/tensor_names.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A factor as stored in a weight file: [rows][cols], elements as bytes.
struct onnx_factor {
  index_t rows = 0, cols = 0;  ///< extents of the matrix
  std::vector<std::uint8_t>
      bytes;  ///< elements in row-major order, little-endian, in the dtype of the weight
};

/// Returns the transpose of a matrix [rows][cols] whose elements have `size` bytes.
inline std::vector<std::uint8_t> transposed_bytes(const std::vector<std::uint8_t>& from, index_t rows,
                                                  index_t cols, std::size_t size) {
  std::vector<std::uint8_t> to(from.size());
  for (index_t i = 0; i < rows; ++i) {
    for (index_t j = 0; j < cols; ++j) {
      std::memcpy(to.data() + static_cast<std::size_t>(j * rows + i) * size,
                  from.data() + static_cast<std::size_t>(i * cols + j) * size, size);
    }
  }
  return to;
}

/// Rewrites a model in place: replaces constants by two factors, and each node that uses such a constant by
/// two nodes. Everything else stays as it is, in the same order, with fields that the installed version of
/// ONNX does not know. The model must outlive the object.
///
///     onnx_rewriter rewriter(model);
///     rewriter.replace(weight, down, up);  // for each weight to be factorized
///     rewriter();                          // makes all changes at once
class onnx_rewriter {
 public:
  /// Collects the names of all values and nodes, so that new names are unique.
  explicit onnx_rewriter(onnx::ModelProto& model) : model_(model) {
    const onnx::GraphProto& graph = model.graph();
    for (const auto& one : graph.input()) names_.insert(one.name());
    for (const auto& one : graph.initializer()) names_.insert(one.name());
    for (const auto& node : graph.node()) {
      names_.insert(node.output().begin(), node.output().end());
      node_names_.insert(node.name());
    }
  }

  /// Notes that a weight W is replaced by W = up down, with `down` [groups rank][in...] and `up` [out][rank],
  /// both in the weight's dtype. `weight` must outlive the object. The layouts in the model follow from
  /// weight.role:
  ///
  ///     role                     down                                up
  ///     gemm (transB), applied   [rank][in]                          [out][rank]
  ///     product                  [in][rank]                          [rank][out]
  ///     gates                    [in][rank]                          [1][out][rank]
  ///     conv                     [groups rank][in / groups][kernel]  [out][rank][1]...
  void replace(const onnx_weight& weight, const onnx_factor& down, const onnx_factor& up) {
    change& made = changes_[weight.name];
    made.weight = &weight;
    made.external = is_external(*weight.tensor);
    const std::size_t size = size_of(*floating_dtype(*weight.tensor));
    const auto fill = [&](onnx::TensorProto& tensor, const char* side, std::vector<index_t> shape,
                          const onnx_factor& factor, bool turned) {
      describe_tensor(tensor, free_name(names_, factor_name(weight.name, side)), weight.tensor->data_type(),
                      shape);
      const auto bytes =
          turned ? transposed_bytes(factor.bytes, factor.rows, factor.cols, size) : factor.bytes;
      tensor.set_raw_data(bytes.data(), bytes.size());
    };
    std::vector<index_t> first{down.rows, down.cols}, second{up.rows, up.cols};
    const bool turn_down = weight.role == onnx_role::product || weight.role == onnx_role::gates;
    const bool turn_up = weight.role == onnx_role::product;
    if (turn_down) std::swap(first[0], first[1]);
    if (turn_up) std::swap(second[0], second[1]);
    if (weight.role == onnx_role::gates) second.insert(second.begin(), 1);
    if (weight.role == onnx_role::conv) {
      first = shape_of(*weight.tensor);
      first[0] = down.rows;
      second.resize(first.size(), 1);
    }
    fill(made.down, "down", std::move(first), down, turn_down);
    fill(made.up, "up", std::move(second), up, turn_up);
  }

  /// Makes the changes that replace() has noted. Factors are stored at the place of their weight among the
  /// initializers; those of a weight that was a Constant node are appended. Returns the names of factors
  /// whose weights were external data, which the caller moves to the new file of external data.
  std::set<std::string> operator()() {
    onnx::GraphProto& graph = *model_.mutable_graph();
    std::map<int, const change*> by_node;
    for (const auto& [name, one] : changes_) {
      for (const int node : one.weight->nodes) by_node.emplace(node, &one);
    }
    google::protobuf::RepeatedPtrField<onnx::NodeProto> nodes;
    nodes.Swap(graph.mutable_node());
    std::set<std::string> stored;  // weights that are initializers
    for (const auto& one : graph.initializer()) stored.insert(one.name());
    for (int i = 0; i < nodes.size(); ++i) {
      onnx::NodeProto& node = nodes[i];
      const bool constant = node.op_type() == "Constant" && node.output_size() == 1 &&
                            changes_.count(node.output(0)) > 0 && stored.count(node.output(0)) == 0;
      const auto found = by_node.find(i);
      if (found != by_node.end()) {
        replace_node(node, *found->second, graph);
      } else if (!constant) {
        graph.add_node()->Swap(&node);
      }
    }
    std::set<std::string> external;
    google::protobuf::RepeatedPtrField<onnx::TensorProto> tensors;
    tensors.Swap(graph.mutable_initializer());
    for (onnx::TensorProto& tensor : tensors) {
      const auto found = changes_.find(tensor.name());
      if (found == changes_.end()) {
        graph.add_initializer()->Swap(&tensor);
      } else {
        add_factors(found->second, graph, external);
      }
    }
    for (auto& [name, one] : changes_) {
      if (stored.count(name) == 0) add_factors(one, graph, external);
    }
    replace_inputs(graph);
    return external;
  }

 private:
  // A weight and the two tensors that replace it. `external`: the weight was external data.
  struct change {
    const onnx_weight* weight = nullptr;
    bool external = false;
    onnx::TensorProto down, up;
  };

  // Returns `name`, or the first of name_1, name_2, ... that is not in `used`, and adds it to `used`.
  static std::string free_name(std::set<std::string>& used, const std::string& name) {
    std::string candidate = name;
    for (int n = 1; !used.insert(candidate).second; ++n) candidate = name + "_" + std::to_string(n);
    return candidate;
  }

  // Moves the two factors of a change into the graph.
  void add_factors(change& one, onnx::GraphProto& graph, std::set<std::string>& external) {
    for (onnx::TensorProto* tensor : {&one.down, &one.up}) {
      if (one.external) external.insert(tensor->name());
      factors_.insert(tensor->name());
      graph.add_initializer()->Swap(tensor);
    }
  }

  // Functions for attributes: an attribute that exists already is removed first, so that no name is twice.
  // set_attribute returns a new attribute without type and value.
  static void erase_attribute(onnx::NodeProto& node, const std::string& name) {
    for (int i = node.attribute_size() - 1; i >= 0; --i) {
      if (node.attribute(i).name() == name) node.mutable_attribute()->DeleteSubrange(i, 1);
    }
  }
  static onnx::AttributeProto& set_attribute(onnx::NodeProto& node, const std::string& name) {
    erase_attribute(node, name);
    onnx::AttributeProto& one = *node.add_attribute();
    one.set_name(name);
    return one;
  }
  static void set_int(onnx::NodeProto& node, const std::string& name, std::int64_t value) {
    onnx::AttributeProto& one = set_attribute(node, name);
    one.set_type(onnx::AttributeProto::INT);
    one.set_i(value);
  }

  // Adds the two nodes that replace `node`. Both begin as copies of the node, so that fields unknown to this
  // version of ONNX stay. The bias and the attributes of the result stay with the second node; of a
  // convolution, the window belongs to the first, and the second is 1 x 1.
  void replace_node(const onnx::NodeProto& node, const change& made, onnx::GraphProto& graph) {
    const onnx_weight& weight = *made.weight;
    const std::string between = free_name(names_, node.output(0) + ".down");
    onnx::NodeProto& first = *graph.add_node();
    onnx::NodeProto& second = *graph.add_node();
    second = node;
    if (weight.role == onnx_role::gates) {
      first.set_op_type("MatMul");
      first.add_input(node.input(0));
      first.add_input(made.down.name());
      second.set_input(1, made.up.name());
    } else {
      first = node;
      while (first.input_size() > 2) first.mutable_input()->RemoveLast();
      const int at = weight.role == onnx_role::applied ? 0 : 1;
      first.set_input(at, made.down.name());
      second.set_input(at, made.up.name());
      second.set_name(named(node, ".up"));
    }
    first.set_name(named(node, ".down"));
    first.clear_output();
    first.add_output(between);
    second.set_input(weight.role == onnx_role::applied ? 1 : 0, between);
    if (weight.role == onnx_role::gemm) {
      erase_attribute(first, "beta");
      for (const char* name : {"alpha", "transA"}) erase_attribute(second, name);
      for (onnx::NodeProto* one : {&first, &second}) set_int(*one, "transB", 1);
      if (opset_of(model_) < 11) add_zeros(first, made.down, graph);
    }
    if (weight.role == onnx_role::conv) {
      second.clear_attribute();
      onnx::AttributeProto& kernel = set_attribute(second, "kernel_shape");
      kernel.set_type(onnx::AttributeProto::INTS);
      for (int d = 2; d < weight.tensor->dims_size(); ++d) kernel.add_ints(1);
      if (weight.groups > 1) set_int(second, "group", weight.groups);
    }
  }

  // Adds zeros as the third input of a Gemm, which requires one before opset 11.
  void add_zeros(onnx::NodeProto& first, const onnx::TensorProto& down, onnx::GraphProto& graph) {
    const std::string name = free_name(names_, down.name() + ".zeros");
    onnx::TensorProto& zeros = *graph.add_initializer();
    describe_tensor(zeros, name, down.data_type(), {down.dims(0)});
    zeros.mutable_raw_data()->assign(static_cast<std::size_t>(down.dims(0)) * size_of(*floating_dtype(down)),
                                     '\0');
    factors_.insert(name);  // before version 4 of the format, an input of the graph, too
    first.add_input(name);
    if (opset_of(model_) < 7) set_int(first, "broadcast", 1);
  }

  // Name of a new node: that of the old one with a suffix, or empty if the old node had no name.
  std::string named(const onnx::NodeProto& node, const char* suffix) {
    return node.name().empty() ? "" : free_name(node_names_, node.name() + suffix);
  }

  // Replaces weights by factors in the graph's inputs: before version 4 of the format, every initializer is
  // an input of the graph, too.
  void replace_inputs(onnx::GraphProto& graph) {
    if (model_.ir_version() >= 4) return;
    google::protobuf::RepeatedPtrField<onnx::ValueInfoProto> inputs;
    inputs.Swap(graph.mutable_input());
    for (onnx::ValueInfoProto& one : inputs) {
      if (changes_.count(one.name()) == 0) graph.add_input()->Swap(&one);
    }
    for (const auto& tensor : graph.initializer()) {
      if (factors_.count(tensor.name()) == 0) continue;
      onnx::ValueInfoProto& one = *graph.add_input();
      one.set_name(tensor.name());
      one.mutable_type()->mutable_tensor_type()->set_elem_type(tensor.data_type());
      auto& shape = *one.mutable_type()->mutable_tensor_type()->mutable_shape();
      for (const std::int64_t extent : tensor.dims()) shape.add_dim()->set_dim_value(extent);
    }
  }

  onnx::ModelProto& model_;
  std::map<std::string, change> changes_;  // by the name of the weight
  std::set<std::string> names_, node_names_, factors_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
