// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::export_onnx` writes a libtorch module as an ONNX model. Needs Debian's libonnx-dev and
/// libprotobuf-dev besides libtorch (docs/onnx.md), so <pufferfish/adapters/torch.hpp> does not include it.

#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/onnx/graph_file.hpp>
#include <pufferfish/adapters/torch/onnx_sequences.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {

/// Properties of an ONNX model that a module does not determine.
struct onnx_export_options {
  /// Shape of the input: numbers, and names of axes of free length: {"batch", 3, 32, 32}. Images need numbers
  /// as height and width.
  std::vector<onnx_axis> shape;
  /// Whether the input is INT64, the tokens of an embedding; else it is FLOAT.
  bool tokens = false;
  /// Names of input and output.
  std::string input = "input", output = "output";
  /// Forms of a program's own modules, and of torch::nn::Functional: {export_form_of<BlockImpl>(write),
  /// sequence_form<StackImpl>()}.
  std::vector<export_form> forms{};
};

/// Writes a module to `path` as an ONNX model of opset onnx_opset (13), in eval mode whatever the module's
/// mode is: batch norms use their running statistics, and dropout adds no node. Elements are FLOAT. Weights
/// have the names of the root's named_parameters() and named_buffers(); nodes have the paths of modules. A
/// LowRankLinear or LowRankConv2d is two nodes, NAME.down and NAME.up.
///
/// Known modules: Sequential, Linear, Conv2d, Embedding and LSTM of torch::nn, the low-rank
/// ones and the slots of this adapter; BatchNorm1d, BatchNorm2d, LayerNorm; MaxPool2d, AvgPool2d,
/// AdaptiveMaxPool2d and AdaptiveAvgPool2d to extents that divide the image's; Flatten, Identity, Dropout,
/// Dropout2d, AlphaDropout; ReLU, LeakyReLU, Tanh, Sigmoid, GELU, Softmax, LogSoftmax. options.forms adds
/// others. The output of an LSTM is that of all steps, from a first state of zeros.
///
/// ONNX's checker runs before the file is written. Throws value_error, with path and type of the module, for
/// a module without a form, for options that ONNX's operators do not have (padding other than zeros,
/// ceil_mode with a partial window, two directions), and for tensors that are sparse, quantized or undefined;
/// shape_error, with path and type of the module, for an input that does not fit; io_error if the file cannot
/// be written or has more than 2 GiB. After an error, the file is unchanged.
///
/// \code
/// host_torch::export_onnx(*net, "net.onnx", {.shape = {"batch", 3, 32, 32}});
/// \endcode
inline void export_onnx(const torch::nn::Module& module, const std::string& path,
                        const onnx_export_options& options) {
  if (options.shape.empty()) detail::throw_error<shape_error>({"export_onnx: the input has no shape"});
  std::vector<export_form> forms = options.forms;
  for (export_form& one : detail::onnx_export_forms()) forms.push_back(std::move(one));
  onnx_exporter to(forms);
  const auto type = [](bool tokens) { return tokens ? onnx::TensorProto::INT64 : onnx::TensorProto::FLOAT; };
  to.graph().input(options.input, type(options.tokens), options.shape);
  const onnx_tensor y = to.write("", module, {options.input, options.shape, options.tokens});
  to.graph().output(options.output, y.name, type(y.tokens), y.shape);
  write_file_atomically(
      path, pufferfish::detail::onnx_bytes(pufferfish::detail::onnx_model_of(to.graph(), path), path));
}

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
