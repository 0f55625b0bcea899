// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the ONNX forms of libtorch's modules of images and of rows, and of the low-rank ones. `path`,
/// `m` and `x` are those of onnx_exporter::write, as are the errors.

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <pufferfish/adapters/onnx/sequence_forms.hpp>
#include <pufferfish/adapters/torch/onnx_exporter.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

using pufferfish::detail::join_name;

/// Adds y = x weight^T + bias over the last dimension of x and returns y. weight: [out][in]. The nodes are
/// one Gemm if x is a matrix, else MatMul with the weight stored as [in][out], and Add. An empty bias_name:
/// no bias.
inline onnx_tensor write_product(onnx_exporter& to, const std::string& node, const onnx_tensor& x,
                                 const std::string& weight_name, const Tensor& weight,
                                 const std::string& bias_name = "") {
  onnx_tensor y{"", x.shape};
  y.shape.back() = index_t{weight.size(0)};
  if (x.shape.size() == 2) {
    std::vector<std::string> inputs{x.name, to.weight(weight_name, weight)};
    if (!bias_name.empty()) inputs.push_back(bias_name);
    y.name = to.graph().node("Gemm", node, inputs, {{"transB", std::int64_t{1}}});
    return y;
  }
  y.name = to.graph().node("MatMul", node, {x.name, to.weight(weight_name, weight.t())});
  if (!bias_name.empty()) y.name = to.graph().node("Add", node + ".add_bias", {y.name, bias_name});
  return y;
}

/// Adds a dense linear layer, with the parameters' names PATH.weight and PATH.bias.
inline onnx_tensor write_linear(onnx_exporter& to, const std::string& path, const torch::nn::LinearImpl& m,
                                const onnx_tensor& x) {
  to.check(path, m, x, 0, -1, m.options.in_features());
  return write_product(to, path, x, join_name(path, "weight"), m.weight,
                       to.optional_weight(join_name(path, "bias"), m.bias));
}

/// Adds two products, `down` and then `up`, and returns the output.
inline onnx_tensor write_low_rank_linear(onnx_exporter& to, const std::string& path,
                                         const LowRankLinearImpl& m, const onnx_tensor& x) {
  to.check(path, m, x, 0, -1, m.options.in_features());
  const std::string down = join_name(path, "down"), up = join_name(path, "up");
  return write_product(to, up, write_product(to, down, x, down, m.down), up, m.up,
                       to.optional_weight(join_name(path, "bias"), m.bias));
}

/// Adds a Conv node and returns its output. Height and width of the images x must be numbers. An empty
/// bias_name: no bias.
inline onnx_tensor write_convolution(onnx_exporter& to, const std::string& node, const torch::nn::Module& m,
                                     const conv_shape& shape, const onnx_tensor& x, const Tensor& weight,
                                     const std::string& weight_name, const std::string& bias_name) {
  to.check(node, m, x, 4, 1, shape.in_channels);
  const extents<4> y =
      shape.output(extents<4>{1, to.extent(node, m, x, 2), to.extent(node, m, x, 3), shape.in_channels},
                   to.describe(node, m));
  std::vector<std::string> inputs{x.name, to.weight(weight_name, weight)};
  if (!bias_name.empty()) inputs.push_back(bias_name);
  return {pufferfish::detail::write_conv(to.graph(), node, shape, inputs), {x.shape[0], y[3], y[1], y[2]}};
}

/// Adds a dense convolution. Throws the value_error of shape_of for options that Conv does not have here.
inline onnx_tensor write_conv2d(onnx_exporter& to, const std::string& path, const torch::nn::Conv2dImpl& m,
                                const onnx_tensor& x) {
  const conv_shape shape = shape_of(m.options, to.describe(path, m));
  return write_convolution(to, path, m, shape, x, m.weight, join_name(path, "weight"),
                           to.optional_weight(join_name(path, "bias"), m.bias));
}

/// Adds two convolutions with the groups of the layer, `down` and then `up` over single pixels, and returns
/// the output.
inline onnx_tensor write_low_rank_conv2d(onnx_exporter& to, const std::string& path,
                                         const LowRankConv2dImpl& m, const onnx_tensor& x) {
  const std::string down = join_name(path, "down"), up = join_name(path, "up");
  to.check(path, m, x, 4, 1, m.shape().in_channels);
  conv_shape first = m.shape();
  first.out_channels = first.groups * m.rank();
  conv_shape second = conv_shape::square(first.out_channels, m.shape().out_channels, 1);
  second.groups = first.groups;
  const onnx_tensor inner = write_convolution(to, down, m, first, x, m.down, down, "");
  return write_convolution(to, up, m, second, inner, m.up, up,
                           to.optional_weight(join_name(path, "bias"), m.bias));
}

/// Adds a batch normalization with the running statistics, as in eval mode, and returns the output. Constants
/// 1 and 0 stand for weight and bias of a module without affine parameters. Refuses a module without running
/// statistics.
template <class BatchNorm>
onnx_tensor write_batch_norm(onnx_exporter& to, const std::string& path, const BatchNorm& m,
                             const onnx_tensor& x) {
  to.check(path, m, x, std::is_same_v<BatchNorm, torch::nn::BatchNorm2dImpl> ? 4 : 0, 1,
           m.options.num_features());
  if (!m.running_mean.defined()) to.refuse(path, m, "has no running statistics");
  std::vector<std::string> inputs{x.name};
  const auto add = [&](const char* name, const Tensor& values, float missing) {
    const std::string own = join_name(path, name);
    if (values.defined()) {
      inputs.push_back(to.weight(own, values));
      return;
    }
    const std::vector<float> same(static_cast<std::size_t>(m.options.num_features()), missing);
    inputs.push_back(to.graph().constant<float>(own, {m.options.num_features()}, same));
  };
  add("weight", m.weight, 1.0F);
  add("bias", m.bias, 0.0F);
  add("running_mean", m.running_mean, 0.0F);
  add("running_var", m.running_var, 1.0F);
  return {
      to.graph().node("BatchNormalization", path, inputs, {{"epsilon", static_cast<float>(m.options.eps())}}),
      x.shape};
}

/// Adds a layer normalization over the last dimensions, in operators of opset 13, and returns the output.
inline onnx_tensor write_layer_norm(onnx_exporter& to, const std::string& path,
                                    const torch::nn::LayerNormImpl& m, const onnx_tensor& x) {
  const std::vector<std::int64_t>& shape = m.options.normalized_shape();
  std::vector<std::int64_t> axes;
  for (std::size_t d = shape.size(); d > 0; --d) {
    axes.push_back(-static_cast<std::int64_t>(d));
    to.check(path, m, x, 0, axes.back(), shape[shape.size() - d]);
  }
  return {pufferfish::detail::write_normalization(to.graph(), path, x.name, axes, m.options.eps(),
                                                  to.optional_weight(join_name(path, "weight"), m.weight),
                                                  to.optional_weight(join_name(path, "bias"), m.bias)),
          x.shape};
}

/// Adds a node of pooling with windows and returns its output. `window`: kernel, stride, padding and
/// dilation; channels are those of x. With `ceil_mode`, libtorch and ONNX Runtime differ in the last window
/// unless the windows end with the image.
inline onnx_tensor write_pool(onnx_exporter& to, const char* op, const std::string& path,
                              const torch::nn::Module& m, const onnx_tensor& x, conv_shape window,
                              bool ceil_mode, std::vector<onnx_attribute> more) {
  window.in_channels = window.out_channels = to.extent(path, m, x, 1);
  to.check(path, m, x, 4, 1, window.in_channels);
  const extents<4> image{1, to.extent(path, m, x, 2), to.extent(path, m, x, 3), window.in_channels};
  const extents<4> y = window.output(image, to.describe(path, m));
  const auto ends = [](index_t in, index_t out, index_t kernel, index_t stride, index_t padding,
                       index_t dilation) {
    return in + 2 * padding - dilation * (kernel - 1) - 1 == (out - 1) * stride;
  };
  if (ceil_mode && (!ends(image[1], y[1], window.kernel.height, window.stride.height, window.padding.height,
                          window.dilation.height) ||
                    !ends(image[2], y[2], window.kernel.width, window.stride.width, window.padding.width,
                          window.dilation.width))) {
    to.refuse(path, m, "has ceil_mode, and its windows do not end with the image " + to.shape_text(x));
  }
  return {to.graph().node(
              op, path, {x.name},
              pufferfish::detail::onnx_window(std::move(more), window.kernel, window.stride, window.padding)),
          {x.shape[0], y[3], y[1], y[2]}};
}

/// Adds a MaxPool node and returns its output.
inline onnx_tensor write_max_pool(onnx_exporter& to, const std::string& path,
                                  const torch::nn::MaxPool2dImpl& m, const onnx_tensor& x) {
  const auto& o = m.options;
  const conv_shape window{
      0, 0, size_of(*o.kernel_size()), size_of(*o.stride()), size_of(*o.padding()), size_of(*o.dilation())};
  return write_pool(
      to, "MaxPool", path, m, x, window, o.ceil_mode(),
      {{"dilations", std::vector<std::int64_t>{window.dilation.height, window.dilation.width}}});
}

/// Adds an AveragePool node and returns its output. Refuses divisor_override.
inline onnx_tensor write_avg_pool(onnx_exporter& to, const std::string& path,
                                  const torch::nn::AvgPool2dImpl& m, const onnx_tensor& x) {
  const auto& o = m.options;
  if (o.divisor_override()) to.refuse(path, m, "has divisor_override");
  const conv_shape window{0,     0, size_of(*o.kernel_size()), size_of(*o.stride()), size_of(*o.padding()),
                          {1, 1}};
  return write_pool(to, "AveragePool", path, m, x, window, o.ceil_mode(),
                    {{"count_include_pad", std::int64_t{o.count_include_pad() ? 1 : 0}}});
}

/// Adds a node of adaptive pooling, `op` MaxPool or AveragePool, and returns its output: to one pixel by the
/// global operator, else to extents that divide those of the image, where windows of equal size do the same.
/// Refuses other extents, for which windows differ in size.
template <class Module>
onnx_tensor write_adaptive_pool(onnx_exporter& to, const char* op, const std::string& path, const Module& m,
                                const onnx_tensor& x) {
  const auto& wanted = *m.options.output_size();
  to.check(path, m, x, 4, 1, to.extent(path, m, x, 1));
  if (wanted[0] == 1 && wanted[1] == 1) {
    onnx_tensor y = to.node(std::string("Global") + op, path, x);
    y.shape[2] = y.shape[3] = index_t{1};
    return y;
  }
  conv_shape window;
  const auto length = [&](std::size_t axis) {
    const index_t in = to.extent(path, m, x, axis + 2), out = wanted[axis].value_or(in);
    if (out < 1 || in % out != 0) {
      to.refuse(path, m, message({"has an output of ", out, " pixels, which do not divide ", in}));
    }
    return in / out;
  };
  window.kernel = window.stride = {length(0), length(1)};
  return write_pool(to, op, path, m, x, window, false, {});
}

/// Adds a node that joins the dimensions start_dim .. end_dim of x, and returns its output. Extents after
/// end_dim must be numbers.
inline onnx_tensor write_flatten(onnx_exporter& to, const std::string& path, const torch::nn::FlattenImpl& m,
                                 const onnx_tensor& x) {
  const auto rank = static_cast<std::int64_t>(x.shape.size());
  const auto from_start = [&](std::int64_t dim) { return dim < 0 ? dim + rank : dim; };
  const std::int64_t first = from_start(m.options.start_dim()), last = from_start(m.options.end_dim());
  if (first < 0 || last >= rank || first > last) {
    detail::throw_error<shape_error>({to.describe(path, m), ": input ", to.shape_text(x),
                                      " has no dimensions ", m.options.start_dim(), " .. ",
                                      m.options.end_dim()});
  }
  onnx_tensor y{"", {}, x.tokens};
  std::vector<std::int64_t> reshape;
  index_t joined = 1;
  bool free = false;
  for (std::int64_t d = 0; d < rank; ++d) {
    const onnx_axis& axis = x.shape[static_cast<std::size_t>(d)];
    if (d < first || d > last) {
      y.shape.push_back(axis);
      reshape.push_back(d < first ? 0 : to.extent(path, m, x, static_cast<std::size_t>(d)));
      continue;
    }
    if (const auto* length = std::get_if<index_t>(&axis)) joined *= *length;
    free = free || std::holds_alternative<std::string>(axis);
    if (d < last) continue;
    y.shape.push_back(free ? onnx_axis(join_name(path, "joined")) : onnx_axis(joined));
    reshape.push_back(-1);
  }
  y.name =
      first == 1 && last + 1 == rank
          ? to.graph().node("Flatten", path, {x.name}, {{"axis", std::int64_t{1}}})
          : to.graph().node("Reshape", path,
                            {x.name, pufferfish::detail::onnx_list(to.graph(), path + ".shape", reshape)});
  return y;
}

/// The form of a module that is one node of the same shape.
template <class Module>
export_form elementwise_form(const char* op) {
  return export_form_of<Module>([op](onnx_exporter& to, const std::string& path, const Module&,
                                     const onnx_tensor& x) { return to.node(op, path, x); });
}
/// The form of a module that does nothing in eval mode.
template <class Module>
export_form identity_form() {
  return export_form_of<Module>(
      [](onnx_exporter&, const std::string&, const Module&, const onnx_tensor& x) { return x; });
}
/// The form of Softmax and LogSoftmax.
template <class Module>
export_form softmax_form(const char* op) {
  return export_form_of<Module>(
      [op](onnx_exporter& to, const std::string& path, const Module& m, const onnx_tensor& x) {
        return to.node(op, path, x, {{"axis", std::int64_t{m.options.dim()}}});
      });
}

}  // namespace detail
}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
