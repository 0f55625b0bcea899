// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `write_onnx` and `read_onnx` for the language model `lstm_lm` and for the Transformer.

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include <pufferfish/adapters/onnx/network_file.hpp>
#include <pufferfish/adapters/onnx/sequence_forms.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/transformer.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Which part of a Transformer a model computes. Tokens are INT64, all other values FLOAT; B sentences of S
/// source tokens and T target tokens; P tokens decoded before; N is the number of a layer, from 0.
///
///   part     inputs                                        outputs
///   whole    source [B][S], target [B][T]                  logits [B][T][vocabulary]
///   encoder  source [B][S]                                 encoded [B][S][width],
///                                                          memory.N.keys [B][heads][S][key],
///                                                          memory.N.values [B][heads][S][value]
///   decoder  source [B][S], encoded, target [B][T]         logits [B][T][vocabulary]
///   step     source [B][S], memory.N.keys, memory.N.values, logits [B][1][vocabulary],
///            target [B][1], past.N.keys, past.N.values     present.N.keys, present.N.values
///            [B][heads][P][..]                             [B][heads][P + 1][..]
///                                                         present.N.values [B][heads][P + 1][..]
///
/// `step` is the decoder with a cache: `present` is the next step's `past`, and P = 0 in the first step.
/// Padding comes last in a sentence; logits of padding have no meaning.
enum class onnx_part { whole, encoder, decoder, step };

namespace detail {

/// Builds the graph of a language model: inputs tokens [steps][batch], h and c [layers][batch][width];
/// outputs logits [steps][batch][vocabulary], h_out and c_out.
template <class T>
onnx_graph<T> onnx_graph_of(lstm_lm<T>& net) {
  using axes = std::vector<typename onnx_graph<T>::axis>;
  const lstm_lm_options& o = net.options();
  const std::string steps = "steps", batch = "batch";
  const axes state{o.layers, batch, o.width};
  onnx_graph<T> to;
  to.input("tokens", onnx::TensorProto::INT64, {steps, batch});
  for (const char* name : {"h", "c"}) to.input(name, onnx::TensorProto::FLOAT, state);
  std::vector<onnx_table<T>> table;
  std::string y;
  std::vector<std::string> h, c;
  net.parts([&]<class Part>(const std::string& name, Part& part) {
    if constexpr (!std::is_same_v<Part, any_layer<T>>) {
      const std::string products = table.front().logits("decoder", y);
      y = to.node("Add", "decoder.add_bias",
                  {products, to.vector(name, tensor_view<T, 1>(part.data(), {part.size()}))});
    } else if (table.empty()) {
      y = table.emplace_back(to, name, part).look_up(name, "tokens");
    } else {
      const std::string index = onnx_list(to, name + ".number", {static_cast<std::int64_t>(h.size())});
      const auto own = [&](const char* all) { return to.node("Gather", name + "." + all, {all, index}); };
      const onnx_sequence made = write_lstm(to, name, part, {y, own("h"), own("c")});
      y = made.y;
      h.push_back(made.h);
      c.push_back(made.c);
    }
  });
  const auto joined = [&](const std::string& name, const std::vector<std::string>& parts) {
    const std::string all = to.node("Concat", name + ".layers", parts, {{"axis", std::int64_t{0}}});
    to.output(name, all, onnx::TensorProto::FLOAT, state);
  };
  to.output("logits", y, onnx::TensorProto::FLOAT, {steps, batch, o.vocabulary});
  joined("h_out", h);
  joined("c_out", c);
  return to;
}

/// Builds the graph of one part of a Transformer: onnx_transformer<T>(net, part)(). The graph's weights are
/// views of the network, which must outlive it.
template <class T>
class onnx_transformer {
  using axes = std::vector<typename onnx_graph<T>::axis>;

 public:
  /// `net` must outlive the object.
  onnx_transformer(transformer<T>& net, onnx_part part) : net_(net), options_(net.options()), part_(part) {}

  /// Builds the graph and returns it. To be called once.
  onnx_graph<T> operator()() {
    const bool encodes = part_ == onnx_part::whole || part_ == onnx_part::encoder;
    const bool decodes = part_ != onnx_part::encoder;
    to_.input("source", onnx::TensorProto::INT64, {batch_, length_});
    if (part_ == onnx_part::decoder)
      to_.input("encoded", onnx::TensorProto::FLOAT, {batch_, length_, options_.width});
    if (decodes) {
      to_.input(
          "target", onnx::TensorProto::INT64,
          part_ == onnx_part::step ? axes{batch_, index_t{1}} : axes{batch_, std::string("target_length")});
    }
    if (part_ == onnx_part::decoder) encoded_ = "encoded";
    source_mask_ = padding_mask("source");
    net_.parts([&]<class Part>(const std::string& name, Part& part) {
      const bool encoder = name.starts_with("encoder.");
      if constexpr (std::is_same_v<Part, any_layer<T>>) {
        table_.emplace_back(to_, name, part);
      } else if constexpr (std::is_same_v<Part, MultiHeadAttention<T>>) {
        attention(name, part, encoder, encoder ? encodes : decodes);
      } else if (encoder ? encodes : decodes) {
        if constexpr (std::is_same_v<Part, LayerNorm<T>>) {
          start(name, part, encoder ? "source" : "target");
        } else {
          x_ = write_feed_forward(to_, name, part, x_);
        }
      }
      if (encoder && encodes) encoded_ = x_;
    });
    if (part_ == onnx_part::encoder) {
      to_.output("encoded", encoded_, onnx::TensorProto::FLOAT, {batch_, length_, options_.width});
    } else {
      const std::string scaled = to_.node(
          "Mul", "trg_word_prj.scaled",
          {x_, to_.scalar("trg_word_prj.scale", 1.0 / std::sqrt(static_cast<double>(options_.width)))});
      to_.output(
          "logits", table_.front().logits("trg_word_prj", scaled), onnx::TensorProto::FLOAT,
          {batch_,
           part_ == onnx_part::step ? typename onnx_graph<T>::axis(index_t{1}) : std::string("target_length"),
           options_.vocabulary});
    }
    for (const auto& [name, value, shape] : outputs_)
      to_.output(name, value, onnx::TensorProto::FLOAT, shape);
    return std::move(to_);
  }

 private:
  // An output of the graph that is declared after all nodes, so that `logits` is the first output.
  struct output {
    std::string name, value;
    axes shape;
  };

  // Adds the mask [batch][1][1][length] that is -1e30 where a token is padding, else 0, and returns its name;
  // empty if the model has no padding token.
  std::string padding_mask(const std::string& tokens) {
    if (options_.padding == no_token) return "";
    const std::string padding =
        to_.template constant<std::int64_t>(tokens + ".padding", {}, {options_.padding});
    const std::string equal = to_.node("Equal", tokens + ".is_padding", {tokens, padding});
    const std::string mask = blocked(tokens + ".mask", equal);
    return to_.node("Unsqueeze", tokens + ".mask4", {mask, onnx_list(to_, tokens + ".axes", {1, 2})});
  }
  // Adds a mask that is -1e30 where the value `where` is true and else 0. The number is finite, so that a row
  // of only blocked scores has a softmax without NaN.
  std::string blocked(const std::string& name, const std::string& where) {
    return to_.node("Where", name,
                    {where, to_.scalar(name + ".minus", -1e30), to_.scalar(name + ".zero", 0.0)});
  }
  // Adds the extent `axis` of a value, a number of tokens, and returns its name.
  std::string extent(const std::string& name, const std::string& value, std::int64_t axis) {
    const std::string shape = to_.node("Shape", name + ".shape", {value});
    return to_.node("Gather", name + ".extent",
                    {shape, to_.template constant<std::int64_t>(name + ".axis", {}, {axis})});
  }
  // Adds the positions 0, 1, ... of the tokens and returns their name. The target of onnx_part::step has the
  // position P only.
  std::string positions(const std::string& tokens) {
    const auto number = [&](std::int64_t n) {
      return to_.template constant<std::int64_t>(tokens + ".number", {}, {n});
    };
    std::string first = number(0);
    if (part_ == onnx_part::step && tokens == "target") first = extent("target.past", "past.0.keys", 2);
    const std::string end = to_.node("Add", tokens + ".end", {first, extent(tokens + ".length", tokens, 1)});
    return to_.node("Range", tokens + ".positions", {first, end, number(1)});
  }

  // Adds norm(embedding + position) of each token.
  void start(const std::string& name, LayerNorm<T>& norm, const std::string& tokens) {
    const PositionalEncoding<T> encoding(options_.width, options_.positions);
    const auto flat = encoding.table().flat();
    const std::string table =
        to_.template constant<float>(tokens + ".position_table", {options_.positions, options_.width},
                                     std::vector<float>(flat.begin(), flat.end()));
    const std::string places = positions(tokens);
    const std::string rows = to_.node("Gather", tokens + ".encoding", {table, places});
    const std::string words = table_.front().look_up(tokens + ".embedding", tokens);
    if (tokens == "target" && part_ != onnx_part::step) {
      // Query i (row) may not see key j (column) > i.
      const auto turned = [&](std::int64_t axis) {
        return to_.node("Unsqueeze", "target.turned", {places, onnx_list(to_, "target.axis", {axis})});
      };
      causal_mask_ = blocked("target.causal", to_.node("Greater", "target.later", {turned(0), turned(1)}));
      if (const std::string padding = padding_mask("target"); !padding.empty()) {
        causal_mask_ = to_.node("Min", "target.masks", {causal_mask_, padding});
      }
    }
    x_ = write_layer_norm(to_, name, norm, to_.node("Add", tokens + ".start", {words, rows}), false);
  }

  // Adds an attention block of the encoder or decoder. Decoder layers have two blocks, self attention and
  // attention to the encoder's output. A part that does not compute the decoder, onnx_part::encoder, still
  // adds the projections of the second block, which the steps read as memory.N.
  void attention(const std::string& name, MultiHeadAttention<T>& block, bool encoder, bool computes) {
    onnx_attention<T> form(to_, name, block);
    const bool own = name.ends_with("slf_attn");
    const std::string number = std::to_string(layer_ / 2);
    if (!encoder) ++layer_;
    if (part_ == onnx_part::encoder && !encoder && !own) {
      add_outputs("memory." + number, form.project(encoded_), length_);
    }
    if (!computes) return;
    if (encoder) {
      x_ = form.attend(x_, form.project(x_), source_mask_);
    } else if (!own) {
      x_ = form.attend(
          x_, part_ == onnx_part::step ? inputs("memory." + number, length_) : form.project(encoded_),
          source_mask_);
    } else if (part_ == onnx_part::step) {
      const onnx_memory past = inputs("past." + number, "past_length"), now = form.project(x_);
      const auto joined = [&](const std::string& a, const std::string& b) {
        return to_.node("Concat", name + ".present", {a, b}, {{"axis", std::int64_t{2}}});
      };
      const onnx_memory all{joined(past.keys, now.keys), joined(past.values, now.values)};
      add_outputs("present." + number, all, "present_length");
      x_ = form.attend(x_, all, "");
    } else {
      x_ = form.attend(x_, form.project(x_), causal_mask_);
    }
  }
  // The shape of keys or values whose head has `width` elements: [batch][heads][length][width].
  axes memory_shape(const std::string& length, index_t width) const {
    return {batch_, options_.heads, length, width};
  }
  // Declares the inputs STEM.keys and STEM.values of the graph.
  onnx_memory inputs(const std::string& stem, const std::string& length) {
    to_.input(stem + ".keys", onnx::TensorProto::FLOAT, memory_shape(length, options_.key));
    to_.input(stem + ".values", onnx::TensorProto::FLOAT, memory_shape(length, options_.value));
    return {stem + ".keys", stem + ".values"};
  }
  // Notes the outputs STEM.keys and STEM.values of the graph.
  void add_outputs(const std::string& stem, const onnx_memory& memory, const std::string& length) {
    outputs_.push_back({stem + ".keys", memory.keys, memory_shape(length, options_.key)});
    outputs_.push_back({stem + ".values", memory.values, memory_shape(length, options_.value)});
  }

  transformer<T>& net_;
  transformer_options options_;
  onnx_part part_;
  onnx_graph<T> to_;
  std::string batch_ = "batch", length_ = "source_length";
  std::vector<onnx_table<T>> table_;
  std::vector<output> outputs_;
  std::string x_, encoded_, source_mask_, causal_mask_;
  std::size_t layer_ = 0;  // number of attention blocks of the decoder so far
};

}  // namespace detail

/// Writes a language model: inputs tokens INT64 [steps][batch], h and c [layers][batch][width]; outputs
/// logits [steps][batch][vocabulary], h_out and c_out, the state after the last step. A dense LSTM is one
/// LSTM node. A factorized one is two MatMul for the input side of all gates and steps, and a Scan whose
/// steps have two MatMul for the hidden side; an LSTM node cannot hold factors of the hidden side. The table
/// of the embedding is stored once. Errors are those of write_onnx of a network.
///
/// \code
/// write_onnx("lm.onnx", net);  // model<lstm_lm<float>>
/// \endcode
template <class T>
void write_onnx(const std::string& path, const model<lstm_lm<T>>& net) {
  const onnx_graph<T> graph = detail::onnx_graph_of(const_cast<lstm_lm<T>&>(net.root()));
  write_file_atomically(path, detail::onnx_bytes(detail::onnx_model_of(graph, path), path));
}

/// Writes a part of a Transformer to an ONNX model; onnx_part lists inputs and outputs. A linear layer is
/// MatMul and Add, a factorized one MatMul, MatMul and Add. Weights have the names of the network's
/// parameters and are stored transposed, [in][out]. Errors are those of write_onnx of a network.
template <class T>
void write_onnx(const std::string& path, const model<transformer<T>>& net,
                onnx_part part = onnx_part::whole) {
  const onnx_graph<T> graph = detail::onnx_transformer<T>(const_cast<transformer<T>&>(net.root()), part)();
  write_file_atomically(path, detail::onnx_bytes(detail::onnx_model_of(graph, path), path));
}

/// Fills a model from a file with the constants that write_onnx (of the whole model) writes. Errors are those
/// of read_onnx of a network; after an error the model is unchanged.
template <class T>
void read_onnx(const std::string& path, model<lstm_lm<T>>& net) {
  net.on_host([&](lstm_lm<T>& root) { detail::read_bindings(detail::onnx_graph_of(root), path); });
}
/// Fills a Transformer from a file that write_onnx has written with onnx_part::whole. Errors are those of
/// read_onnx of a network; after an error the model is unchanged.
///
/// \code
/// write_onnx("whole.onnx", net);
/// read_onnx("whole.onnx", other);   // other: a model<transformer<float>> of the same options
/// \endcode
template <class T>
void read_onnx(const std::string& path, model<transformer<T>>& net) {
  net.on_host([&](transformer<T>& root) {
    detail::read_bindings(detail::onnx_transformer<T>(root, onnx_part::whole)(), path);
  });
}

PUFFERFISH_NAMESPACE_END
