// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `write_onnx` writes a network as an ONNX model; `read_onnx` fills a network from an ONNX model by names.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/onnx/layer_forms.hpp>
#include <pufferfish/nn/network.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Version of the operator set "ai.onnx" in which models are written, and of the format (2020). Every ONNX
/// Runtime since 1.8 runs them.
inline constexpr std::int64_t onnx_opset = 13, onnx_ir_version = 7;

/// Properties of an ONNX model that a network does not determine.
template <class T>
struct onnx_options {
  /// Height, width and channels of an image.
  extents<3> image{1, 1, 1};
  /// Name of the input, FLOAT [batch][channels][height][width], and of the output.
  std::string input = "input", output = "output";
  /// Name of the axis of free length.
  std::string batch = "batch";
  /// Forms of layers that are not the library's: {onnx_form_of<MyLayer>()}.
  std::vector<typename onnx_walk<T>::form> forms{};
};

namespace detail {

/// The graph of a network; its weights are views of the network's memory.
template <class T>
onnx_graph<T> onnx_graph_of(network<T>& net, const onnx_options<T>& options) {
  std::vector<typename onnx_walk<T>::form> forms = options.forms;
  for (auto& one : onnx_forms<T>()) forms.push_back(std::move(one));
  const auto [h, w, c] = options.image;
  onnx_graph<T> graph;
  graph.input(options.input, onnx::TensorProto::FLOAT, {options.batch, c, h, w});
  onnx_walk<T> walk(graph, forms);
  onnx_value x{options.input, {1, h, w, c}};
  // The walk reads and writes parameters only, as visits of a const network do.
  x = walk.write("", const_cast<any_layer<T>&>(net.root()), x);
  x = walk.in_order(options.output, x);
  if (!x.rows && x.shape[1] * x.shape[2] == 1) x = walk.flatten(options.output, x);
  std::vector<typename onnx_graph<T>::axis> shape{options.batch, x.shape[3]};
  if (!x.rows) shape.insert(shape.end(), {x.shape[1], x.shape[2]});
  graph.output(options.output, x.name, onnx::TensorProto::FLOAT, shape);
  return graph;
}

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

/// Writes a network to `path` as an ONNX model of opset onnx_opset, in inference mode: batch norms use their
/// running statistics, dropout is left out. A factorized layer is two standard nodes, Conv and Conv or Gemm
/// and Gemm, called NAME.down and NAME.up. Weights have the names of the network's parameters.
///
/// The input is [batch][channels][height][width] with free batch; the library's images are
/// [batch][height][width][channels]. The output of N x 1 x 1 x classes is [batch][classes], of an image
/// [batch][channels][height][width]. Columns of a linear layer after a Flatten are reordered in the file,
/// because ONNX flattens [channels][height][width]; they have PyTorch's order there.
///
/// ONNX's checker runs before the file is written. Throws value_error, naming the layer, for a layer without
/// an ONNX form, shape_error for an image that does not fit, io_error if the file cannot be written or has
/// more than 2 GiB. After an error, the file is unchanged.
///
/// \code
/// write_onnx("net.onnx", net, {.image = {32, 32, 3}});
/// \endcode
template <class T>
void write_onnx(const std::string& path, const network<T>& net, const onnx_options<T>& options) {
  const onnx_graph<T> graph = detail::onnx_graph_of(const_cast<network<T>&>(net), options);
  write_file_atomically(path, detail::onnx_bytes(detail::onnx_model_of(graph, path), path));
}

/// Fills a network from the constants of an ONNX model that have the names and shapes with which write_onnx
/// writes the network's parameters, converted to T; `options` as there. Other constants and all nodes of the
/// model are not read, so a model of PyTorch's exporter serves if it kept the names of the state_dict
/// (without its folding of batch norms). Counters of batches are left as they are.
///
/// Throws io_error, naming the parameter and both shapes, if a constant is missing or has another shape or no
/// floating-point type, and for a file or external data that cannot be read; value_error and shape_error as
/// write_onnx. The network is then unchanged.
template <class T>
void read_onnx(const std::string& path, network<T>& net, const onnx_options<T>& options) {
  net.on_host([&](any_layer<T>&) { detail::read_bindings(detail::onnx_graph_of(net, options), path); });
}

PUFFERFISH_NAMESPACE_END
