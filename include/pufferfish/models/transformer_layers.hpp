// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the layers of a Transformer's two stacks over packed tokens, and memory for their activations.

#include <string>
#include <utility>

#include <pufferfish/models/packed_tokens.hpp>
#include <pufferfish/nn/accounting.hpp>
#include <pufferfish/nn/layers/attention.hpp>
#include <pufferfish/nn/layers/feed_forward.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Memory for the activations of a stack, all of one shape, tokens x width: in training on the tape, which
/// keeps all of them for the backward pass; otherwise two scratch blocks, used alternately.
template <class T, class Device>
class stack_memory {
 public:
  /// `shape`: tokens x width. Context and frame must outlive the object.
  stack_memory(context<Device>& ctx, scratch_frame& frame, const extents<2>& shape)
      : ctx_(&ctx), shape_(shape) {
    if (ctx.training()) return;
    for (tensor_view<T, 2>& block : blocks_) block = frame.template take<T>(shape);
  }
  /// Memory for the next activation, not initialised. In inference the block before the last one is used
  /// again: at most two activations exist.
  tensor_view<T, 2> next() {
    if (ctx_->training()) return ctx_->tape().template push<T>(shape_);
    std::swap(blocks_[0], blocks_[1]);
    return blocks_[0];
  }

 private:
  context<Device>* ctx_;
  extents<2> shape_;
  // In inference: the last activation, and the one before it.
  tensor_view<T, 2> blocks_[2];
};

/// The gradient that is passed down a stack, in two scratch blocks used alternately. now() is the gradient of
/// the output of the part whose backward pass runs next; the caller writes the gradient of the stack's output
/// there first.
template <class T, class Device>
class stack_gradient {
 public:
  /// `shape`: tokens x width. The frame must outlive the object.
  stack_gradient(scratch_frame& frame, const extents<2>& shape)
      : now_(frame.template take<T>(shape)), next_(frame.template take<T>(shape)) {}
  /// The present gradient, tokens x width.
  const tensor_view<T, 2>& now() const { return now_; }
  /// Calls backward(dy, dx) of a part of the stack, then pops the part's output from the tape.
  template <class Backward>
  void through(context<Device>& ctx, Backward&& backward) {
    backward(tensor_view<const T, 2>(now_), next_);
    ctx.tape().template pop<T>(now_.shape());
    std::swap(now_, next_);
  }

 private:
  tensor_view<T, 2> now_, next_;
};

/// Layer of the encoder: y = ffn(attention(x, x, x)), where both parts have a residual connection and a layer
/// norm (Vaswani et al., Attention is all you need, 2017). Part names are those of the paper's PyTorch code.
template <class T, class Device>
struct encoder_layer {
  MultiHeadAttention<T, Device> slf_attn;
  FeedForward<T, Device> pos_ffn;

  /// Computes the output of the layer for the rows x, in memory.next(). Takes two activations from `memory`.
  tensor_view<const T, 2> forward(context<Device>& ctx, const packed_tokens& p, tensor_view<const T, 2> x,
                                  stack_memory<T, Device>& memory) const {
    tensor_view<T, 2> y = memory.next();
    slf_attn.forward(ctx, x, x, {p.runs, p.runs, {}}, y, p.numbers);
    x = y;
    y = memory.next();
    pos_ffn.forward(ctx, x, y, p.numbers);
    return y;
  }
  /// Replaces the gradient of the layer's output by that of its input x; pops both activations.
  void backward(context<Device>& ctx, stack_gradient<T, Device>& gradient) const {
    gradient.through(ctx, [&](const auto& dy, const auto& dx) { pos_ffn.backward(ctx, dy, dx); });
    gradient.through(ctx, [&](const auto& dy, const auto& dx) { slf_attn.backward(ctx, dy, dx); });
  }

  /// Calls f(name, part) for the parts in execution order.
  template <class F>
  void for_each_part(F&& f) {
    f("slf_attn", slf_attn);
    f("pos_ffn", pos_ffn);
  }
};

/// Layer of the decoder: causal self attention, attention to the encoder's output, feed-forward; each with a
/// residual connection and a layer norm.
template <class T, class Device>
struct decoder_layer {
  MultiHeadAttention<T, Device> slf_attn, enc_attn;
  FeedForward<T, Device> pos_ffn;

  /// Computes the output of the layer for the rows x, in memory.next(). Takes three activations from
  /// `memory`. `encoded` is the encoder's output, one row per row of `source`.
  tensor_view<const T, 2> forward(context<Device>& ctx, const packed_tokens& p, tensor_view<const T, 2> x,
                                  const packed_tokens& source, const tensor_view<const T, 2>& encoded,
                                  stack_memory<T, Device>& memory) const {
    tensor_view<T, 2> y = memory.next();
    slf_attn.forward(ctx, x, x, {p.runs, p.runs, {true, {}}}, y, p.numbers);
    x = y;
    y = memory.next();
    enc_attn.forward(ctx, x, encoded, {p.runs, source.runs, {}}, y, p.numbers);
    x = y;
    y = memory.next();
    pos_ffn.forward(ctx, x, y, p.numbers);
    return y;
  }
  /// Replaces the gradient of the layer's output by that of its input x; pops the three activations. The
  /// gradient of the encoder's output is written to dencoded, or added to it if `add` is set.
  void backward(context<Device>& ctx, stack_gradient<T, Device>& gradient, const tensor_view<T, 2>& dencoded,
                bool add) const {
    gradient.through(ctx, [&](const auto& dy, const auto& dx) { pos_ffn.backward(ctx, dy, dx); });
    gradient.through(ctx,
                     [&](const auto& dy, const auto& dx) { enc_attn.backward(ctx, dy, dx, dencoded, add); });
    gradient.through(ctx, [&](const auto& dy, const auto& dx) { slf_attn.backward(ctx, dy, dx); });
  }

  /// Calls f(name, part) for the parts in execution order.
  template <class F>
  void for_each_part(F&& f) {
    f("slf_attn", slf_attn);
    f("enc_attn", enc_attn);
    f("pos_ffn", pos_ffn);
  }
};

/// Calls f(name, part) for each part of each layer, with names like encoder.layer_stack.0.slf_attn.
/// Layers and parts are called in execution order.
template <class Layers, class F>
void for_each_part(Layers& layers, const std::string& stack, F&& f) {
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const std::string layer = join_name(stack, "layer_stack." + std::to_string(i));
    layers[i].for_each_part([&](const char* part, auto& block) { f(join_name(layer, part), block); });
  }
}

/// Collects the cost of the slots of a part for `tokens` tokens; keys and values have `memory` tokens if
/// `cross` is set.
template <class T, class Device>
struct slot_costs final : layer_visitor<T, Device> {
  /// `cost` receives an entry for each slot.
  slot_costs(index_t token_count, index_t memory_tokens, bool from_memory, model_cost& to)
      : tokens(token_count), memory(memory_tokens), cross(from_memory), cost(to) {}
  void on_layer(const std::string& slot, any_layer<T, Device>& layer) override {
    const bool of_memory =
        cross && (slot.find(".w_ks") != std::string::npos || slot.find(".w_vs") != std::string::npos);
    const index_t width = layer.first_matrix().cols;
    cost.layers.push_back(cost_of_layer(slot, layer, {1, of_memory ? memory : tokens, 1, width}, false));
  }
  index_t tokens, memory;
  bool cross;
  model_cost& cost;
};

/// Adds the cost of a stack whose layers see `tokens` tokens, and `memory` tokens of the encoder's output: of
/// each slot, then of the part itself: its norm over `width` features, and products of queries, keys and
/// values. With m keys per query these are tokens m (key width + value width) multiply-adds.
template <class T, class Device, class Layers>
void add_stack_cost(const Layers& layers, const std::string& stack, index_t width, index_t tokens,
                    index_t memory, model_cost& cost) {
  // Visits are not const, but slot_costs changes nothing.
  for_each_part(const_cast<Layers&>(layers), stack, [&](const std::string& name, auto& part) {
    const bool cross = name.ends_with("enc_attn");
    slot_costs<T, Device> slots(tokens, memory, cross, cost);
    part.visit_layers(slots, name);
    index_t products = 0;
    if constexpr (requires { part.shape(); }) {
      products = tokens * (cross ? memory : tokens) * (part.shape().key_width() + part.shape().value_width());
    }
    cost.layers.push_back({name, part.describe(), 2 * width, 0, products, products, 0});
  });
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
