// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: an `onnx_graph` as a file, and the weights of a graph from the constants of a file.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/onnx/graph.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Version of the operator set "ai.onnx" in which models are written, and of the format (2020). Every ONNX
/// Runtime since 1.8 runs them.
inline constexpr std::int64_t onnx_opset = 13, onnx_ir_version = 7;

namespace detail {

/// Appends the elements of the views to `to` as FLOAT, in order.
template <class T>
void append_parts(const std::vector<tensor_view<T, 4>>& parts, std::string& to) {
  for (const tensor_view<T, 4>& part : parts) {
    std::vector<float> elements(static_cast<std::size_t>(part.size()));
    copy(part, tensor_view<float, 4>(elements.data(), part.shape()));
    to.append(reinterpret_cast<const char*>(elements.data()), elements.size() * sizeof(float));
  }
}

/// The model of a graph, with the weights as initializers, checked. `path`: in errors.
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

/// Fills the weights of a graph from the constants of a model; all or none. Errors as read_onnx.
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
  std::vector<std::pair<const typename onnx_graph<T>::binding*, tensor_dtype>> found;
  for (const auto& one : graph.bindings()) {
    const auto entry = constants.find(one.name);
    if (entry == constants.end()) {
      throw_error<io_error>({path, ": the model has no constant ", quote_name(one.name),
                             ", which the network has with shape ", shape_text(one.shape)});
    }
    const std::vector<index_t> shape = shape_of(*entry->second);
    if (shape != one.shape) {
      throw_error<io_error>({path, ": ", quote_name(one.name), " has shape ", shape_text(shape),
                             ", the network's has ", shape_text(one.shape)});
    }
    const auto dtype = floating_dtype(*entry->second);
    if (!dtype) {
      throw_error<io_error>({path, ": ", quote_name(one.name), " has elements of type ",
                             entry->second->data_type(), ", not FLOAT, DOUBLE, FLOAT16 or BFLOAT16"});
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
