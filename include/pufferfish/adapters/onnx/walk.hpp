// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `onnx_walk` turns the layers of a network into nodes of an ONNX graph. Layers with weights, dense or
/// low-rank, of any kind that has a geometry, need no code of their own; every other type of layer has an
/// `onnx_form` (layer_forms.hpp).

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/onnx/graph.hpp>
#include <pufferfish/nn/containers/any_layer.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A value in the graph that stands for a tensor N x H x W x C of the network. `rows` false: an image
/// [N][C][H][W]. `rows` true: a matrix [N][columns], where H = W = 1; its columns are those of a flattened
/// image of the extents `pixels` (height, width, channels) in the order [channels][height][width] of ONNX.
struct onnx_value {
  std::string name;
  extents<4> shape{};
  bool rows = false;
  extents<3> pixels{1, 1, 1};

  /// Whether the columns have another order than in the network, whose images are [height][width][channels].
  bool reordered() const { return rows && pixels[0] * pixels[1] > 1 && pixels[2] > 1; }
};

/// Writes a layer of type L as ONNX nodes. Specialise this template for a layer of your own, and name the
/// layer in onnx_options::forms:
///
///     template <>
///     struct pufferfish::onnx_form<Square> {
///       static onnx_value write(onnx_walk<float>& to, const std::string& name, Square&, const onnx_value& x)
///       {
///         return to.with(x, to.graph().node("Mul", name, {x.name, x.name}));
///       }
///     };
template <class L>
struct onnx_form;

namespace detail {

/// Appends the attributes kernel_shape, pads and strides of a window that moves over images to the list `to`,
/// and returns the list. ONNX's pads are [top, left, bottom, right].
inline std::vector<onnx_attribute> onnx_window(std::vector<onnx_attribute> to, const size2& kernel,
                                               const size2& stride, const size2& padding) {
  using sizes = std::vector<std::int64_t>;
  to.push_back({"kernel_shape", sizes{kernel.height, kernel.width}});
  to.push_back({"pads", sizes{padding.height, padding.width, padding.height, padding.width}});
  to.push_back({"strides", sizes{stride.height, stride.width}});
  return to;
}

/// Adds a Conv node of the given geometry and returns the name of its output. `inputs`: names of image,
/// weight and, if there is one, bias.
template <class T>
std::string write_conv(onnx_graph<T>& to, const std::string& name, const conv_shape& shape,
                       const std::vector<std::string>& inputs) {
  return to.node(
      "Conv", name, inputs,
      onnx_window({{"dilations", std::vector<std::int64_t>{shape.dilation.height, shape.dilation.width}},
                   {"group", std::int64_t{shape.groups}}},
                  shape.kernel, shape.stride, shape.padding));
}

}  // namespace detail

/// Adds the nodes of layers to a graph, layer by layer. Names of nodes are those of layers, and names of
/// weights are those of parameters, as in weight files.
///
///     onnx_graph<float> graph;
///     const auto forms = onnx_forms<float>();
///     onnx_walk<float> walk(graph, forms);
///     graph.input("x", onnx::TensorProto::FLOAT, {index_t{1}, index_t{3}, index_t{32}, index_t{32}});
///     const onnx_value y = walk.write("conv1", layer, {"x", {1, 32, 32, 3}});
template <class T>
class onnx_walk {
 public:
  using layer_type = any_layer<T>;
  /// A function that writes a layer if the layer has the type that the function is made for, and else returns
  /// nullopt; see onnx_form_of.
  using form = std::function<std::optional<onnx_value>(onnx_walk&, const std::string&, layer_type&,
                                                       const onnx_value&)>;

  /// Makes an object that adds nodes to `graph`. `forms` are tried in order. Graph and forms must outlive the
  /// object.
  onnx_walk(onnx_graph<T>& graph, const std::vector<form>& forms) : graph_(graph), forms_(forms) {}

  /// The graph to which nodes are added.
  onnx_graph<T>& graph() { return graph_; }

  /// Adds the nodes of a layer called `name` with input x. Throws value_error, naming the layer, for a layer
  /// without an ONNX form; shape_error if x does not fit.
  onnx_value write(const std::string& name, layer_type& layer, const onnx_value& x) {
    if (layer.geometry()) return write_weights(name, layer, x);
    for (const form& one : forms_) {
      if (std::optional<onnx_value> y = one(*this, name, layer, x)) return std::move(*y);
    }
    detail::throw_error<value_error>({"write_onnx: layer ", detail::quote_name(name), " (", layer.describe(),
                                      ") has no form in ONNX; onnx_options::forms may define one"});
  }

  /// Returns x with another name, for layers that keep shape and order.
  onnx_value with(onnx_value x, std::string name) const {
    x.name = std::move(name);
    return x;
  }

  /// Returns x as an image [N][C][H][W]. If x is a matrix, adds nodes that make it an image of one pixel,
  /// with the columns as channels in the order of the network.
  onnx_value image(const std::string& name, const onnx_value& x) {
    if (!x.rows) return x;
    const onnx_value plain = in_order(name, x);
    const std::string shape =
        graph_.template constant<std::int64_t>(name + ".shape", {4}, {0, plain.shape[3], 1, 1});
    return {graph_.node("Reshape", name + ".image", {plain.name, shape}), plain.shape};
  }
  /// Returns x as a matrix [N][columns]; adds a node if x is an image. Throws shape_error for an image of
  /// more than one pixel, which a network must flatten by a layer Flatten.
  onnx_value matrix(const std::string& name, const onnx_value& x) {
    if (x.rows) return x;
    if (x.shape[1] * x.shape[2] != 1) {
      detail::throw_error<shape_error>(
          {"write_onnx: layer ", detail::quote_name(name), ": ", x.shape, " is no batch of vectors"});
    }
    return flatten(name, x);
  }
  /// Returns the pixels of an image as columns of a matrix, in the order [channels][height][width]; adds a
  /// node if x is an image.
  onnx_value flatten(const std::string& name, const onnx_value& x) {
    if (x.rows) return x;
    const auto [n, h, w, c] = x.shape;
    return {graph_.node("Flatten", name + ".flatten", {x.name}, {{"axis", std::int64_t{1}}}),
            {n, 1, 1, h * w * c},
            true,
            {h, w, c}};
  }
  /// Returns x with its columns in the order of the network, [height][width][channels]; adds three nodes if
  /// they have another order. Layers that treat columns one by one, such as batch norms, need this.
  onnx_value in_order(const std::string& name, const onnx_value& x) {
    if (!x.reordered()) return x;
    const auto [h, w, c] = x.pixels;
    const auto reshaped = [&](const std::string& from, const std::vector<std::int64_t>& to) {
      const auto size = static_cast<index_t>(to.size());
      const std::string shape = graph_.template constant<std::int64_t>(name + ".shape", {size}, to);
      return graph_.node("Reshape", name + ".reshape", {from, shape});
    };
    const std::string pixels = graph_.node("Transpose", name + ".transpose", {reshaped(x.name, {0, c, h, w})},
                                           {{"perm", std::vector<std::int64_t>{0, 2, 3, 1}}});
    return {reshaped(pixels, {0, h * w * c}), x.shape, true, {1, 1, h * w * c}};
  }

 private:
  // A weight and its bias in the graph.
  struct pair {
    std::vector<tensor_view<T, 4>> parts;  // one per group, [out / groups][in / groups][height][width]
    std::string weight, bias;              // names; no bias: ""
  };

  // Adds one product, or two for a low-rank layer: `down`, then `up` over single pixels with the same groups.
  onnx_value write_weights(const std::string& name, layer_type& layer, const onnx_value& x) {
    const conv_shape shape = *layer.geometry();
    const auto named = [&](const char* last) { return detail::join_name(name, last); };
    const layer_weights<parameter_t<T>> dense = layer.weights(name);
    if (!dense.matrices.empty()) {
      pair one;
      for (const auto& matrix : dense.matrices) one.parts.push_back(detail::writable(matrix.view));
      one.weight = named("weight");
      if (has_bias(dense.biases)) {
        one.bias = graph_.vector(named("bias"), detail::writable(dense.biases.front().view));
      }
      return product(name, shape, one, x, layer.output_shape(x.shape));
    }
    const low_rank_parts<parameter_t<T>> low = layer.low_rank();
    pair down, up;
    for (const auto& factor : low.factors) {
      down.parts.push_back(factor.down);
      up.parts.push_back(factor.up);
    }
    down.weight = named("down.weight");
    up.weight = named("up.weight");
    if (!low.biases.empty() && !low.biases.front().is_null()) {
      up.bias = graph_.vector(named("up.bias"), low.biases.front());
    }
    conv_shape first = shape;
    first.out_channels = shape.groups * down.parts.front().extent(0);
    conv_shape second = conv_shape::square(first.out_channels, shape.out_channels, 1);
    second.groups = shape.groups;
    extents<4> inner = layer.output_shape(x.shape), outer = inner;
    inner[3] = first.out_channels;
    return product(named("up"), second, up, product(named("down"), first, down, x, inner), outer);
  }

  template <class Biases>
  static bool has_bias(const Biases& biases) {
    return !biases.empty() && !biases.front().view.is_null();
  }

  // Adds a product: Gemm if x has one pixel and the kernel is 1 x 1, else Conv. If x was flattened from an
  // image, the columns of the weight are reordered in the file, so that no node has to reorder x.
  onnx_value product(const std::string& name, const conv_shape& shape, const pair& one, const onnx_value& x,
                     const extents<4>& output) {
    const std::vector<index_t> oihw{shape.out_channels, shape.group_inputs(), shape.kernel.height,
                                    shape.kernel.width};
    std::vector<std::string> inputs;
    if (shape.is_pointwise() && x.shape[1] * x.shape[2] == 1) {
      const onnx_value rows = matrix(name, x);
      inputs = {rows.name, graph_.weight(one.weight, {oihw[0], oihw[1]}, {columns_of(one.parts[0], rows)})};
      if (!one.bias.empty()) inputs.push_back(one.bias);
      return {
          graph_.node("Gemm", name, inputs, {{"transB", std::int64_t{1}}}), output, true, {1, 1, output[3]}};
    }
    inputs = {image(name, x).name, graph_.weight(one.weight, oihw, one.parts)};
    if (!one.bias.empty()) inputs.push_back(one.bias);
    return {detail::write_conv(graph_, name, shape, inputs), output};
  }

  // Returns the columns of a weight [out][in][1][1] in the order of x: [out][channels][height][width].
  static tensor_view<T, 4> columns_of(const tensor_view<T, 4>& weight, const onnx_value& x) {
    if (!x.reordered()) return weight;
    const auto [h, w, c] = x.pixels;
    const index_t step = weight.stride(1);
    return {weight.data(), {weight.extent(0), c, h, w}, {weight.stride(0), step, step * w * c, step * c}};
  }

  onnx_graph<T>& graph_;
  const std::vector<form>& forms_;
};

/// Returns the form of layers of type L, which calls onnx_form<L>::write; for layers of other types the
/// function returns nullopt. To be used in onnx_options::forms.
template <class L, class T = typename L::value_type>
typename onnx_walk<T>::form onnx_form_of() {
  return [](onnx_walk<T>& to, const std::string& name, any_layer<T>& layer,
            const onnx_value& x) -> std::optional<onnx_value> {
    L* const inside = layer.template target<L>();
    if (inside == nullptr) return std::nullopt;
    return onnx_form<L>::write(to, name, *inside, x);
  };
}

PUFFERFISH_NAMESPACE_END
