// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `lstm_lm`: the paper's language model: an embedding, LSTM layers, and an output tied to the embedding.
///
///     auto net = make_lstm_lm<float>(lstm_lm_options{});
///     net.initialize(1);
///     auto state = net.root().make_state(20);
///     ...
///     ctx.begin_step(step);
///     token_loss_result loss = net.root().loss(ctx, tokens, targets, state);
///     net.root().backward(ctx, static_cast<double>(loss.tokens));
///     ...
///     factorize(net, lstm_lm_policy());

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/models/embedding_slot.hpp>
#include <pufferfish/models/lstm_lm_state.hpp>
#include <pufferfish/nn/accounting.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/init.hpp>
#include <pufferfish/nn/layers/lstm.hpp>
#include <pufferfish/ops/elementwise/sequence_dropout.hpp>
#include <pufferfish/ops/loss/output_loss.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Sizes of an lstm_lm; the defaults are the network for WikiText-2 of Wang et al. (Pufferfish, MLSys 2021).
struct lstm_lm_options {
  index_t vocabulary = 33278;  ///< WikiText-2's words
  index_t width = 1500;        ///< width of the embedding and of every layer, equal for the tied output
  index_t layers = 2;          ///< LSTM layers, at least 1
  double dropout = 0.65;       ///< dropout probability of the embedding's and of every layer's output
};

/// Computes the logits of the tokens that follow given tokens: embedding, `layers` LSTM layers, and
/// logits = W h + b where W is the embedding's table; dropout between all of them (Zaremba, Sutskever,
/// Vinyals, "Recurrent neural network regularization", 2014; tied as in Press, Wolf, EACL 2017).
/// Tokens are steps x batch, time first; the rows of logits and the targets of a loss have the same
/// order. 85,962,278 parameters with the default options, 67,962,278 once factorized (lstm_lm_policy).
///
/// Every layer carries its own state over segments. (The reference code hands the last layer's state to the
/// first layer and starts all others from zeros.)
///
/// Parameters: `encoder.weight` [V x width], shared with the output, or, in a LowRankEmbedding,
/// `encoder.down.weight` [V x rank] and `encoder.up.weight` [width x rank]; `rnn.0.weight_ih` and
/// so on (see LSTM and LowRankLSTM); `decoder.bias` [V].
///
/// The passes throw state_error if the object was moved from, or if a slot holds a layer of another kind. In
/// training, a segment of steps x batch tokens takes tape memory for the embedding's output, every layer's
/// output (twice with dropout) and the values that the layers keep. The backward pass stops at the segment's
/// first step: gradients do not flow into the previous segment.
template <class T, class Device = device::cpu>
class lstm_lm : public detail::layer_of_parts<lstm_lm<T, Device>, T, Device> {
  using base = detail::layer_of_parts<lstm_lm, T, Device>;

 public:
  using value_type = T;
  /// Tokens are stored in the memory of the device.
  using token_view = tensor_view<const std::int32_t, 2>;
  using state_type = lstm_lm_state<T, Device>;

  /// Throws value_error for an option out of its range. Parameters are zero until initialize.
  explicit lstm_lm(const lstm_lm_options& options)
      : options_(checked(options)),
        embedding_(Embedding<T>(options.vocabulary, options.width)),
        bias_(logical_layout::vector(options.vocabulary), parameter_role::bias) {
    for (index_t i = 0; i < options.layers; ++i) layers_.emplace_back(LSTM<T>(options.width, options.width));
    detail::tie_embedding(embedding_, 2);
  }

  /// The options given to the constructor.
  const lstm_lm_options& options() const { return options_; }
  bool is_moved_from() const { return embedding_.is_moved_from(); }
  std::string describe() const {
    return detail::message({"lstm_lm of ", options_.layers, " layers, ", options_.vocabulary,
                            " tokens, width ", options_.width});
  }
  /// Makes a state of zeros for `batch` sequences, in the memory of the device.
  state_type make_state(index_t batch) const { return {options_.layers, batch, options_.width}; }

  /// Computes the loss of predicting `targets` after `tokens`, both dense, steps x batch, and advances
  /// `state` by this segment. results[0]: sum of the loss; results[1]: number of tokens; both in the memory
  /// of the device. In training, backward may follow, and tokens and targets must not change until then.
  /// Two full copies of the logits are never in memory. Throws shape_error if the sizes differ; value_error
  /// for a token outside the vocabulary, with its position (on a device: see ops::check_tokens).
  void loss(context<Device>& ctx, const token_view& tokens, const token_view& targets, state_type& state,
            double* results) const {
    if (targets.shape() != tokens.shape()) {
      detail::throw_error<shape_error>(
          {describe(), ": targets ", targets.shape(), " for tokens ", tokens.shape()});
    }
    detail::check_dense(*this, "targets", targets);
    // Checked before the state changes.
    ops::check_tokens(
        ctx, [this] { return describe() + ", targets"; }, targets.flat(), options_.vocabulary);
    scratch_frame frame(ctx.scratch());
    const tensor_view<const T, 2> top = hidden_states(ctx, frame, tokens, state);
    const ops::output_layer<T> output = output_on(embedding().output_rows(ctx, frame, top));
    T* kept = nullptr;
    if (ctx.training()) kept = ctx.tape().template push<T>(ops::output_loss_kept(ctx, output));
    ops::output_loss_forward<T>(ctx, output, targets.flat(), {}, kept, results);
    if (ctx.training()) ctx.tape().push_value(*this, kept_loss{{top, output.x}, targets, kept});
  }
  token_loss_result loss(context<Device>& ctx, const token_view& tokens, const token_view& targets,
                         state_type& state) const requires(std::is_same_v<Device, device::cpu>) {
    double results[2];
    loss(ctx, tokens, targets, state, results);
    return {results[0], static_cast<index_t>(results[1])};
  }

  /// Computes all gradients of the last loss / `normalizer`. The loss's number of tokens gives the
  /// gradient of the mean; a distributed run passes tokens of the global batch / number of ranks.
  /// Throws state_error unless the last pass was `loss` in training mode, value_error for a normalizer that
  /// is not positive.
  void backward(context<Device>& ctx, double normalizer) const {
    const auto kept = ctx.tape().template pop_value<kept_loss>(*this);
    const ops::output_layer<T> output = output_on(kept.top.rows);
    ctx.tape().template pop<T>(ops::output_loss_kept(ctx, output));
    scratch_frame frame(ctx.scratch());
    const token_layer<T, Device>& table = embedding();
    const tensor_view<T, 2> gradient = frame.take<T>(kept.top.states.shape());
    const tensor_view<T, 2> of_rows = table.output_row_gradient(frame, gradient);
    ops::output_loss_backward<T>(ctx, output, kept.targets.flat(), {}, normalizer, kept.exponentials,
                                 {of_rows, table.weight_gradient(), table.table().accumulate(),
                                  bias_.gradient_data(), bias_.accumulate()});
    finish_backward(ctx, kept.top, of_rows, gradient);
  }

  /// Computes the logits, steps batch x V, a row for each token. Advances `state`, keeps data for the
  /// backward pass on the tape, and throws errors as `loss` does. logits: dense, overlaps nothing.
  void forward(context<Device>& ctx, const token_view& tokens, state_type& state,
               const tensor_view<T, 2>& logits) const {
    const extents<2> expected{tokens.size(), options_.vocabulary};
    if (logits.shape() != expected) {
      detail::throw_error<shape_error>({describe(), ": logits ", logits.shape(), ", not ", expected});
    }
    detail::check_dense(*this, "logits", logits);
    scratch_frame frame(ctx.scratch());
    const tensor_view<const T, 2> top = hidden_states(ctx, frame, tokens, state);
    const tensor_view<const T, 2> rows = embedding().output_rows(ctx, frame, top);
    ops::output_logits<T>(ctx, output_on(rows), logits);
    if (ctx.training()) ctx.tape().push_value(*this, output_input{top, rows});
  }

  /// Computes all gradients from the gradient of the logits, after `forward`.
  /// dlogits: steps batch x V, dense, rows in the order of the tokens. Throws shape_error, and state_error
  /// unless the last pass was `forward` in training mode.
  void backward(context<Device>& ctx, const tensor_view<const T, 2>& dlogits) const {
    const auto top = ctx.tape().template pop_value<output_input>(*this);
    detail::check_dlogits<T>(*this, dlogits, {top.states.extent(0), options_.vocabulary});
    scratch_frame frame(ctx.scratch());
    const token_layer<T, Device>& table = embedding();
    const tensor_view<T, 2> gradient = frame.take<T>(top.states.shape());
    const tensor_view<T, 2> of_rows = table.output_row_gradient(frame, gradient);
    ops::strided_product<T>(ctx, dlogits, table.rows(), of_rows);
    ops::strided_weight_gradient<T>(ctx, dlogits, top.rows, table.weight_gradient(),
                                    table.table().accumulate());
    ops::column_sums<T>(ctx, dlogits, bias_.gradient_data(), bias_.accumulate());
    finish_backward(ctx, top, of_rows, gradient);
  }

  /// One step of generation (see sample_tokens): reads one more token of each sequence, advances the state
  /// and computes the logits of the next tokens, batch x V. For inference mode; in training it would push to
  /// the tape. Throws the errors of `forward`.
  void next(context<Device>& ctx, std::span<const std::int32_t> tokens, state_type& state,
            const tensor_view<T, 2>& logits) const {
    forward(ctx, token_view(tokens.data(), {1, static_cast<index_t>(tokens.size())}), state, logits);
  }

  /// Shows `visitor` all parameters. The embedding and the recurrent layers are slots, which may be replaced
  /// by layers of the same sizes; the output uses a replaced embedding as well.
  void visit_state(state_visitor<parameter_t<T>>& visitor, const std::string& prefix = {}) {
    detail::tie_embedding(embedding_, 2);  // the slot may hold another layer since the last visit
    base::visit_state(visitor, prefix);
  }
  /// Calls f(name, part) for the table, the recurrent layers and the output's bias.
  template <class F>
  void parts(F&& f) {
    f("encoder", embedding_);
    for (std::size_t i = 0; i < layers_.size(); ++i) f(layer_name(i), layers_[i]);
    f("decoder.bias", bias_);
  }

  /// Draws the initial values of the published code of Wang et al. (Pufferfish, MLSys 2021): the table
  /// uniform in +-0.1, gates as LSTM::initialize, the output's bias uniform in +-1/sqrt(width). In a low-rank
  /// embedding, `down` is uniform in +-0.1 and `up` in +-sqrt(3 / rank), so that the product has the dense
  /// table's variance.
  void initialize(random_stream random) {
    detail::initialize_embedding(
        embedding_, random.child("encoder"),
        [](parameter<parameter_t<T>>& table, const random_stream& r) { init::uniform(table, -0.1, 0.1, r); });
    for (std::size_t i = 0; i < layers_.size(); ++i) layers_[i].initialize(random.child(layer_name(i)));
    detail::fill_fan_in(bias_, options_.width, random.child("decoder").child("bias"));
  }

  /// Parameters and multiply-accumulates of a pass over `tokens` tokens. The parameters of the tied
  /// output matrix are counted in the encoder.
  /// One row for the encoder, one per LSTM layer, one for the decoder.
  model_cost cost(index_t tokens = 1) const {
    model_cost cost;
    const token_layer<T, Device>& table = embedding();
    cost.layers.push_back(detail::cost_of_embedding("encoder", table, tokens));
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      cost.layers.push_back(
          detail::cost_of_layer(layer_name(i), layers_[i], {1, tokens, 1, options_.width}, false));
      const rank_list ranks = layers_[i].ranks();
      cost.layers.back().rank = ranks.empty() ? 0 : ranks.front();
    }
    const index_t macs = tokens * table.output_macs();
    cost.layers.push_back({"decoder", "output tied to the encoder", bias_.size(), 0, macs, macs, 0});
    return cost;
  }

 private:
  // The last layer's output, and token_layer::output_rows of it, the rows that the table multiplies.
  struct output_input {
    tensor_view<const T, 2> states, rows;
  };
  struct kept_loss {
    output_input top;
    token_view targets;
    T* exponentials;
  };

  // Returns the options. Throws value_error, with their values, if one of them is out of its range.
  static lstm_lm_options checked(const lstm_lm_options& o) {
    if (o.vocabulary < 1 || o.width < 1 || o.layers < 1 || !(o.dropout >= 0.0 && o.dropout < 1.0)) {
      detail::throw_error<value_error>({"lstm_lm: ", o.layers, " layers of width ", o.width, " for ",
                                        o.vocabulary, " tokens, dropout ", o.dropout,
                                        "; sizes must be positive, dropout in [0, 1)"});
    }
    return o;
  }
  static std::string layer_name(std::size_t i) { return "rnn." + std::to_string(i); }

  const any_layer<T, Device>& recurrent(std::size_t i) const {
    if (layers_[i].recurrent() != nullptr) return layers_[i];
    detail::throw_error<state_error>(
        {describe(), ": layer ", layer_name(i), " is no recurrent layer but ", layers_[i].describe()});
  }

  const token_layer<T, Device>& embedding() const { return detail::embedding_in(*this, embedding_); }
  ops::output_layer<T> output_on(const tensor_view<const T, 2>& rows) const {
    return {rows, embedding().rows(), bias_.template as<T>(), 1};
  }

  // Writes x after dropout to `to`, which may be x; training only.
  tensor_view<T, 2> dropped(context<Device>& ctx, const tensor_view<T, 2>& x, const tensor_view<T, 2>& to,
                            const token_view& tokens) const {
    const ops::sequence_mask mask{ctx.next_random_stream(), options_.dropout, tokens.extent(0),
                                  tokens.extent(1), ctx.first_sample()};
    ops::sequence_dropout<T>(ctx, x, mask, to);
    ctx.tape().push_value(*this, mask);
    return to;
  }
  bool drops(const context<Device>& ctx) const { return ctx.training() && options_.dropout > 0.0; }

  // Output of the last layer, one row per token: on the tape in training, otherwise in scratch.
  tensor_view<const T, 2> hidden_states(context<Device>& ctx, scratch_frame& frame, const token_view& tokens,
                                        state_type& state) const {
    detail::check_not_moved(*this);
    if (state.batch() != tokens.extent(1) || state.layers() != options_.layers) {
      detail::throw_error<shape_error>({describe(), ": a state of ", state.layers(), " layers, ",
                                        state.batch(), " sequences for tokens ", tokens.shape(),
                                        " (steps x batch)"});
    }
    detail::check_dense(*this, "tokens", tokens);
    const extents<2> rows{tokens.size(), options_.width};
    const extents<3> sequence{tokens.extent(0), tokens.extent(1), options_.width};
    const bool training = ctx.training();
    const auto block = [&] { return training ? ctx.tape().template push<T>(rows) : frame.take<T>(rows); };
    ops::check_tokens(
        ctx, [this] { return describe(); }, tokens.flat(), options_.vocabulary);
    tensor_view<T, 2> x = block();
    embedding().forward(ctx, tokens.flat(), x);
    if (drops(ctx)) dropped(ctx, x, x, tokens);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const recurrent_state<T> carried = state.layer(static_cast<index_t>(i));
      const tensor_view<T, 2> y = block();
      recurrent(i).forward_sequence(ctx, tensor_view<const T, 3>(x.data(), sequence), carried,
                                    tensor_view<T, 3>(y.data(), sequence), carried);
      // A layer's backward pass needs its output without dropout, so that is not overwritten.
      x = drops(ctx) ? dropped(ctx, y, ctx.tape().template push<T>(rows), tokens) : y;
    }
    if (training) ctx.tape().push_value(*this, tokens.shape());
    return x;
  }

  // Backward pass below the output layer. `of_rows` is the gradient of the rows that the table multiplied;
  // `gradient` receives the gradient of the last layer's output after dropout. Both are overwritten.
  void finish_backward(context<Device>& ctx, const output_input& top, const tensor_view<T, 2>& of_rows,
                       const tensor_view<T, 2>& gradient) const {
    ctx.gradient_written(bias_);
    embedding().output_backward(ctx, top.states, of_rows, gradient);
    const auto tokens = ctx.tape().template pop_value<extents<2>>(*this);
    const extents<3> sequence{tokens[0], tokens[1], options_.width};
    scratch_frame frame(ctx.scratch());
    tensor_view<T, 2> dy = gradient, dx = frame.take<T>(gradient.shape());
    const auto undrop = [&](const tensor_view<T, 2>& g) {
      ops::sequence_dropout<T>(ctx, g, ctx.tape().template pop_value<ops::sequence_mask>(*this), g);
    };
    for (std::size_t i = layers_.size(); i-- > 0;) {
      if (drops(ctx)) {
        undrop(dy);
        ctx.tape().template pop<T>(dy.shape());
      }
      recurrent(i).backward_sequence(ctx, tensor_view<const T, 3>(dy.data(), sequence),
                                     tensor_view<T, 3>(dx.data(), sequence));
      ctx.tape().template pop<T>(dy.shape());
      std::swap(dy, dx);
    }
    if (drops(ctx)) undrop(dy);
    embedding().backward(ctx, dy);
    ctx.tape().template pop<T>(dy.shape());
  }

  lstm_lm_options options_;
  any_layer<T, Device> embedding_;
  std::vector<any_layer<T, Device>> layers_;
  parameter<parameter_t<T>> bias_;
};

/// Makes a language model with its arenas; parameters are zero until initialize. Throws value_error for an
/// option out of its range.
template <class T, class Device = device::cpu>
model<lstm_lm<T, Device>, Device> make_lstm_lm(const lstm_lm_options& options) {
  return model<lstm_lm<T, Device>, Device>(lstm_lm<T, Device>(options));
}

/// Policy of Wang et al. (Pufferfish, MLSys 2021) for lstm_lm: all recurrent matrices at a quarter of full
/// rank; the embedding, and with it the output, stays dense.
///
///     const factorization made = factorize(net, lstm_lm_policy());  // 85,962,278 -> 67,962,278 parameters
inline factorize_policy lstm_lm_policy() { return {.first_layer = 1, .last_layer_dense = false}; }

PUFFERFISH_NAMESPACE_END
