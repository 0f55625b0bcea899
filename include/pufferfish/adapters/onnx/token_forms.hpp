// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The ONNX forms of layers over tokens in networks: positional encoding, attention, feed-forward, LSTM. The
/// list of all forms.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/onnx/layer_forms.hpp>
#include <pufferfish/adapters/onnx/sequence_forms.hpp>
#include <pufferfish/nn/layers/positional_encoding.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Adds a layer over tokens to a graph of images. `x` [N][C][H][W] is turned to [N][H W][C], the order of the
/// library's memory; write(name) adds the layer's nodes and returns the name of its output [N][H
/// W][channels]; the output is turned back to an image [N][channels][H][W] of the same height and width.
template <class T, class Write>
onnx_value write_tokens(onnx_walk<T>& to, const std::string& name, const onnx_value& x, index_t channels,
                        Write&& write) {
  const auto [n, h, w, c] = x.shape;
  const auto turned = [&](const std::string& value, onnx_ints order) {
    return to.graph().node("Transpose", name + ".transpose", {value}, {{"perm", std::move(order)}});
  };
  const auto reshaped = [&](const std::string& value, const onnx_ints& shape) {
    return to.graph().node("Reshape", name + ".reshape",
                           {value, onnx_list(to.graph(), name + ".shape", shape)});
  };
  const std::string pixels = turned(to.image(name, x).name, {0, 2, 3, 1});
  const std::string y = write(reshaped(pixels, {0, h * w, c}));
  return {turned(reshaped(y, {0, h, w, channels}), {0, 3, 1, 2}), {n, h, w, channels}};
}

/// The form of LSTM and LowRankLSTM over [steps][batch][1][input], from a state of zeros; nullopt for other
/// layers. The length that is free in the model is the number of steps.
template <class T>
std::optional<onnx_value> write_lstm_layer(onnx_walk<T>& to, const std::string& name, any_layer<T>& layer,
                                           const onnx_value& x) {
  if (layer.recurrent() == nullptr) return std::nullopt;
  const extents<4> shape = layer.output_shape(x.shape);
  const index_t batch = x.shape[1], hidden = shape[3];
  return write_tokens(to, name, x, hidden, [&](const std::string& tokens) {
    const std::string zeros = to.graph().template constant<float>(
        name + ".state", {1, batch, hidden}, std::vector<float>(static_cast<std::size_t>(batch * hidden)));
    return write_lstm(to.graph(), name, layer, {tokens, zeros, zeros}).y;
  });
}

}  // namespace detail

/// The form of PositionalEncoding: the rows of its table for positions 0 .. H W - 1 are one constant.
template <class T>
struct onnx_form<PositionalEncoding<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, PositionalEncoding<T>& layer,
                          const onnx_value& input) {
    const auto [n, h, w, c] = layer.output_shape(input.shape);
    const onnx_value x = to.image(name, input);
    std::vector<float> rows;
    for (index_t j = 0; j < c; ++j) {
      for (index_t p = 0; p < h * w; ++p) rows.push_back(static_cast<float>(layer.table()(p, j)));
    }
    const std::string table = to.graph().template constant<float>(name + ".table", {c, h, w}, rows);
    return to.with(x, to.graph().node("Add", name, {x.name, table}));
  }
};

/// The form of MultiHeadAttention in a network: self attention without a mask over the pixels of each image.
template <class T>
struct onnx_form<MultiHeadAttention<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, MultiHeadAttention<T>& layer,
                          const onnx_value& x) {
    const index_t width = layer.output_shape(x.shape)[3];
    return detail::write_tokens(to, name, x, width, [&](const std::string& tokens) {
      detail::onnx_attention<T> form(to.graph(), name, layer);
      return form.attend(tokens, form.project(tokens), "");
    });
  }
};

/// The form of FeedForward, y = norm(x + w_2 relu(w_1 x)), for the pixels of each image.
template <class T>
struct onnx_form<FeedForward<T>> {
  static onnx_value write(onnx_walk<T>& to, const std::string& name, FeedForward<T>& layer,
                          const onnx_value& x) {
    const index_t width = layer.output_shape(x.shape)[3];
    return detail::write_tokens(to, name, x, width, [&](const std::string& tokens) {
      return detail::write_feed_forward(to.graph(), name, layer, tokens);
    });
  }
};

/// Returns the forms of all layers of the library that have no geometry, in the order in which onnx_walk
/// tries them. Layers with a geometry (linear and convolution, dense and factorized) are written by
/// onnx_walk.
template <class T>
std::vector<typename onnx_walk<T>::form> onnx_forms() {
  return {onnx_form_of<Sequential<T>>(),
          onnx_form_of<detail::initialized_sequential<T, device::cpu>>(),
          onnx_form_of<LowRankNormConv<T>>(),
          onnx_form_of<Residual<T>>(),
          onnx_form_of<BatchNorm<T>>(),
          onnx_form_of<ChannelSelect<T>>(),
          onnx_form_of<LayerNorm<T>>(),
          onnx_form_of<ReLU<T>>(),
          onnx_form_of<Tanh<T>>(),
          onnx_form_of<Sigmoid<T>>(),
          onnx_form_of<GELU<T>>(),
          onnx_form_of<GELUTanh<T>>(),
          onnx_form_of<Dropout<T>>(),
          onnx_form_of<Flatten<T>>(),
          onnx_form_of<MaxPool<T>>(),
          onnx_form_of<AvgPool<T>>(),
          onnx_form_of<GlobalAvgPool<T>>(),
          onnx_form_of<PositionalEncoding<T>>(),
          onnx_form_of<MultiHeadAttention<T>>(),
          onnx_form_of<FeedForward<T>>(),
          detail::write_lstm_layer<T>};
}

PUFFERFISH_NAMESPACE_END
