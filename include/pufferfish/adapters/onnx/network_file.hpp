// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `write_onnx` writes a network as an ONNX model; `read_onnx` fills a network from an ONNX model by names,
/// or by order.

#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/onnx/graph_file.hpp>
#include <pufferfish/adapters/onnx/token_forms.hpp>
#include <pufferfish/nn/network.hpp>

PUFFERFISH_NAMESPACE_BEGIN

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

/// Builds the graph of a network; the graph's weights are views of the network's memory. A form of
/// options.forms is preferred to one of the library. Throws the value_error and shape_error of write_onnx.
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
/// writes the network's parameters with the same `options`, converted to T. Other constants are not read, so
/// a model of PyTorch's exporter can be read if it kept the names of the state_dict (without its folding of
/// batch norms). Counters of batches are left as they are.
///
/// Parameters without a constant of their name are paired with constants of other names: in the order in
/// which the nodes of the model and those that write_onnx would write use them, such that shapes, operators
/// and the numbers of the inputs are equal. Constants that are equal in all of these are told apart by their
/// order alone.
///
/// Throws io_error, naming the parameter and its shape, if no constant fits; with both constants, if several
/// do; with both shapes, if a constant of the name has another shape or no floating-point type; and for a
/// file or external data that cannot be read; also the value_error and shape_error of write_onnx. After an
/// error the network is unchanged.
///
/// \code
/// read_onnx("net.onnx", net, {.image = {32, 32, 3}});   // images of 32 x 32 pixels, 3 channels
/// \endcode
template <class T>
void read_onnx(const std::string& path, network<T>& net, const onnx_options<T>& options) {
  net.on_host([&](any_layer<T>&) { detail::read_bindings(detail::onnx_graph_of(net, options), path); });
}

PUFFERFISH_NAMESPACE_END
