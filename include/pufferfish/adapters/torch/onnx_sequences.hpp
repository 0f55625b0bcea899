// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the ONNX forms of libtorch's embeddings and LSTMs, and of the low-rank ones; the list of all
/// forms.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <pufferfish/adapters/torch/onnx_layers.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// Throws value_error, naming the module, unless x holds tokens.
inline void check_tokens(onnx_exporter& to, const std::string& path, const torch::nn::Module& m,
                         const onnx_tensor& x) {
  if (!x.tokens) to.refuse(path, m, "has tokens as input: set onnx_export_options::tokens");
}

/// Adds a Gather of rows of the table, [..] tokens -> [..][embedding_dim], and returns its output. Refuses
/// max_norm, which changes the table in each call.
inline onnx_tensor write_embedding(onnx_exporter& to, const std::string& path,
                                   const torch::nn::EmbeddingImpl& m, const onnx_tensor& x) {
  check_tokens(to, path, m, x);
  if (m.options.max_norm()) to.refuse(path, m, "has max_norm, which changes the table in each call");
  onnx_tensor y{to.graph().node("Gather", path, {to.weight(join_name(path, "weight"), m.weight), x.name}),
                x.shape};
  y.shape.emplace_back(index_t{m.options.embedding_dim()});
  return y;
}

/// Adds a lookup of rows of the thin table, [..][rank], then their product with `up`, and returns the output
/// [..][embedding_dim].
inline onnx_tensor write_low_rank_embedding(onnx_exporter& to, const std::string& path,
                                            const LowRankEmbeddingImpl& m, const onnx_tensor& x) {
  check_tokens(to, path, m, x);
  const std::string down = join_name(path, "down"), up = join_name(path, "up");
  onnx_tensor rows{to.graph().node("Gather", down, {to.weight(down, m.down), x.name}), x.shape};
  rows.shape.emplace_back(index_t{m.options.rank()});
  return write_product(to, up, rows, up, m.up);
}

/// Adds the layers of an LSTM whose first state is zero, and returns the output of all steps, in the order of
/// dimensions of x. layer(number, name, x) adds the nodes of one layer and returns the name of its output
/// [steps][1][batch][hidden]; x: [steps][batch][input]. Dropout between layers is left out, as in eval mode.
template <class Module, class Layer>
onnx_tensor write_lstm_layers(onnx_exporter& to, const std::string& path, const Module& m,
                              const onnx_tensor& x, Layer&& layer) {
  const auto& o = m.options;
  to.check(path, m, x, 3, 2, o.input_size());
  const auto turned = [&](const std::string& value, const char* node) {
    return o.batch_first() ? to.graph().node("Transpose", join_name(path, node), {value},
                                             {{"perm", std::vector<std::int64_t>{1, 0, 2}}})
                           : value;
  };
  onnx_tensor y{turned(x.name, "steps_first"), {x.shape[0], x.shape[1], index_t{o.hidden_size()}}};
  for (std::int64_t l = 0; l < o.num_layers(); ++l) {
    const std::string name = join_name(path, "l" + std::to_string(l));
    const std::string all = layer(l, name, y.name);
    y.name = to.graph().node("Squeeze", name + ".steps",
                             {all, pufferfish::detail::onnx_list(to.graph(), name + ".axis", {1})});
  }
  y.name = turned(y.name, "batch_first");
  return y;
}

/// Adds one LSTM node with both biases for each layer, and returns the output. The gates are stored in ONNX's
/// order i, o, f, g. Refuses two directions and projections.
inline onnx_tensor write_lstm(onnx_exporter& to, const std::string& path, const torch::nn::LSTMImpl& m,
                              const onnx_tensor& x) {
  if (m.options.bidirectional() || m.options.proj_size() != 0) {
    to.refuse(path, m, "has two directions or a projection");
  }
  const std::int64_t hidden = m.options.hidden_size();
  return write_lstm_layers(
      to, path, m, x, [&](std::int64_t l, const std::string& name, const std::string& input) {
        // Adds a tensor of the layer with its gates in ONNX's order, and returns its name. `which`: 0 and 1
        // for the weights, 2 and 3 for the biases, of the input and the hidden side.
        const auto add = [&](const char* part, std::int64_t which) {
          const std::string own = join_name(path, part + ("_l" + std::to_string(l)));
          const Tensor all = module_traits<torch::nn::LSTMImpl>::tensor(m, l, which);
          std::vector<index_t> shape = all.sizes().vec();
          shape.insert(shape.begin(), 1);
          std::vector<tensor_view<float, 4>> gates;
          for (const std::size_t gate : pufferfish::detail::onnx_gates) {
            gates.push_back(to.view(own, all.narrow(0, static_cast<std::int64_t>(gate) * hidden, hidden)));
          }
          return to.graph().weight(own, shape, gates);
        };
        const std::string input_weight = add("weight_ih", 0), hidden_weight = add("weight_hh", 1);
        std::string biases;
        if (m.options.bias()) {
          const std::string first = add("bias_ih", 2), second = add("bias_hh", 3);
          biases = to.graph().node("Concat", name + ".biases", {first, second}, {{"axis", std::int64_t{1}}});
        }
        return pufferfish::detail::write_lstm_node(to.graph(), name, hidden,
                                                   {input_weight, hidden_weight, biases}, {input, "", ""})
            .y;
      });
}

/// Adds two MatMul nodes for the input side and a Scan node for each layer, as for the library's own low-rank
/// LSTM, and returns the output.
inline onnx_tensor write_low_rank_lstm(onnx_exporter& to, const std::string& path, const LowRankLSTMImpl& m,
                                       const onnx_tensor& x) {
  const auto factors = m.factors();
  const auto biases = m.biases();
  return write_lstm_layers(
      to, path, m, x, [&](std::int64_t l, const std::string& name, const std::string& input) {
        const std::string suffix = "_l" + std::to_string(l);
        const auto own = [&](const std::string& part) { return join_name(path, part); };
        // A layer has eight pairs of factors: the four gates of the input side, then those of the hidden
        // side.
        low_rank_parts<float> parts;
        for (std::size_t i = 0; i < 8; ++i) {
          const factor_tensors& one = factors[static_cast<std::size_t>(8 * l) + i];
          parts.factors.push_back({"", i / 4, to.view(name, one.down), to.view(name, one.up)});
        }
        for (std::size_t i = 0; m.options.bias() && i < 4; ++i) {
          const tensor_view<float, 4> b = to.view(name, biases[static_cast<std::size_t>(4 * l) + i]);
          parts.biases.push_back({b.data(), {b.extent(0)}, {b.stride(0)}});
        }
        onnx_graph<float>& graph = to.graph();
        const auto list = [&](const char* part, std::int64_t value) {
          return pufferfish::detail::onnx_list(graph, name + part, {value});
        };
        // The state of zeros is [1][batch][hidden]. The batch may be free in the model, so it is taken from
        // the input when the model runs.
        const std::string batch = graph.node(
            "Gather", name + ".batch", {graph.node("Shape", name + ".shape", {input}), list(".one", 1)});
        const std::string shape =
            graph.node("Concat", name + ".state_shape",
                       {list(".layers", 1), batch, list(".hidden", m.options.hidden_size())},
                       {{"axis", std::int64_t{0}}});
        const std::string zeros = graph.node("ConstantOfShape", name + ".state", {shape});
        return pufferfish::detail::write_low_rank_lstm(
                   graph, name,
                   {own("weight_ih" + suffix + "_down"), own("weight_ih" + suffix + "_up"),
                    own("weight_hh" + suffix + "_down"), own("weight_hh" + suffix + "_up"),
                    m.options.bias() ? own("bias" + suffix) : std::string()},
                   parts, {input, zeros, zeros})
            .y;
      });
}

/// Returns the forms of all modules that export_onnx knows. Modules that do nothing in eval mode, such as
/// Dropout, add no node.
inline std::vector<export_form> onnx_export_forms() {
  return {sequence_form<torch::nn::SequentialImpl>(),
          export_form_of<torch::nn::LinearImpl>(write_linear),
          export_form_of<LowRankLinearImpl>(write_low_rank_linear),
          export_form_of<torch::nn::Conv2dImpl>(write_conv2d),
          export_form_of<LowRankConv2dImpl>(write_low_rank_conv2d),
          export_form_of<torch::nn::EmbeddingImpl>(write_embedding),
          export_form_of<LowRankEmbeddingImpl>(write_low_rank_embedding),
          export_form_of<torch::nn::LSTMImpl>(write_lstm),
          export_form_of<LowRankLSTMImpl>(write_low_rank_lstm),
          export_form_of<torch::nn::BatchNorm1dImpl>(write_batch_norm<torch::nn::BatchNorm1dImpl>),
          export_form_of<torch::nn::BatchNorm2dImpl>(write_batch_norm<torch::nn::BatchNorm2dImpl>),
          export_form_of<torch::nn::LayerNormImpl>(write_layer_norm),
          export_form_of<torch::nn::MaxPool2dImpl>(write_max_pool),
          export_form_of<torch::nn::AvgPool2dImpl>(write_avg_pool),
          export_form_of<torch::nn::AdaptiveMaxPool2dImpl>(
              [](auto& to, const std::string& path, auto& m, auto& x) {
                return write_adaptive_pool(to, "MaxPool", path, m, x);
              }),
          export_form_of<torch::nn::AdaptiveAvgPool2dImpl>(
              [](auto& to, const std::string& path, auto& m, auto& x) {
                return write_adaptive_pool(to, "AveragePool", path, m, x);
              }),
          export_form_of<torch::nn::FlattenImpl>(write_flatten),
          elementwise_form<torch::nn::ReLUImpl>("Relu"),
          elementwise_form<torch::nn::TanhImpl>("Tanh"),
          elementwise_form<torch::nn::SigmoidImpl>("Sigmoid"),
          export_form_of<torch::nn::LeakyReLUImpl>([](auto& to, const std::string& path, auto& m, auto& x) {
            return to.node("LeakyRelu", path, x, {{"alpha", static_cast<float>(m.options.negative_slope())}});
          }),
          export_form_of<torch::nn::GELUImpl>([](auto& to, const std::string& path, auto& m, auto& x) {
            return onnx_tensor{
                pufferfish::detail::write_gelu(to.graph(), path, x.name, m.options.approximate() == "tanh"),
                x.shape};
          }),
          softmax_form<torch::nn::SoftmaxImpl>("Softmax"),
          softmax_form<torch::nn::LogSoftmaxImpl>("LogSoftmax"),
          identity_form<torch::nn::IdentityImpl>(),
          identity_form<torch::nn::DropoutImpl>(),
          identity_form<torch::nn::Dropout2dImpl>(),
          identity_form<torch::nn::AlphaDropoutImpl>()};
}

}  // namespace detail
}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
