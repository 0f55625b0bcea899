// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `transformer`: the paper's translator, an encoder and a decoder of attention and feed-forward blocks.
///
///     auto net = make_transformer<float>(transformer_options{});
///     net.initialize(1);
///     ...
///     ctx.begin_step(step);
///     token_loss_result loss = net.root().loss(ctx, source, target, next, smoothing);
///     net.root().backward(ctx, static_cast<double>(loss.tokens));
///     ...
///     factorize(net, transformer_policy());
///
/// Decoding token by token is in models/transformer_decoding.hpp.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/models/bring_pairs.hpp>
#include <pufferfish/models/embedding_slot.hpp>
#include <pufferfish/models/transformer_layers.hpp>
#include <pufferfish/models/transformer_options.hpp>
#include <pufferfish/models/transformer_policy.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/init.hpp>
#include <pufferfish/nn/layers/positional_encoding.hpp>
#include <pufferfish/ops/loss/output_loss.hpp>

PUFFERFISH_NAMESPACE_BEGIN

template <class T, class Device = device::cpu>
class transformer_decoding;

/// Computes the logits of every next token from a sentence and the beginning of its translation
/// (Vaswani et al.: "Attention is all you need", NIPS 2017; post-norm, i.e. normalisation after
/// each sum). One table serves as source embedding, target embedding and output matrix: logits =
/// width^-0.5 W h. Embeddings are not scaled. Each stack starts with norm(dropout(embedding +
/// position)) and has no norm at its end. 48,978,432 parameters with the default options,
/// 26,696,192 once factorized (transformer_policy), 22,239,744 with all layers factorized.
///
/// Batches of sentences are padded to one length; padding is left out of all computation, and logits have a
/// row for every real token of `target` only, sentence after sentence.
///
/// State is named as in the paper's code: encoder.src_word_emb.weight [V x width], encoder.layer_norm.weight,
/// encoder.layer_stack.0.slf_attn.w_qs.weight, decoder.layer_stack.0.enc_attn.fc.weight, ... (There
/// decoder.trg_word_emb.weight and trg_word_prj.weight are the same tensor as the first; tables of
/// positions are computed.)
template <class T, class Device = device::cpu>
class transformer : public detail::layer_of_parts<transformer<T, Device>, T, Device> {
  using base = detail::layer_of_parts<transformer, T, Device>;

 public:
  using value_type = T;

  /// Throws value_error for an option out of its range. Parameters are zero until initialize.
  explicit transformer(const transformer_options& options)
      : options_(detail::checked(options)),
        embedding_(Embedding<T>(options.vocabulary, options.width, options.padding)),
        encoding_(options.width, options.positions),
        encoder_norm_(options.width),
        decoder_norm_(options.width) {
    const attention_options attention{
        {options.width, options.heads, options.key, options.value}, options.dropout, options.dropout, 1e-6};
    const feed_forward_options feed_forward{options.width, options.hidden, options.dropout, 1e-6};
    const MultiHeadAttention<T, Device> attn(attention);
    const FeedForward<T, Device> ffn(feed_forward);
    encoder_.assign(static_cast<std::size_t>(options.layers), {attn, ffn});
    decoder_.assign(static_cast<std::size_t>(options.layers), {attn, attn, ffn});
    detail::tie_embedding(embedding_, 3);
  }

  const transformer_options& options() const { return options_; }
  bool is_moved_from() const { return embedding_.is_moved_from(); }
  std::string describe() const {
    return detail::message({"transformer of ", options_.layers, " + ", options_.layers, " layers, ",
                            options_.vocabulary, " tokens, width ", options_.width});
  }

  /// Number of rows of the logits: the tokens of `target` that are not padding.
  index_t output_rows(const token_matrix& target) const {
    detail::check_dense(*this, "target", target);
    return detail::count_tokens(target, options_.padding);
  }

  /// Computes the loss of predicting `next`, the tokens that follow those of `target`. Tokens are in host
  /// memory; source: batch x its own length, next: shaped as target. Tokens of `next` that are padding do not
  /// count. results (in the device's memory) receives the summed loss and the number of tokens that count;
  /// that number is also returned, without a wait. In training, backward(ctx, normalizer) may follow. Two
  /// full copies of the logits are never in memory. Throws shape_error if the sizes differ or a sentence is
  /// longer than the table of positions; value_error, naming the position, for a token outside the
  /// vocabulary.
  index_t loss(context<Device>& ctx, const token_matrix& source, const token_matrix& target,
               const token_matrix& next, const label_smoothing& smoothing, double* results) const {
    if (next.shape() != target.shape()) {
      detail::throw_error<shape_error>(
          {describe(), ": next tokens ", next.shape(), " for target tokens ", target.shape()});
    }
    detail::check_ids(*this, "next", next);
    scratch_frame frame(ctx.scratch());
    const auto batch = detail::bring_pairs(ctx, frame, *this, encoding_, source, target, next);
    run_loss(ctx, frame, batch, smoothing, results);
    return batch.counted;
  }
  token_loss_result loss(context<Device>& ctx, const token_matrix& source, const token_matrix& target,
                         const token_matrix& next, const label_smoothing& smoothing = {}) const
      requires(std::is_same_v<Device, device::cpu>) {
    double results[2];
    const index_t tokens = loss(ctx, source, target, next, smoothing, results);
    return {results[0], tokens};
  }

  /// Computes the loss of a batch that is already packed, in memory that must not change until the backward
  /// pass. results: as for the overload for token matrices. Neither tokens nor lengths are checked, and the
  /// host reads nothing back, so that a step can be captured into a graph. Steps with equal numbers of
  /// sentences and rows and the same first sample launch the same work.
  void loss(context<Device>& ctx, const packed_pairs& batch, const label_smoothing& smoothing,
            double* results) const {
    scratch_frame frame(ctx.scratch());
    run_loss(ctx, frame, {batch}, smoothing, results);
  }

  /// Computes all gradients of the last loss / `normalizer`: 1 gives the gradient of the sum, as
  /// Pufferfish does; the number of tokens gives the gradient of the mean; a distributed run passes tokens
  /// of the global batch / number of ranks. Throws state_error unless the last pass was `loss` in training
  /// mode.
  void backward(context<Device>& ctx, double normalizer) const { run_backward(ctx, normalizer); }
  /// Computes all gradients of the last loss / `*normalizer`, which the device reads in the backward pass.
  void backward(context<Device>& ctx, const double* normalizer) const { run_backward(ctx, normalizer); }

  /// Computes the logits, output_rows(target) x vocabulary. Tape and errors are those of `loss`.
  void forward(context<Device>& ctx, const token_matrix& source, const token_matrix& target,
               const tensor_view<T, 2>& logits) const {
    const extents<2> expected{output_rows(target), options_.vocabulary};
    if (logits.shape() != expected) {
      detail::throw_error<shape_error>({describe(), ": logits ", logits.shape(), ", not ", expected,
                                        ": target tokens ", target.shape(), " without padding"});
    }
    detail::check_dense(*this, "logits", logits);
    scratch_frame frame(ctx.scratch());
    const passed seen =
        pass(ctx, frame, detail::bring_pairs(ctx, frame, *this, encoding_, source, target, {}));
    ops::output_logits<T>(ctx, output_on(seen.rows), logits);
    if (ctx.training()) ctx.tape().push_value(*this, seen);
  }

  /// Computes all gradients from the gradient of the logits, after `forward`. dlogits: dense, shaped as the
  /// logits. Throws shape_error, and state_error unless the last pass was `forward` in training mode.
  void backward(context<Device>& ctx, const tensor_view<const T, 2>& dlogits) const {
    const auto seen = ctx.tape().template pop_value<passed>(*this);
    detail::check_dlogits<T>(*this, dlogits, {seen.target.rows(), options_.vocabulary});
    scratch_frame frame(ctx.scratch());
    const token_layer<T, Device>& table = embedding();
    detail::stack_gradient<T, Device> gradient(frame, seen.top.shape());
    const tensor_view<T, 2> of_rows = table.output_row_gradient(frame, gradient.now());
    // The scale is applied to the narrow operands, of `width` columns, not to the gradient of the logits.
    const tensor_view<T, 2> rows = frame.take<T>(seen.rows.shape());
    scale_rows(ctx, seen.rows, rows);
    ops::strided_weight_gradient<T>(ctx, dlogits, rows, table.weight_gradient(), table.table().accumulate());
    ops::strided_product<T>(ctx, dlogits, table.rows(), of_rows);
    scale_rows(ctx, of_rows, of_rows);
    finish_backward(ctx, seen, of_rows, gradient);
  }

  /// Shows `visitor` all parameters. All projections and feed-forward matrices are slots, and so is the
  /// table, which is replaced in all of its three uses at once.
  void visit_state(state_visitor<parameter_t<T>>& visitor, const std::string& prefix = {}) {
    detail::tie_embedding(embedding_, 3);  // the slot may hold another layer since the last visit
    base::visit_state(visitor, prefix);
  }
  /// Calls f(name, part) for the table, the norms and the blocks of all layers, in execution order.
  template <class F>
  void parts(F&& f) {
    f("encoder.src_word_emb", embedding_);
    f("encoder.layer_norm", encoder_norm_);
    detail::for_each_part(encoder_, "encoder", f);
    f("decoder.layer_norm", decoder_norm_);
    detail::for_each_part(decoder_, "decoder", f);
  }

  /// Draws the initial values of the paper's code: every matrix, including the table (but see
  /// embedding_deviation) and low-rank factors, is uniform by Xavier; biases are as in PyTorch. In a low-rank
  /// embedding `down` is drawn like the dense table and `up` from +-sqrt(3 / rank), which keeps the variance.
  void initialize(random_stream random) {
    const auto part = [&](const std::string& name, auto& block) { block.initialize(random.child(name)); };
    detail::for_each_part(encoder_, "encoder", part);
    detail::for_each_part(decoder_, "decoder", part);
    encoder_norm_.initialize(random);
    decoder_norm_.initialize(random);
    detail::for_each_parameter(*this, [&](const std::string& name, parameter<parameter_t<T>>& p) {
      if (p.layout().dims > 1) init::xavier_uniform(p, random.child("xavier").child(name));
    });
    const double deviation = options_.embedding_deviation;
    if (deviation == 0.0 && embedding().rank() == 0) return;
    random = random.child("embedding");
    detail::initialize_embedding(embedding_, random, [&](auto& table, const random_stream&) {
      if (deviation > 0.0) return init::normal(table, deviation, random);
      const double bound = std::sqrt(6.0 / static_cast<double>(options_.vocabulary + options_.width));
      init::uniform(table, -bound, bound, random);
    });
  }

  /// Parameters and multiply-accumulates of a pass over one pair of sentences of `source` and
  /// `target` tokens. The parameters of the tied output matrix are counted in the encoder.
  model_cost cost(index_t source = 1, index_t target = 1) const {
    model_cost cost;
    const token_layer<T, Device>& table = embedding();
    cost.layers.push_back(detail::cost_of_embedding("encoder.src_word_emb", table, source + target));
    const index_t of_norm = 2 * options_.width, macs = target * table.output_macs();
    cost.layers.push_back({"encoder.layer_norm", encoder_norm_.describe(), of_norm, 0, 0, 0, 0});
    detail::add_stack_cost<T, Device>(encoder_, "encoder", options_.width, source, source, cost);
    cost.layers.push_back({"decoder.layer_norm", decoder_norm_.describe(), of_norm, 0, 0, 0, 0});
    detail::add_stack_cost<T, Device>(decoder_, "decoder", options_.width, target, source, cost);
    cost.layers.push_back({"trg_word_prj", "output tied to the encoder", 0, 0, macs, macs, 0});
    return cost;
  }

 private:
  friend class transformer_decoding<T, Device>;

  /// Results of a forward pass that the loss and the backward pass need.
  struct passed {
    packed_tokens source, target;
    tensor_view<const T, 2> top;   ///< the decoder's output
    tensor_view<const T, 2> rows;  ///< rows that the table multiplies: token_layer::output_rows of `top`
    index_t block;                 ///< bytes on the tape; see detail::brought_pairs
  };
  struct kept_loss {
    passed seen;
    const std::int32_t* next;
    label_smoothing smoothing;
    T* exponentials;
  };

  parameter_t<T> output_scale() const {
    return static_cast<parameter_t<T>>(1.0 / std::sqrt(static_cast<double>(options_.width)));
  }
  const token_layer<T, Device>& embedding() const { return detail::embedding_in(*this, embedding_); }
  ops::output_layer<T> output_on(const tensor_view<const T, 2>& rows) const {
    return {rows, embedding().rows(), nullptr, output_scale()};
  }
  void scale_rows(context<Device>& ctx, const tensor_view<const T, 2>& from,
                  const tensor_view<T, 2>& to) const {
    ops::scale<T>(ctx, output_scale(), from.flat(), to.flat());
  }

  // norm(dropout(embedding + position)) of each token.
  tensor_view<const T, 2> embed(context<Device>& ctx, const packed_tokens& p, const LayerNorm<T>& norm,
                                detail::stack_memory<T, Device>& memory) const {
    const tensor_view<T, 2> sum = memory.next();
    embedding().forward(ctx, p.tokens, sum);
    encoding_.add(ctx, p.positions, sum);
    const tensor_view<T, 2> y = memory.next();
    ops::row_dropout dropout;
    if (ctx.training()) dropout = {options_.dropout, ctx.next_random_stream(), 0, p.numbers};
    norm.forward_sum(ctx, sum, {}, dropout, y);
    return y;
  }
  void embed_backward(context<Device>& ctx, const LayerNorm<T>& norm,
                      detail::stack_gradient<T, Device>& gradient) const {
    gradient.through(ctx, [&](const auto& dy, const auto& dx) { norm.backward_sum(ctx, dy, {}, dx); });
    embedding().backward(ctx, gradient.now());
    ctx.tape().template pop<T>(gradient.now().shape());
  }

  tensor_view<const T, 2> encode(context<Device>& ctx, scratch_frame& frame,
                                 const packed_tokens& source) const {
    detail::stack_memory<T, Device> memory(ctx, frame, {source.rows(), options_.width});
    tensor_view<const T, 2> x = embed(ctx, source, encoder_norm_, memory);
    for (const detail::encoder_layer<T, Device>& layer : encoder_) x = layer.forward(ctx, source, x, memory);
    return x;
  }

  passed pass(context<Device>& ctx, scratch_frame& frame, const detail::brought_pairs& batch) const {
    detail::check_not_moved(*this);
    const packed_tokens &source = batch.pairs.source, &target = batch.pairs.target;
    const tensor_view<const T, 2> encoded = encode(ctx, frame, source);
    detail::stack_memory<T, Device> memory(ctx, frame, {target.rows(), options_.width});
    tensor_view<const T, 2> top = embed(ctx, target, decoder_norm_, memory);
    for (const detail::decoder_layer<T, Device>& layer : decoder_) {
      top = layer.forward(ctx, target, top, source, encoded, memory);
    }
    return {source, target, top, embedding().output_rows(ctx, frame, top), batch.block};
  }

  void run_loss(context<Device>& ctx, scratch_frame& frame, const detail::brought_pairs& batch,
                const label_smoothing& smoothing, double* results) const {
    const passed seen = pass(ctx, frame, batch);
    const ops::output_layer<T> output = output_on(seen.rows);
    const token_loss_options how{smoothing, options_.padding, loss_reduction::sum};
    T* kept = nullptr;
    if (ctx.training()) kept = ctx.tape().template push<T>(ops::output_loss_kept(ctx, output));
    const std::span<const std::int32_t> all(batch.pairs.next, static_cast<std::size_t>(output.tokens()));
    ops::output_loss_forward<T>(ctx, output, all, how, kept, results);
    if (ctx.training()) ctx.tape().push_value(*this, kept_loss{seen, batch.pairs.next, smoothing, kept});
  }

  template <class Normalizer>
  void run_backward(context<Device>& ctx, Normalizer normalizer) const {
    const auto kept = ctx.tape().template pop_value<kept_loss>(*this);
    const ops::output_layer<T> output = output_on(kept.seen.rows);
    ctx.tape().template pop<T>(ops::output_loss_kept(ctx, output));
    scratch_frame frame(ctx.scratch());
    const token_layer<T, Device>& table = embedding();
    detail::stack_gradient<T, Device> gradient(frame, kept.seen.top.shape());
    const tensor_view<T, 2> of_rows = table.output_row_gradient(frame, gradient.now());
    ops::output_loss_backward<T>(
        ctx, output, {kept.next, static_cast<std::size_t>(output.tokens())},
        {kept.smoothing, options_.padding, loss_reduction::sum}, normalizer, kept.exponentials,
        {of_rows, table.weight_gradient(), table.table().accumulate(), nullptr, false});
    finish_backward(ctx, kept.seen, of_rows, gradient);
  }

  // Backward pass below the output layer, whose part of the table's gradient is written already. `of_rows`
  // is the gradient of the rows that the table multiplied; `gradient` receives that of the decoder's output.
  void finish_backward(context<Device>& ctx, const passed& seen, const tensor_view<T, 2>& of_rows,
                       detail::stack_gradient<T, Device>& gradient) const {
    embedding().output_backward(ctx, seen.top, of_rows, gradient.now());
    scratch_frame frame(ctx.scratch());
    detail::stack_gradient<T, Device> encoded(frame, {seen.source.rows(), options_.width});
    for (std::size_t i = decoder_.size(); i-- > 0;) {
      decoder_[i].backward(ctx, gradient, encoded.now(), i + 1 < decoder_.size());
    }
    embed_backward(ctx, decoder_norm_, gradient);
    for (std::size_t i = encoder_.size(); i-- > 0;) encoder_[i].backward(ctx, encoded);
    embed_backward(ctx, encoder_norm_, encoded);
    if (seen.block >= 0) ctx.tape().template pop<std::byte>(seen.block);
  }

  transformer_options options_;
  any_layer<T, Device> embedding_;
  PositionalEncoding<T> encoding_;
  LayerNorm<T> encoder_norm_, decoder_norm_;
  std::vector<detail::encoder_layer<T, Device>> encoder_;
  std::vector<detail::decoder_layer<T, Device>> decoder_;
};

/// Makes a Transformer with its arenas; parameters are zero until initialize. Throws value_error for an
/// option out of its range.
template <class T, class Device = device::cpu>
model<transformer<T, Device>, Device> make_transformer(const transformer_options& options) {
  return model<transformer<T, Device>, Device>(transformer<T, Device>(options));
}

PUFFERFISH_NAMESPACE_END
