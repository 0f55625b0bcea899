// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the ONNX forms of layers over tokens: linear layers, embeddings, LSTMs, attention, feed-forward.
/// Values are [..][features], as in the network.

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/onnx/layer_forms.hpp>
#include <pufferfish/nn/layers/attention.hpp>
#include <pufferfish/nn/layers/feed_forward.hpp>
#include <pufferfish/nn/layers/lstm.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

using onnx_ints = std::vector<std::int64_t>;

/// Adds a constant vector of integers (a shape, axes or indices) and returns its name.
template <class T>
std::string onnx_list(onnx_graph<T>& to, const std::string& name, const onnx_ints& values) {
  return to.template constant<std::int64_t>(name, {static_cast<index_t>(values.size())}, values);
}

/// Throws value_error, naming the layer, for a layer that has no ONNX form.
template <class T>
[[noreturn]] void no_form(const std::string& name, const any_layer<T>& layer) {
  throw_error<value_error>(
      {"write_onnx: layer ", quote_name(name), " (", layer.describe(), ") has no form in ONNX"});
}

/// Adds y = W x + b over the last dimension of x, dense or low-rank, and returns the name of y: one MatMul or
/// two, then Add. Weights have the names of the network's parameters and are stored as [in][out], [in][rank]
/// and [rank][out].
template <class T>
std::string write_linear(onnx_graph<T>& to, const std::string& name, any_layer<T>& layer,
                         const std::string& x) {
  const auto product = [&](const char* part, const std::string& from, const tensor_view<T, 4>& w,
                           const std::string& node) {
    const tensor_view<T, 4> turned = w.permute({1, 0, 2, 3});
    const std::string weight =
        to.weight(join_name(name, part), {turned.extent(0), turned.extent(1)}, {turned});
    return to.node("MatMul", node, {from, weight});
  };
  const auto biased = [&](const char* part, const std::string& from, const tensor_view<T, 1>& bias) {
    if (bias.is_null()) return from;
    return to.node("Add", name + ".add_bias", {from, to.vector(join_name(name, part), bias)});
  };
  const layer_weights<T> dense = layer.weights(name);
  const low_rank_parts<T> low = layer.low_rank();
  if (!layer.geometry() || dense.convolution || std::max(dense.matrices.size(), low.factors.size()) != 1) {
    no_form(name, layer);
  }
  if (!dense.matrices.empty()) {
    const std::string y = product("weight", x, writable(dense.matrices[0].view), name);
    return biased("bias", y, dense.biases.empty() ? tensor_view<T, 1>() : writable(dense.biases[0].view));
  }
  const factor_views<T>& f = low.factors[0];
  const std::string y =
      product("up.weight", product("down.weight", x, f.down, name + ".down"), f.up, name + ".up");
  return biased("up.bias", y, low.biases.empty() ? tensor_view<T, 1>() : low.biases[0]);
}

/// An embedding, and the output layer that is tied to it. Both use the same constants: the table
/// [vocabulary][width], or the thin table [vocabulary][rank] and [width][rank].
template <class T>
class onnx_table {
 public:
  /// Adds the table of the embedding `layer`, dense or low-rank. Throws value_error, naming the layer, for a
  /// layer that is not an embedding.
  onnx_table(onnx_graph<T>& to, const std::string& name, any_layer<T>& layer) : to_(to), name_(name) {
    const layer_weights<T> dense = layer.weights(name);
    const low_rank_parts<T> low = layer.low_rank();
    if (layer.tokens() == nullptr || std::max(dense.matrices.size(), low.factors.size()) != 1) {
      no_form(name, layer);
    }
    const auto add = [&](const char* part, const tensor_view<T, 4>& w) {
      return to.weight(join_name(name, part), {w.extent(0), w.extent(1)}, {w});
    };
    // The matrix of an embedding is the transpose of its table.
    if (!dense.matrices.empty()) {
      rows_ = add("weight", writable(dense.matrices[0].view).permute({1, 0, 2, 3}));
    } else {
      rows_ = add("down.weight", low.factors[0].down.permute({1, 0, 2, 3}));
      up_ = add("up.weight", low.factors[0].up);
    }
  }

  /// Adds the lookup of rows of the table, for tokens [..], and returns the name of the rows [..][width].
  std::string look_up(const std::string& node, const std::string& tokens) {
    const std::string rows = to_.node("Gather", node, {rows_, tokens});
    return up_.empty() ? rows : to_.node("MatMul", node + ".up", {rows, transposed(up_)});
  }
  /// Adds the products of h [..][width] with all rows and returns their name: [..][vocabulary].
  std::string logits(const std::string& node, std::string h) {
    if (!up_.empty()) h = to_.node("MatMul", node + ".up", {h, up_});
    return to_.node("MatMul", node, {h, transposed(rows_)});
  }

 private:
  std::string transposed(const std::string& matrix) {
    return to_.node("Transpose", name_ + ".transpose", {matrix}, {{"perm", onnx_ints{1, 0}}});
  }

  onnx_graph<T>& to_;
  std::string name_, rows_, up_;
};

/// Names of the output [steps][batch][hidden] and the state h, c [1][batch][hidden] of a recurrent layer.
struct onnx_sequence {
  std::string y, h, c;
};

/// The gates of an ONNX LSTM are ordered i, o, f, g; this list has their indices in the library's order i, f,
/// g, o.
inline constexpr std::array<std::size_t, 4> onnx_gates{0, 3, 1, 2};

/// Adds an LSTM node and returns its results. `weights`: names of the input side's matrix
/// [1][4 hidden][input], of the hidden side's, and of both biases [1][8 hidden] or empty. Empty names of
/// states: zeros.
template <class T>
onnx_sequence write_lstm_node(onnx_graph<T>& to, const std::string& name, index_t hidden,
                              const std::array<std::string, 3>& weights, const onnx_sequence& from) {
  std::vector<std::string> inputs{from.y, weights[0], weights[1], weights[2], "", from.h, from.c};
  while (inputs.back().empty()) inputs.pop_back();
  const auto out = to.nodes("LSTM", name, inputs, {{"hidden_size", std::int64_t{hidden}}}, 3);
  return {out[0], out[1], out[2]};
}

/// Adds a dense LSTM as one LSTM node. ONNX adds two biases; the first is the layer's, the second zero.
template <class T>
onnx_sequence write_dense_lstm(onnx_graph<T>& to, const std::string& name, const layer_weights<T>& w,
                               const onnx_sequence& from) {
  const index_t hidden = w.matrices[0].view.extent(0);
  std::vector<tensor_view<T, 4>> input, recurrent, bias;
  for (const std::size_t gate : onnx_gates) {
    input.push_back(writable(w.matrices[gate].view));
    recurrent.push_back(writable(w.matrices[gate + 4].view));
    const tensor_view<T, 1> b = writable(w.biases[gate].view);
    bias.push_back({b.data(), {hidden, 1, 1, 1}, {b.stride(0), 1, 1, 1}});
  }
  const auto add = [&](const char* part, const std::vector<tensor_view<T, 4>>& views) {
    return to.weight(join_name(name, part), {1, 4 * hidden, views[0].extent(1)}, views);
  };
  const std::string b = to.weight(join_name(name, "bias"), {1, 4 * hidden}, bias);
  const std::string zeros = to.template constant<float>(
      name + ".zeros", {1, 4 * hidden}, std::vector<float>(static_cast<std::size_t>(4 * hidden)));
  const std::string both = to.node("Concat", name + ".biases", {b, zeros}, {{"axis", std::int64_t{1}}});
  const std::string input_weight = add("weight_ih", input), hidden_weight = add("weight_hh", recurrent);
  return write_lstm_node(to, name, hidden, {input_weight, hidden_weight, both}, from);
}

/// Names of the weights of a low-rank LSTM; the bias is empty if the layer has none.
struct onnx_lstm_names {
  std::string input_down, input_up, hidden_down, hidden_up, bias;
};

/// Adds a low-rank LSTM. The input side is two MatMul over all steps at once, with the factors of the four
/// gates as batches [4][..]. A Scan node runs the steps: two MatMul of the hidden side, then the gates.
template <class T>
onnx_sequence write_low_rank_lstm(onnx_graph<T>& to, const std::string& name, const onnx_lstm_names& names,
                                  const low_rank_parts<T>& parts, const onnx_sequence& from) {
  const auto factors = [&](const std::string& weight, std::size_t first, bool down, bool steps) {
    std::vector<tensor_view<T, 4>> views;
    for (std::size_t gate = first; gate < first + 4; ++gate) {
      views.push_back((down ? parts.factors[gate].down : parts.factors[gate].up).permute({1, 0, 2, 3}));
    }
    std::vector<index_t> shape{4, views[0].extent(0), views[0].extent(1)};
    if (steps) shape.insert(shape.begin() + 1, 1);
    return to.weight(weight, shape, views);
  };
  const index_t hidden = parts.factors[0].up.extent(0);
  std::vector<tensor_view<T, 4>> biases;
  for (const tensor_view<T, 1>& b : parts.biases) {
    biases.push_back({b.data(), {hidden, 1, 1, 1}, {b.stride(0), 1, 1, 1}});
  }
  const std::string x = to.node("Unsqueeze", name + ".gates", {from.y, onnx_list(to, name + ".axis", {0})});
  const std::string narrow =
      to.node("MatMul", name + ".input.down", {x, factors(names.input_down, 0, true, true)});
  const std::string wide =
      to.node("MatMul", name + ".input.up", {narrow, factors(names.input_up, 0, false, true)});
  std::string z = wide;
  if (!names.bias.empty()) {
    z = to.node("Add", name + ".add_bias", {wide, to.weight(names.bias, {4, 1, 1, hidden}, biases)});
  }

  onnx_graph<T> step;
  const std::vector<typename onnx_graph<T>::axis> state{index_t{1}, std::string("batch"), hidden};
  const std::string own = name + ".step";
  step.input(own + ".h", onnx::TensorProto::FLOAT, state);
  step.input(own + ".c", onnx::TensorProto::FLOAT, state);
  step.input(own + ".z", onnx::TensorProto::FLOAT, {index_t{4}, std::string("batch"), hidden});
  const std::string down =
      step.node("MatMul", own + ".hidden.down", {own + ".h", factors(names.hidden_down, 4, true, false)});
  const std::string up =
      step.node("MatMul", own + ".hidden.up", {down, factors(names.hidden_up, 4, false, false)});
  const auto gates = step.nodes("Split", own + ".split", {step.node("Add", own + ".sum", {up, own + ".z"})},
                                {{"axis", std::int64_t{0}}}, 4);
  const auto apply = [&](const char* op, const std::string& node, const std::vector<std::string>& inputs) {
    return step.node(op, own + "." + node, inputs);
  };
  const std::string i = apply("Sigmoid", "i", {gates[0]}), f = apply("Sigmoid", "f", {gates[1]});
  const std::string g = apply("Tanh", "g", {gates[2]}), o = apply("Sigmoid", "o", {gates[3]});
  const std::string c =
      apply("Add", "new_c", {apply("Mul", "kept", {f, own + ".c"}), apply("Mul", "added", {i, g})});
  const std::string h = apply("Mul", "new_h", {o, apply("Tanh", "tanh", {c})});
  step.output(own + ".h_out", h, onnx::TensorProto::FLOAT, state);
  step.output(own + ".c_out", c, onnx::TensorProto::FLOAT, state);
  step.output(own + ".y_out", h, onnx::TensorProto::FLOAT, state);
  step.proto().set_name(own);

  // Steps first: [4][steps][batch][hidden] is scanned along axis 1.
  const auto out = to.nodes("Scan", name, {from.h, from.c, z},
                            {{"num_scan_inputs", std::int64_t{1}}, {"scan_input_axes", onnx_ints{1}}}, 3);
  onnx::AttributeProto& body = *to.last_node().add_attribute();
  body.set_name("body");
  body.set_type(onnx::AttributeProto::GRAPH);
  *body.mutable_g() = step.proto();
  return {out[2], out[0], out[1]};
}

/// Adds a dense or low-rank LSTM over from.y [steps][batch][input] with the state from.h, from.c
/// [1][batch][hidden], and returns y [steps][batch][hidden] and the last state. Throws value_error, naming
/// the layer, for a layer that is not an LSTM.
template <class T>
onnx_sequence write_lstm(onnx_graph<T>& to, const std::string& name, any_layer<T>& layer,
                         const onnx_sequence& from) {
  const layer_weights<T> dense = layer.weights(name);
  const low_rank_parts<T> low = layer.low_rank();
  if (layer.recurrent() == nullptr || std::max(dense.matrices.size(), low.factors.size()) != 8) {
    no_form(name, layer);
  }
  const auto own = [&](const char* part) { return join_name(name, part); };
  onnx_sequence made = low.factors.empty()
                           ? write_dense_lstm(to, name, dense, from)
                           : write_low_rank_lstm(to, name,
                                                 {own("weight_ih.down"), own("weight_ih.up"),
                                                  own("weight_hh.down"), own("weight_hh.up"), own("bias")},
                                                 low, from);
  made.y = to.node("Squeeze", name + ".steps", {made.y, onnx_list(to, name + ".axis", {1})});
  return made;
}

/// Names of the keys and values of one attention block, [batch][heads][length][width of a head].
struct onnx_memory {
  std::string keys, values;
};

/// The ONNX form of a MultiHeadAttention: y = norm(x + W_o concat(heads)), where a head is softmax(q k^T /
/// sqrt(key width) + mask) v. project() and attend() are separate, because a Transformer's decoder projects
/// the encoder's output once for all target tokens.
template <class T>
class onnx_attention {
 public:
  /// The graph and the block must outlive the object.
  onnx_attention(onnx_graph<T>& to, const std::string& name, MultiHeadAttention<T>& block)
      : to_(to), name_(name), shape_(block.shape()) {
    block.parts([&]<class Part>(const char* part, Part& one) {
      if constexpr (std::is_same_v<Part, LayerNorm<T>>) {
        norm_ = &one;
      } else {
        slots_.push_back({part, &one});
      }
    });
  }

  /// Adds the projections of `memory` [batch][length][model] to keys and values, and returns their names.
  onnx_memory project(const std::string& memory) {
    return {heads(1, memory, shape_.key), heads(2, memory, shape_.value)};
  }
  /// Adds the attention of x [batch][queries][model] to `memory`, and returns the name of y, of the same
  /// shape. `mask` is added to the scores [batch][heads][queries][keys]; empty: no mask.
  std::string attend(const std::string& x, const onnx_memory& memory, const std::string& mask) {
    const std::string q = heads(0, x, shape_.key);
    const std::string turned =
        to_.node("Transpose", name_ + ".keys", {memory.keys}, {{"perm", onnx_ints{0, 1, 3, 2}}});
    const std::string scale = to_.scalar(name_ + ".scale", 1.0 / std::sqrt(static_cast<double>(shape_.key)));
    std::string scores =
        to_.node("Mul", name_ + ".scaled", {to_.node("MatMul", name_ + ".scores", {q, turned}), scale});
    if (!mask.empty()) scores = to_.node("Add", name_ + ".masked", {scores, mask});
    const std::string weights =
        to_.node("Softmax", name_ + ".softmax", {scores}, {{"axis", std::int64_t{-1}}});
    const std::string each = to_.node("Transpose", name_ + ".heads",
                                      {to_.node("MatMul", name_ + ".average", {weights, memory.values})},
                                      {{"perm", onnx_ints{0, 2, 1, 3}}});
    const std::string all = to_.node("Reshape", name_ + ".joined",
                                     {each, onnx_list(to_, name_ + ".shape", {0, 0, shape_.value_width()})});
    const std::string sum = to_.node("Add", name_ + ".residual", {linear(3, all), x});
    return write_layer_norm(to_, join_name(name_, "layer_norm"), *norm_, sum, false);
  }

 private:
  // Adds one of the block's four linear layers: query, key, value or output.
  std::string linear(std::size_t slot, const std::string& x) {
    return write_linear(to_, join_name(name_, slots_[slot].first), *slots_[slot].second, x);
  }
  // Adds a projection and its split into heads, [batch][length][model] -> [batch][heads][length][width].
  std::string heads(std::size_t slot, const std::string& x, index_t width) {
    const std::string name = join_name(name_, slots_[slot].first);
    const std::string split =
        to_.node("Reshape", name + ".split",
                 {linear(slot, x), onnx_list(to_, name + ".shape", {0, 0, shape_.heads, width})});
    return to_.node("Transpose", name + ".turn", {split}, {{"perm", onnx_ints{0, 2, 1, 3}}});
  }

  onnx_graph<T>& to_;
  std::string name_;
  attention_shape shape_;
  std::vector<std::pair<std::string, any_layer<T>*>> slots_;  // query, key, value, output
  LayerNorm<T>* norm_ = nullptr;
};

/// Adds y = norm(x + w_2 relu(w_1 x)) and returns the name of y.
template <class T>
std::string write_feed_forward(onnx_graph<T>& to, const std::string& name, FeedForward<T>& block,
                               const std::string& x) {
  std::string y = x;
  block.parts([&]<class Part>(const char* part, Part& one) {
    const std::string own = join_name(name, part);
    if constexpr (std::is_same_v<Part, LayerNorm<T>>) {
      y = write_layer_norm(to, own, one, to.node("Add", name + ".residual", {y, x}), false);
    } else {
      if (y != x) y = to.node("Relu", name + ".relu", {y});
      y = write_linear(to, own, one, y);
    }
  });
  return y;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
