// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `Embedding`: a table with a row for every token of a vocabulary. The parameter is called `weight`, as in
/// PyTorch.

#include <array>
#include <string>

#include <pufferfish/core/context.hpp>
#include <pufferfish/lowrank/layers/embedding.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/lowrank/traits.hpp>
#include <pufferfish/ops/embedding/embedding.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Maps tokens to rows of `width` numbers: y(n, :) = W(tokens[n], :), with W of shape vocabulary x width. A
/// model that ties its output to the table (the same matrix turns hidden states into logits; Press, Wolf,
/// EACL 2017) writes the table's gradient twice in a step: see `tie`.
///
/// Every pass throws state_error if the layer was moved from. Tokens are stored in the memory of the device
/// that computes. A network's embedding is a slot of its model: see token_layer.
///
/// \code
/// Embedding<float> layer(1000, 64);
/// layer.initialize({1, 1});
/// const std::vector<std::int32_t> tokens{4, 0, 4};
/// tensor<float, 2> y({3, 64});
/// layer.forward(ctx, tokens, y.view());
/// \endcode
template <class T>
class Embedding {
 public:
  using value_type = T;

  /// `padding`: a token whose row gets no gradient from this layer; no_token: none. Throws shape_error if a
  /// size is below 1, value_error for a padding outside the vocabulary.
  /// The table is zero until initialize().
  Embedding(index_t vocabulary, index_t width, std::int32_t padding = no_token)
      : padding_(padding), weight_(checked(vocabulary, width, padding), parameter_role::weight) {}

  /// Number of tokens, and of elements in a row of the table.
  index_t vocabulary() const { return weight_.layout().shape[0]; }
  index_t width() const { return weight_.layout().shape[1]; }
  std::int32_t padding() const { return padding_; }
  bool is_moved_from() const { return weight_.is_moved_from(); }

  /// The table [vocabulary][width] with dense rows, a view of the layer's memory. Writing to it changes the
  /// layer.
  tensor_view<parameter_t<T>, 2> weight() { return {weight_.data(), {vocabulary(), width()}}; }
  tensor_view<const parameter_t<T>, 2> weight() const { return {weight_.data(), {vocabulary(), width()}}; }
  /// The table [vocabulary][width], rounded to the scalar T of the passes if that differs from the
  /// parameter's.
  tensor_view<const T, 2> rows() const { return {weight_.template as<T>(), {vocabulary(), width()}}; }
  /// Gradient of the table, [vocabulary][width]; backward and tied output layers write it.
  tensor_view<parameter_t<T>, 2> weight_gradient() const {
    return {weight_.gradient_data(), {vocabulary(), width()}};
  }
  /// The parameter that stores the table.
  const parameter<parameter_t<T>>& table() const { return weight_; }

  /// Sets the number of layers that write the table's gradient in each backward pass: this one, and
  /// those that share the table.
  void tie(int writers = 2) { weight_.set_writers(writers); }

  /// Rows that a tied output layer multiplies with rows(): h itself, since the table is dense
  /// (LowRankEmbedding returns the product with a factor).
  template <class Device>
  tensor_view<const T, 2> output_rows(context<Device>&, scratch_frame&,
                                      const tensor_view<const T, 2>& h) const {
    return h;
  }
  /// Memory for the gradient of output_rows(h): dh itself, since the table is dense.
  tensor_view<T, 2> output_row_gradient(scratch_frame&, const tensor_view<T, 2>& dh) const { return dh; }
  /// Ends the backward pass of an output layer that shares this table. Call it after the output layer has
  /// written or added its gradient to weight_gradient(). Passes the rows h, which that layer multiplied with
  /// the table, to the context's row_observer, and records the write of the table's gradient
  /// (context::gradient_written).
  template <class Device>
  void output_backward(context<Device>& ctx, const tensor_view<const T, 2>& h, const tensor_view<T, 2>&,
                       const tensor_view<T, 2>&) const {
    ctx.rows()(weight_, row_kind::tied_input, h);
    ctx.gradient_written(weight_);
  }

  std::string describe() const { return detail::message({"Embedding ", vocabulary(), " x ", width()}); }

  /// y: one row of `width` per token, dense. In training, the tokens must stay as they are until
  /// the backward pass. Throws shape_error; value_error for a token outside the vocabulary, with
  /// its position (on a device such a token gives NaNs).
  template <class Device>
  void forward(context<Device>& ctx, std::span<const std::int32_t> tokens, const tensor_view<T, 2>& y) const {
    detail::check_not_moved(*this);
    detail::check_token_rows(*this, tokens.size(), y.shape());
    detail::check_dense(*this, "y", y);
    ops::check_tokens(
        ctx, [this] { return describe(); }, tokens, vocabulary());
    if (ctx.training()) ctx.tape().push_value(*this, tokens);
    ops::embedding_forward<T>(ctx, rows(), tokens, y);
  }

  /// Computes the table's gradient from dy, which has the shape of y. Throws shape_error, and
  /// state_error without a forward pass in training mode.
  /// dW(v, :) = sum of dy(n, :) over all n with tokens[n] = v; the row of the padding token gets nothing.
  /// Sums are in the order of positions. The first write of a step overwrites the whole table's gradient, so
  /// that rows of unused tokens become zero; later writes add to it (see parameter).
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 2>& dy) const {
    const auto tokens = ctx.tape().template pop_value<std::span<const std::int32_t>>(*this);
    detail::check_not_moved(*this);
    detail::check_token_rows(*this, tokens.size(), dy.shape());
    detail::check_dense(*this, "dy", dy);
    ctx.rows()(weight_, row_kind::token,
               tensor_view<const std::int32_t, 2>(tokens.data(), {static_cast<index_t>(tokens.size()), 1}));
    ctx.rows()(weight_, row_kind::output_gradient, dy);
    ops::embedding_backward<T>(ctx, tokens, dy, padding_, weight_gradient(), weight_.accumulate());
    ctx.gradient_written(weight_);
  }

  /// Draws the table from N(0, 1), PyTorch's default.
  void initialize(random_stream random) { fill_normal(weight_.values(), 1.0, random.child("weight")); }

  /// Calls f("weight", table).
  template <class F>
  void visit(F&& f) {
    f("weight", weight_);
  }

 private:
  // Layout of the table, row by row. Throws the errors of check_table.
  static logical_layout checked(index_t vocabulary, index_t width, std::int32_t padding) {
    detail::check_table("Embedding", vocabulary, width, padding);
    return {2, {vocabulary, width, 1, 1}, {width, 1, 0, 0}};
  }

  std::int32_t padding_;
  parameter<parameter_t<T>> weight_;
};

/// An embedding is factorized as its table [vocabulary][width]; its low-rank form keeps the padding token.
template <class T>
struct layer_traits<Embedding<T>> {
  static constexpr layer_kind kind = layer_kind::embedding;
  static std::array<named_view<const parameter_t<T>, 2>, 1> matrices(const Embedding<T>& layer) {
    return {{{"weight", layer.weight()}}};
  }
  static std::int32_t padding(const Embedding<T>& layer) { return layer.padding(); }
};

PUFFERFISH_NAMESPACE_END
