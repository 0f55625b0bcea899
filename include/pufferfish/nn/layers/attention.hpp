// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `MultiHeadAttention`: the attention block of a Transformer, with replaceable projections.

#include <array>
#include <span>
#include <vector>

#include <pufferfish/nn/containers/slot.hpp>
#include <pufferfish/nn/layers/key_value_cache.hpp>
#include <pufferfish/nn/layers/layer_norm.hpp>
#include <pufferfish/nn/layers/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Sizes and probabilities of a MultiHeadAttention.
struct attention_options {
  attention_shape shape;           ///< widths; the defaults are those of the Transformer: 512, 8 heads of 64
  double dropout = 0.1;            ///< dropout probability of the output, before the residual sum
  double attention_dropout = 0.1;  ///< dropout probability of the attention weights
  double eps = 1e-6;               ///< eps of the layer norm
};

/// y = norm(x + dropout(fc(attention(w_qs x, w_ks m, w_vs m)))) over vectors of `model` elements; m is x
/// (self attention) or other vectors (cross attention) (Vaswani et al.: "Attention is all you need", NIPS
/// 2017, sections 3.1 and 3.2; normalisation after the sum, as there). No biases.
///
/// w_qs, w_ks, w_vs and fc are slots: factorize() replaces them by LowRankLinear layers, the concatenated
/// projections of all heads at once. State: w_qs.weight, w_ks.weight, w_vs.weight, fc.weight,
/// layer_norm.weight, layer_norm.bias.
///
/// In each head, with queries q and keys k of d = shape().key elements and values v of shape().value
/// elements:
///
///     attention(i) = sum over j of softmax over j (q(i) k(j) / sqrt(d)) v(j)
///
/// over the keys j of the query's sequence that the mask allows. Results do not depend on the number of
/// threads. In training, attention weights take memory proportional to queries x keys x heads on the CPU's
/// tape. A pass of a block that was moved from throws state_error.
///
/// \code
/// MultiHeadAttention<float> layer({.shape = attention_shape::split(64, 4)});
/// const std::vector<index_t> first{0, 4}, count{4, 3};  // two sequences in 8 rows, the second one shorter
/// const token_runs runs{2, first.data(), count.data()};
/// tensor<float, 2> x({8, 64}), y(x.shape());
/// layer.forward(ctx, x, x, {runs, runs, {true, {}}}, y.view());  // causal self attention
/// \endcode
template <class T, class Device = device::cpu>
class MultiHeadAttention : public detail::layer_of_parts<MultiHeadAttention<T, Device>, T, Device> {
 public:
  using value_type = T;
  using layer_type = any_layer<T, Device>;

  /// Throws shape_error for a size below 1, value_error for a dropout probability outside [0, 1) and an eps
  /// that is not positive. Parameters are zero, the layer norm is the identity, until initialize().
  explicit MultiHeadAttention(const attention_options& options)
      : options_(checked(options)),
        core_{options.shape, Linear<T>(options.shape.model, options.shape.key_width(), false),
              Linear<T>(options.shape.model, options.shape.key_width(), false),
              Linear<T>(options.shape.model, options.shape.value_width(), false),
              Linear<T>(options.shape.value_width(), options.shape.model, false)},
        norm_(options.shape.model, options.eps) {
    core_.set_dropout(options.attention_dropout);
  }

  /// The options given to the constructor, and the sizes among them.
  const attention_options& options() const { return options_; }
  const attention_shape& shape() const { return options_.shape; }
  bool is_moved_from() const { return norm_.is_moved_from(); }
  std::string describe() const { return "MultiHeadAttention " + shape().describe(); }

  /// x: rows of queries; memory: rows for keys and values (x itself for self attention); both `model`
  /// wide and cut into sequences by `batch`. y: shaped as x, overlaps nothing. In training, x, memory
  /// and the batch's arrays must not change until the backward pass. `numbers`: row numbers of x for
  /// dropout (see ops::row_dropout); nullptr: consecutive, from the first row of the context's first
  /// sample. A query that may see no key attends to zeros: y = norm(x). Throws shape_error.
  void forward(context<Device>& ctx, const tensor_view<const T, 2>& x, const tensor_view<const T, 2>& memory,
               const attention_batch& batch, const tensor_view<T, 2>& y,
               const std::uint64_t* numbers = nullptr) const {
    detail::check_not_moved(*this);
    detail::check_dense(*this, "x", x);
    detail::check_dense(*this, "the memory", memory);
    detail::check_dense(*this, "y", y);
    if (!ctx.training()) {
      core_.forward(ctx, x, memory, batch, y);
      return norm_.forward_sum(ctx, y, x, {}, y);
    }
    const tensor_view<T, 2> z = ctx.tape().template push<T>(x.shape());
    core_.forward(ctx, x, memory, batch, z);
    ops::row_dropout dropout{options_.dropout, ctx.next_random_stream(), 0, numbers};
    dropout.first_row = static_cast<std::uint64_t>(
        batch.queries.sequences == 0 ? 0 : ctx.first_sample() * (x.extent(0) / batch.queries.sequences));
    norm_.forward_sum(ctx, z, x, dropout, y);
    ctx.tape().push_value(*this, x.data() == memory.data());
  }

  /// Computes from dy the gradients of all parameters, of x (dx, overwritten) and of the memory (dmemory,
  /// overwritten or added to). dx and dmemory may be null views. In self attention dx is the sum of both,
  /// and dmemory is unused. Throws shape_error, and state_error without a forward pass in training mode.
  /// dx, shaped as x, may be dy. Sequences of the batch must not share keys.
  void backward(context<Device>& ctx, const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dx,
                const tensor_view<T, 2>& dmemory = {}, bool add_memory = false) const {
    const bool self = ctx.tape().template pop_value<bool>(*this);
    detail::check_not_moved(*this);
    detail::check_dense(*this, "dy", dy);
    detail::check_dense_if_wanted(*this, "dx", dx);
    detail::check_dense_if_wanted(*this, "dmemory", dmemory);
    scratch_frame frame(ctx.scratch());
    const tensor_view<T, 2> dz = frame.take<T>(dy.shape());
    norm_.backward_sum(ctx, dy, dx, dz);
    core_.backward(ctx, dz, dx, !dx.is_null(), self ? dx : dmemory, add_memory);
    ctx.tape().template pop<T>(dy.shape());
  }

  /// Computes keys (memory rows x key_width()) and values (memory rows x value_width()) of a memory, for
  /// attend(). Throws state_error in training mode, shape_error if the shapes do not fit.
  void project(context<Device>& ctx, const tensor_view<const T, 2>& memory, const tensor_view<T, 2>& keys,
               const tensor_view<T, 2>& values) const {
    require_inference(ctx);
    detail::check_dense(*this, "the memory", memory);
    detail::check_dense(*this, "keys", keys);
    detail::check_dense(*this, "values", values);
    detail::projection<layer_type>::template forward<T>(ctx, core_.slots[1], memory, keys);
    detail::projection<layer_type>::template forward<T>(ctx, core_.slots[2], memory, values);
  }

  /// Inference pass with keys and values that are computed already, by project(). Each row of x is a sequence
  /// of one query; row i attends to run i of `runs`. keys and values have dense rows at any stride. y is
  /// shaped as x and overlaps no input. Throws state_error in training mode, shape_error if the shapes do not
  /// fit.
  void attend(context<Device>& ctx, const tensor_view<const T, 2>& x, const tensor_view<const T, 2>& keys,
              const tensor_view<const T, 2>& values, const token_runs& runs,
              const tensor_view<T, 2>& y) const {
    require_inference(ctx);
    detail::check_dense(*this, "x", x);
    detail::check_dense_rows(*this, "keys", keys);
    detail::check_dense_rows(*this, "values", values);
    detail::check_dense(*this, "y", y);
    scratch_frame frame(ctx.scratch());
    const index_t rows = x.extent(0);
    auto* single = frame.take<index_t>(2 * rows);
    const token_runs queries = ops::make_runs(ctx, rows, 1, nullptr, single, single + rows);
    core_.forward_cached(ctx, x, keys, values, {queries, runs, {}}, y);
    norm_.forward_sum(ctx, y, x, {}, y);
  }

  /// Causal self attention of one more token per row: the keys and values of x are appended to the cache, and
  /// x attends to all of them. x, y: one row of `model` elements per row of the cache, whose widths must be
  /// key_width() and value_width(). Throws state_error in training mode, shape_error if the shapes do not fit
  /// or the cache is full.
  void step(context<Device>& ctx, const tensor_view<const T, 2>& x, key_value_cache<T, Device>& cache,
            const tensor_view<T, 2>& y) const {
    require_inference(ctx);
    detail::check_dense(*this, "x", x);
    scratch_frame frame(ctx.scratch());
    const tensor_view<T, 2> keys = frame.take<T>(extents<2>{x.extent(0), shape().key_width()});
    const tensor_view<T, 2> values = frame.take<T>(extents<2>{x.extent(0), shape().value_width()});
    project(ctx, x, keys, values);
    cache.append(ctx, keys, values);
    attend(ctx, x, cache.keys(), cache.values(), cache.runs(ctx, frame), y);
  }

  /// Shape of y for the layer as a layer of images: `input` itself, N x H x W x model. Throws shape_error for
  /// another number of channels.
  extents<4> output_shape(const extents<4>& input) const {
    if (input[3] != shape().model) {
      detail::throw_error<shape_error>({describe(), ": input ", input, " has vectors of ", input[3]});
    }
    return input;
  }
  /// Self attention without mask over the H W tokens of each image. x, y: N x H x W x model, dense; y
  /// overlaps nothing. In training the tape also keeps two indices for each image. Throws shape_error.
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    detail::check_forward(*this, x, y);
    scratch_frame frame(ctx.scratch());
    const index_t n = x.extent(0);
    auto* rows = ctx.training() ? ctx.tape().template push<index_t>(2 * n) : frame.take<index_t>(2 * n);
    const token_runs runs = ops::make_runs(ctx, n, x.extent(1) * x.extent(2), nullptr, rows, rows + n);
    const tensor_view<const T, 2> flat = detail::rows_of(x);
    forward(ctx, flat, flat, {runs, runs, {}}, detail::rows_of(y));
    if (ctx.training()) ctx.tape().push_value(*this, n);
  }
  /// Backward pass of forward for images. dy, dx: N x H x W x model, dense; dx may be dy or a null view.
  /// Throws shape_error, and state_error without a forward pass in training mode.
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    const auto n = ctx.tape().template pop_value<index_t>(*this);
    detail::check_backward(*this, dy.shape(), dy, dx, true);
    backward(ctx, detail::rows_of(dy), dx.is_null() ? tensor_view<T, 2>() : detail::rows_of(dx));
    ctx.tape().template pop<index_t>(2 * n);
  }

  /// Calls f(name, slot) for the slots w_qs, w_ks, w_vs and fc, then f("layer_norm", norm).
  template <class F>
  void parts(F&& f) {
    for (std::size_t i = 0; i < 4; ++i) f(names[i], core_.slots[i]);
    f("layer_norm", norm_);
  }

  /// Multiply-accumulates for one sequence: projections, and the products of queries, keys and values.
  index_t macs(index_t queries, index_t keys) const {
    return core_.slots[0].macs({1, queries, 1, shape().model}) +
           core_.slots[1].macs({1, keys, 1, shape().model}) +
           core_.slots[2].macs({1, keys, 1, shape().model}) +
           core_.slots[3].macs({1, queries, 1, shape().value_width()}) + core_.product_macs(queries, keys);
  }
  /// Multiply-accumulates of a forward pass over images: the attention of H W pixels to each other, N times.
  index_t macs(const extents<4>& input) const {
    const index_t tokens = input[1] * input[2];
    return input[0] * macs(tokens, tokens);
  }

  /// Names of the slots, in the order of their visits.
  static constexpr std::array<const char*, 4> names{"w_qs", "w_ks", "w_vs", "fc"};

 private:
  // Returns the options. Throws shape_error for invalid sizes, value_error for a dropout probability outside
  // [0, 1).
  static const attention_options& checked(const attention_options& options) {
    options.shape.validate("MultiHeadAttention");
    if (!(options.dropout >= 0.0 && options.dropout < 1.0)) {
      detail::throw_error<value_error>(
          {"MultiHeadAttention: dropout probability ", options.dropout, " is not in [0, 1)"});
    }
    return options;
  }
  // Throws state_error for a moved-from object and in training mode.
  void require_inference(const context<Device>& ctx) const {
    detail::check_not_moved(*this);
    if (ctx.training()) {
      PUFFERFISH_THROW(state_error(describe() + ": decoding with a cache is for inference"));
    }
  }

  attention_options options_;
  detail::attention_core<T, layer_type> core_;
  LayerNorm<T> norm_;
};

PUFFERFISH_NAMESPACE_END
