// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `token_layer`: the common interface of Embedding and LowRankEmbedding, so that a model's
/// embedding can be a slot (any_layer) that holds either.

#include <concepts>
#include <cstdint>
#include <span>
#include <string>

#include <pufferfish/core/context.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A layer whose input is tokens, and whose matrix may be shared with an output layer (tied). For
/// the contracts of the members see Embedding and LowRankEmbedding. any_layer::tokens() returns the
/// token_layer of a slot.
///
///     const token_layer<float>& table = *slot.tokens();
///     table.forward(ctx, tokens, x);
///     ...
///     // The output: logits = scale W h + b.
///     const auto u = table.output_rows(ctx, frame, h);
///     ops::output_logits<float>(ctx, {u, table.rows(), bias, scale}, logits);
template <class T, class Device = device::cpu>
class token_layer {
 public:
  virtual index_t vocabulary() const = 0;
  virtual index_t width() const = 0;
  /// Rank of the factors; 0 for a dense table.
  virtual index_t rank() const = 0;
  virtual std::string describe() const = 0;

  /// y(n, :) = row tokens[n] of the table, or of the product of both factors. See Embedding::forward.
  virtual void forward(context<Device>& ctx, std::span<const std::int32_t> tokens,
                       const tensor_view<T, 2>& y) const = 0;
  /// Gradient of the table, or of both factors, from the gradient of y.
  virtual void backward(context<Device>& ctx, const tensor_view<const T, 2>& dy) const = 0;

  /// The matrix [vocabulary][depth] that a tied output layer multiplies by: the dense table, whose depth is
  /// the width, or the first factor `down` of a low-rank embedding, whose depth is the rank. The output
  /// layer's input is output_rows(h).
  virtual tensor_view<const T, 2> rows() const = 0;
  /// The parameter that stores rows(); its gradient is weight_gradient(), shaped as rows().
  virtual const parameter<parameter_t<T>>& table() const = 0;
  /// Gradient of rows(), of the same shape.
  virtual tensor_view<parameter_t<T>, 2> weight_gradient() const = 0;
  /// Rows that a tied output layer multiplies with rows(), for the hidden states h (N x width): h itself for
  /// a dense table, otherwise N x rank rows in a block on the tape in training and of `frame` in inference.
  virtual tensor_view<const T, 2> output_rows(context<Device>& ctx, scratch_frame& frame,
                                              const tensor_view<const T, 2>& h) const = 0;
  /// Memory for `drows`, the gradient of output_rows(h): dh for a dense table, otherwise a block of `frame`.
  virtual tensor_view<T, 2> output_row_gradient(scratch_frame& frame, const tensor_view<T, 2>& dh) const = 0;
  /// Ends the backward pass of a tied output layer: computes from `drows`, the gradient of output_rows(h),
  /// the rest of the parameter gradients and dh, the gradient of h (N x width).
  virtual void output_backward(context<Device>& ctx, const tensor_view<const T, 2>& h,
                               const tensor_view<T, 2>& drows, const tensor_view<T, 2>& dh) const = 0;

  /// Parameters of the table or of both factors.
  index_t parameters() const {
    return rank() == 0 ? vocabulary() * width() : rank() * (vocabulary() + width());
  }
  /// Multiply-accumulates of the lookup of one token.
  index_t macs() const { return rank() * width(); }
  /// Multiply-accumulates of a tied output layer for one hidden state.
  index_t output_macs() const { return parameters(); }

 protected:
  token_layer() = default;
  token_layer(const token_layer&) = default;
  token_layer& operator=(const token_layer&) = default;
  ~token_layer() = default;
};

namespace detail {

/// A layer whose input is a list of tokens, such as Embedding.
template <class T, class L, class Device>
concept takes_tokens = requires(const L& layer, context<Device>& ctx, std::span<const std::int32_t> tokens,
                                const tensor_view<T, 2>& y) {
  { layer.vocabulary() } -> std::convertible_to<index_t>;
  layer.forward(ctx, tokens, y);
};

/// The token_layer of a layer in an any_layer; shown() is nullptr for a layer that takes no tokens.
template <class T, class L, class Device>
struct token_part {
  explicit token_part(const L&) {}
  const token_layer<T, Device>* shown() const { return nullptr; }
};

template <class T, class L, class Device>
requires(takes_tokens<T, L, Device>) class token_part<T, L, Device> final : public token_layer<T, Device> {
 public:
  explicit token_part(const L& layer) : layer_(&layer) {}
  const token_layer<T, Device>* shown() const { return this; }

  index_t vocabulary() const override { return layer_->vocabulary(); }
  index_t width() const override { return layer_->width(); }
  index_t rank() const override {
    if constexpr (requires { layer_->rank(); }) {
      return layer_->rank();
    } else {
      return 0;
    }
  }
  std::string describe() const override { return layer_->describe(); }
  void forward(context<Device>& ctx, std::span<const std::int32_t> tokens,
               const tensor_view<T, 2>& y) const override {
    layer_->forward(ctx, tokens, y);
  }
  void backward(context<Device>& ctx, const tensor_view<const T, 2>& dy) const override {
    layer_->backward(ctx, dy);
  }
  tensor_view<const T, 2> rows() const override { return layer_->rows(); }
  const parameter<parameter_t<T>>& table() const override { return layer_->table(); }
  tensor_view<parameter_t<T>, 2> weight_gradient() const override { return layer_->weight_gradient(); }
  tensor_view<const T, 2> output_rows(context<Device>& ctx, scratch_frame& frame,
                                      const tensor_view<const T, 2>& h) const override {
    return layer_->output_rows(ctx, frame, h);
  }
  tensor_view<T, 2> output_row_gradient(scratch_frame& frame, const tensor_view<T, 2>& dh) const override {
    return layer_->output_row_gradient(frame, dh);
  }
  void output_backward(context<Device>& ctx, const tensor_view<const T, 2>& h, const tensor_view<T, 2>& drows,
                       const tensor_view<T, 2>& dh) const override {
    layer_->output_backward(ctx, h, drows, dh);
  }

 private:
  const L* layer_;
};

[[noreturn]] PUFFERFISH_COLD inline void needs_tokens(const std::string& layer) {
  throw_error<state_error>({layer, ": takes tokens, not rows or images: use any_layer::tokens()"});
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
