// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: an `onnx_graph` as a file, and the weights of a graph from the constants of a file.

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/onnx/graph.hpp>
#include <pufferfish/adapters/onnx/weight_order.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Version of the operator set "ai.onnx" in which models are written, and of the format (2020). Every ONNX
/// Runtime since 1.8 runs them.
inline constexpr std::int64_t onnx_opset = 13, onnx_ir_version = 7;

namespace detail {

/// Appends the elements of the views to the bytes `to` as FLOAT, view after view, each in the order of its
/// indices. Elements of double are rounded to float.
template <class T>
void append_parts(const std::vector<tensor_view<T, 4>>& parts, std::string& to) {
  for (const tensor_view<T, 4>& part : parts) {
    std::vector<float> elements(static_cast<std::size_t>(part.size()));
    copy(part, tensor_view<float, 4>(elements.data(), part.shape()));
    to.append(reinterpret_cast<const char*>(elements.data()), elements.size() * sizeof(float));
  }
}

/// Returns the ONNX model of a graph, with the weights as initializers, after ONNX's checker has accepted it.
/// `path` names the file in error texts. Throws io_error with the checker's text.
template <class T>
onnx::ModelProto onnx_model_of(const onnx_graph<T>& graph, const std::string& path) {
  onnx::ModelProto model;
  model.set_ir_version(onnx_ir_version);
  model.set_producer_name("pufferfish");
  model.add_opset_import()->set_version(onnx_opset);
  *model.mutable_graph() = graph.proto();
  model.mutable_graph()->set_name("network");
  for (const auto& one : graph.bindings()) {
    onnx::TensorProto& tensor = *model.mutable_graph()->add_initializer();
    describe_tensor(tensor, one.name, onnx::TensorProto::FLOAT, one.shape);
    append_parts(one.parts, *tensor.mutable_raw_data());
  }
  check_onnx(model, path);
  return model;
}

/// Finds constants for those weights of a graph whose name no constant of the model has, and adds them to
/// `constants` under the weights' names. Candidates are constants whose names no weight has; they are paired
/// by shapes in the order of use. Throws the io_error of match_in_order if there is no pairing, or more than
/// one.
template <class T>
void find_unnamed(const onnx_graph<T>& graph, const onnx::GraphProto& model, constant_map& constants,
                  const std::string& path) {
  std::map<std::string, std::vector<index_t>> unnamed, others;
  for (const auto& one : graph.bindings()) {
    if (constants.count(one.name) == 0) unnamed.emplace(one.name, one.shape);
  }
  if (unnamed.empty()) return;
  for (const auto& [name, tensor] : constants) {
    if (floating_dtype(*tensor)) others.emplace(name, shape_of(*tensor));
  }
  for (const auto& one : graph.bindings()) others.erase(one.name);
  const auto uses_in = [](const onnx::GraphProto& nodes, const auto& shapes) {
    std::vector<onnx_use> uses;
    std::set<std::string> seen;
    append_uses(
        nodes,
        [&](const std::string& name) {
          const auto found = shapes.find(name);
          return found == shapes.end() ? nullptr : &found->second;
        },
        seen, uses);
    return uses;
  };
  const std::vector<onnx_use> wanted = uses_in(graph.proto(), unnamed), there = uses_in(model, others);
  const std::vector<std::size_t> found = match_in_order(wanted, there, path);
  for (std::size_t i = 0; i < found.size(); ++i) {
    constants.emplace(wanted[i].name, constants.at(there[found[i]].name));
  }
}

/// Fills the weights of a graph from the constants of the model at `path`: by name, else by order of use. All
/// elements are read and converted to T before the first weight is written, so that after an error no weight
/// is changed. Errors are those of read_onnx.
template <class T>
void read_bindings(const onnx_graph<T>& graph, const std::string& path) {
  const onnx::ModelProto model = read_onnx_model(path);
  constant_map constants = constants_of(model.graph());
  // PyTorch's exporter stores equal tensors once and gives them their other names by Identity nodes.
  for (const auto& node : model.graph().node()) {
    if (node.op_type() != "Identity" || node.input_size() != 1 || node.output_size() != 1) continue;
    const auto same = constants.find(node.input(0));
    if (same != constants.end()) constants.emplace(node.output(0), same->second);
  }
  find_unnamed(graph, model.graph(), constants, path);
  std::vector<std::pair<const typename onnx_graph<T>::binding*, tensor_dtype>> found;
  for (const auto& one : graph.bindings()) {
    const onnx::TensorProto& tensor = *constants.at(one.name);
    const std::vector<index_t> shape = shape_of(tensor);
    if (shape != one.shape) {
      throw_error<io_error>({path, ": ", quote_name(one.name), " has shape ", shape_text(shape),
                             ", the network's has ", shape_text(one.shape)});
    }
    const auto dtype = floating_dtype(tensor);
    if (!dtype) {
      throw_error<io_error>({path, ": ", quote_name(one.name), " has elements of type ", tensor.data_type(),
                             ", not FLOAT, DOUBLE, FLOAT16 or BFLOAT16"});
    }
    found.emplace_back(&one, *dtype);
  }
  std::vector<std::vector<T>> values;
  for (const auto& [one, dtype] : found) {
    const auto bytes = elements_of(*constants.at(one->name), dtype, path);
    values.emplace_back(bytes.size() / size_of(dtype));
    convert_floating<T>(dtype, bytes, std::span<T>(values.back()));
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    const T* from = values[i].data();
    for (const tensor_view<T, 4>& part : found[i].first->parts) {
      copy(tensor_view<const T, 4>(from, part.shape()), part);
      from += part.size();
    }
  }
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
