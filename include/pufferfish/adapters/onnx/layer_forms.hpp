// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The ONNX forms of the library's layers without weight matrices: containers, norms, pooling, activations.

#include <cmath>
#include <cstdint>
#include <map>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/onnx/walk.hpp>
#include <pufferfish/models/blocks.hpp>
#include <pufferfish/nn/containers/residual.hpp>
#include <pufferfish/nn/layers/activation.hpp>
#include <pufferfish/nn/layers/batch_norm.hpp>
#include <pufferfish/nn/layers/channel_select.hpp>
#include <pufferfish/nn/layers/dropout.hpp>
#include <pufferfish/nn/layers/flatten.hpp>
#include <pufferfish/nn/layers/layer_norm.hpp>
#include <pufferfish/nn/layers/low_rank_norm_conv.hpp>
#include <pufferfish/nn/layers/pooling.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Returns the vectors of a layer by the names that its visit() passes, such as "weight", "running_mean". The
/// views refer to the layer's own memory.
template <class T, class L>
std::map<std::string, tensor_view<T, 1>> vectors_of(L& layer) {
  std::map<std::string, tensor_view<T, 1>> all;
  layer.visit(
      [&](const char* name, auto& one) { all.emplace(name, tensor_view<T, 1>(one.data(), {one.size()})); });
  return all;
}

/// Adds (x - mean) / sqrt(variance + eps) * weight + bias, with mean and variance over `axes`, and returns
/// its name: LayerNormalization of opset 17 in operators of opset 13. `weight`, `bias`: names of constants
/// that broadcast to x; empty: none.
template <class T>
std::string write_normalization(onnx_graph<T>& to, const std::string& name, const std::string& x,
                                const std::vector<std::int64_t>& axes, double eps, const std::string& weight,
                                const std::string& bias) {
  const auto mean = [&](const std::string& of, const std::string& part) {
    return to.node("ReduceMean", name + part, {of}, {{"axes", axes}});
  };
  const std::string centered = to.node("Sub", name + ".center", {x, mean(x, ".mean")});
  const std::string variance =
      mean(to.node("Pow", name + ".square", {centered, to.scalar(name + ".two", 2.0)}), ".variance");
  const std::string added = to.node("Add", name + ".add_eps", {variance, to.scalar(name + ".eps", eps)});
  std::string y = to.node("Div", name + ".divide", {centered, to.node("Sqrt", name + ".sqrt", {added})});
  if (!weight.empty()) y = to.node("Mul", name + ".scale", {y, weight});
  return bias.empty() ? y : to.node("Add", name, {y, bias});
}

/// Adds a LayerNorm over the channels and returns the name of its output: over axis 1 of x [N][C][H][W] if
/// `image`, else over the last axis. The parameters are stored with the names NAME.weight and NAME.bias.
template <class T>
std::string write_layer_norm(onnx_graph<T>& to, const std::string& name, LayerNorm<T>& layer,
                             const std::string& x, bool image) {
  const std::vector<index_t> shape =
      image ? std::vector<index_t>{layer.features(), 1, 1} : std::vector<index_t>{layer.features()};
  const auto vectors = vectors_of<T>(layer);
  const std::string weight = to.vector(join_name(name, "weight"), vectors.at("weight"), shape);
  const std::string bias = to.vector(join_name(name, "bias"), vectors.at("bias"), shape);
  return write_normalization(to, name, x, {image ? 1 : -1}, layer.eps(), weight, bias);
}

/// Adds y = x / 2 (1 + inner) and returns its name, where inner is erf(x / sqrt 2), or tanh(sqrt(2 / pi) (x +
/// 0.044715 x^3)) if `tanh`: GELU and its approximation (Hendrycks and Gimpel, arXiv:1606.08415). ONNX has a
/// Gelu operator from opset 20 only.
template <class T>
std::string write_gelu(onnx_graph<T>& to, const std::string& name, const std::string& x, bool tanh) {
  const auto scaled = [&](const std::string& part, const std::string& of, double by) {
    return to.node("Mul", name + part, {of, to.scalar(name + part + ".factor", by)});
  };
  std::string inner;
  if (tanh) {
    const std::string cube = to.node("Pow", name + ".cube", {x, to.scalar(name + ".three", 3.0)});
    const std::string sum = to.node("Add", name + ".sum", {x, scaled(".scaled_cube", cube, 0.044715)});
    inner = to.node("Tanh", name + ".tanh", {scaled(".scaled_sum", sum, std::sqrt(2.0 / std::numbers::pi))});
  } else {
    inner = to.node("Erf", name + ".erf", {scaled(".scaled", x, std::sqrt(0.5))});
  }
  const std::string more = to.node("Add", name + ".plus_one", {inner, to.scalar(name + ".one", 1.0)});
  return to.node("Mul", name, {scaled(".half", x, 0.5), more});
}

/// The form of containers that run their layers in order. The output of each layer is the input of the next
/// one; the layers' nodes have the names NAME.LAYER.
template <class L, class T = typename L::value_type>
struct sequence_form {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, Sequential<T>& layers, onnx_value x) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      x = to.write(join_name(name, layers.name(i)), layers[i], x);
    }
    return x;
  }
};

/// Adds a layer that is one node `op` without weights, for x of any shape, and returns its output.
template <class T>
onnx_value write_elementwise(onnx_walk<T>& to, const char* op, const std::string& name, const onnx_value& x) {
  return to.with(x, to.graph().node(op, name, {x.name}));
}

/// Adds a node `op` of pooling with the windows of `layer`, and returns its output. `x` is brought to the
/// layout [N][C][H][W] first. `more`: attributes other than kernel_shape, pads and strides.
template <class T, class L>
onnx_value write_pool(onnx_walk<T>& to, const char* op, const std::string& name, const L& layer,
                      const onnx_value& x, std::vector<onnx_attribute> more = {}) {
  const pool_shape& s = layer.shape();
  more = onnx_window(std::move(more), s.kernel, s.stride, s.padding);
  return {to.graph().node(op, name, {to.image(name, x).name}, more), layer.output_shape(x.shape)};
}

}  // namespace detail

// Containers add no node of their own: the nodes are those of their layers, named NAME.LAYER.
template <class T>
struct onnx_form<Sequential<T>> : detail::sequence_form<Sequential<T>> {};
template <class T>
struct onnx_form<detail::initialized_sequential<T, device::cpu>>
    : detail::sequence_form<detail::initialized_sequential<T, device::cpu>> {};
template <class T>
struct onnx_form<LowRankNormConv<T>> : detail::sequence_form<LowRankNormConv<T>> {};

/// The form of Residual: y = branch(x) + shortcut(x), then ReLU if the block has one. Both sides are brought
/// to the same layout first, because a branch may end in a matrix where the shortcut is an image.
template <class T>
struct onnx_form<Residual<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, Residual<T>& layer,
                          const onnx_value& x) {
    const std::string other = detail::join_name(name, layer.shortcut_name());
    onnx_value branch = detail::sequence_form<Sequential<T>>::write(to, name, layer.branch(), x);
    onnx_value shortcut = detail::sequence_form<Sequential<T>>::write(to, other, layer.shortcut(), x);
    branch = to.in_order(name, branch);
    shortcut = to.in_order(other, shortcut);
    if (branch.rows != shortcut.rows) {
      branch = to.matrix(name, branch);
      shortcut = to.matrix(other, shortcut);
    }
    const std::string sum =
        to.graph().node("Add", detail::join_name(name, "add"), {branch.name, shortcut.name});
    return to.with(branch,
                   layer.relu() ? to.graph().node("Relu", detail::join_name(name, "relu"), {sum}) : sum);
  }
};

/// The form of BatchNorm in inference: y = (x - running mean) / sqrt(running variance + eps) weight + bias.
template <class T>
struct onnx_form<BatchNorm<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, BatchNorm<T>& layer,
                          const onnx_value& input) {
    const onnx_value x = to.in_order(name, input);
    const auto vectors = detail::vectors_of<T>(layer);
    std::vector<std::string> inputs{x.name};
    for (const char* part : {"weight", "bias", "running_mean", "running_var"}) {
      inputs.push_back(to.graph().vector(detail::join_name(name, part), vectors.at(part)));
    }
    return to.with(x, to.graph().node("BatchNormalization", name, inputs,
                                      {{"epsilon", static_cast<float>(layer.eps())}}));
  }
};

/// The form of ChannelSelect, which keeps a list of channels: a Gather along axis 1, where both images and
/// matrices have their channels.
template <class T>
struct onnx_form<ChannelSelect<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, ChannelSelect<T>& layer,
                          const onnx_value& input) {
    const onnx_value x = to.in_order(name, input);
    const std::vector<index_t> channels = layer.channels();
    const std::vector<std::int64_t> list(channels.begin(), channels.end());
    const std::string indices =
        to.graph().template constant<std::int64_t>(name + ".channels", {layer.out_channels()}, list);
    return {to.graph().node("Gather", name, {x.name, indices}, {{"axis", std::int64_t{1}}}),
            layer.output_shape(x.shape),
            x.rows,
            {1, 1, layer.out_channels()}};
  }
};

/// The form of LayerNorm over the channels of an image or the columns of a matrix.
template <class T>
struct onnx_form<LayerNorm<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, LayerNorm<T>& layer,
                          const onnx_value& input) {
    const onnx_value x = to.in_order(name, input);
    return to.with(x, detail::write_layer_norm(to.graph(), name, layer, x.name, !x.rows));
  }
};

// The forms of activations: one standard node each, except for the two forms of GELU.
template <class T>
struct onnx_form<ReLU<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, ReLU<T>&, const onnx_value& x) {
    return detail::write_elementwise(to, "Relu", name, x);
  }
};
template <class T>
struct onnx_form<Tanh<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, Tanh<T>&, const onnx_value& x) {
    return detail::write_elementwise(to, "Tanh", name, x);
  }
};
template <class T>
struct onnx_form<Sigmoid<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, Sigmoid<T>&, const onnx_value& x) {
    return detail::write_elementwise(to, "Sigmoid", name, x);
  }
};
template <class T>
struct onnx_form<GELU<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, GELU<T>&, const onnx_value& x) {
    return to.with(x, detail::write_gelu(to.graph(), name, x.name, false));
  }
};
template <class T>
struct onnx_form<GELUTanh<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, GELUTanh<T>&, const onnx_value& x) {
    return to.with(x, detail::write_gelu(to.graph(), name, x.name, true));
  }
};
/// The form of Dropout: it does nothing in inference and adds no node.
template <class T>
struct onnx_form<Dropout<T>> {
  static onnx_value write(onnx_walk<T>&, const std::string&, Dropout<T>&, const onnx_value& x) { return x; }
};

/// The form of Flatten. ONNX flattens [C][H][W] where the library flattens [H][W][C]; onnx_value::pixels
/// records the difference, and the next linear layer reorders its columns.
template <class T>
struct onnx_form<Flatten<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, Flatten<T>&, const onnx_value& x) {
    return to.flatten(name, x);
  }
};
// The forms of pooling: padding is excluded from maxima, and counted in averages as the layer says. The
// output of GlobalAvgPool is [N][C][1][1].
template <class T>
struct onnx_form<MaxPool<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, MaxPool<T>& layer, const onnx_value& x) {
    return detail::write_pool(to, "MaxPool", name, layer, x);
  }
};
template <class T>
struct onnx_form<AvgPool<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, AvgPool<T>& layer, const onnx_value& x) {
    return detail::write_pool(to, "AveragePool", name, layer, x,
                              {{"count_include_pad", std::int64_t{layer.counts_padding() ? 1 : 0}}});
  }
};
template <class T>
struct onnx_form<GlobalAvgPool<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, GlobalAvgPool<T>& layer,
                          const onnx_value& x) {
    return {to.graph().node("GlobalAveragePool", name, {to.image(name, x).name}),
            layer.output_shape(x.shape)};
  }
};

PUFFERFISH_NAMESPACE_END
