// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `LowRankEmbedding`: an embedding of rank r: a lookup in a table with r columns, then a product.

#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include <pufferfish/core/context.hpp>
#include <pufferfish/lowrank/layers/linear.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/lowrank/rank.hpp>
#include <pufferfish/ops/embedding/embedding.hpp>
#include <pufferfish/ops/linear/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Throws shape_error for a size below 1, value_error for a padding token outside the vocabulary.
inline void check_table(const char* name, index_t vocabulary, index_t width, std::int32_t padding) {
  if (vocabulary < 1 || width < 1) {
    throw_error<shape_error>(
        {name, ": ", vocabulary, " tokens of ", width, " numbers; both must be positive"});
  }
  if (padding != no_token && (padding < 0 || padding >= vocabulary)) {
    throw_error<value_error>(
        {name, " ", vocabulary, " x ", width, ": padding token ", padding, " is outside the vocabulary"});
  }
}

/// Throws shape_error unless `rows` has one row per token and layer.width() columns.
template <class Layer>
void check_token_rows(const Layer& layer, std::size_t tokens, const extents<2>& rows) {
  if (static_cast<index_t>(tokens) == rows[0] && rows[1] == layer.width()) return;
  throw_error<shape_error>({layer.describe(), ": ", tokens, " tokens do not fit rows ", rows});
}

/// The implementation of LowRankEmbedding for any rank.
template <class T>
class low_rank_embedding {
 public:
  using value_type = T;
  static constexpr auto low_rank_kind = layer_kind::embedding;

  /// All factors are zero. Throws shape_error for a size below 1, rank_error unless 1 <= rank <=
  /// min(vocabulary, width), value_error for a padding token outside the vocabulary.
  low_rank_embedding(index_t vocabulary, index_t width, index_t rank, std::int32_t padding)
      : vocabulary_(vocabulary),
        width_(width),
        rank_(rank),
        padding_(padding),
        down_(checked(vocabulary, width, rank, padding), parameter_role::weight),
        up_(logical_layout::matrix(width, rank), parameter_role::weight) {}

  index_t vocabulary() const { return vocabulary_; }
  index_t width() const { return width_; }
  index_t rank() const { return rank_; }
  /// The token whose row in the table of first factors (down) has zero gradient, or no_token.
  std::int32_t padding() const { return padding_; }
  /// True after the parameters were moved to another layer. Passes and the views of the factors then throw
  /// state_error.
  bool is_moved_from() const { return down_.is_moved_from(); }

  /// The factors: down [vocabulary][rank], one row of `rank` numbers per token, row-major; up [width][rank],
  /// stored transposed. Views of the layer's own memory, valid until the layer is destroyed, moved, or bound
  /// to the arena of a network. Writing to a view changes the layer. Both throw state_error for a moved-from
  /// layer.
  tensor_view<parameter_t<T>, 2> down() { return logical_matrix(down_); }
  tensor_view<const parameter_t<T>, 2> down() const { return logical_matrix(down_); }
  tensor_view<parameter_t<T>, 2> up() { return logical_matrix(up_); }
  tensor_view<const parameter_t<T>, 2> up() const { return logical_matrix(up_); }

  /// down up^T, the table [vocabulary][width] of the equivalent dense layer.
  /// The result is newly allocated. Runs in the calling thread: vocabulary width rank multiply-adds.
  tensor<parameter_t<T>, 2> to_dense() const {
    tensor<parameter_t<T>, 2> dense({vocabulary_, width_});
    stack_arena scratch;
    native_gemm(scratch).multiply<parameter_t<T>>(down(), transpose(up()), dense.view());
    return dense;
  }

  std::string describe() const {
    return message({"LowRankEmbedding ", vocabulary_, " -> ", rank_, " -> ", width_});
  }

  /// y_n = up t_n, where t_n is row tokens[n] of down(). y: tokens x width, dense, not overlapping any other
  /// array. In training, `tokens` must not change until the backward pass. Throws shape_error, state_error
  /// for a moved-from layer, and value_error, with the position, for a token outside the vocabulary (on a
  /// device the row of such a token becomes NaN instead).
  ///
  /// In training t is kept on the tape. That costs no time and rank / width of the memory of y. A second
  /// lookup in the backward pass would read scattered rows again and, on a device, cost another launch.
  /// `tokens` is in the memory of the context's device; on the CPU every token is checked before anything is
  /// written. A pass of n tokens needs n rank width multiply-adds, independent of the size of the vocabulary.
  template <class Device>
  void forward(context<Device>& ctx, std::span<const std::int32_t> tokens, const tensor_view<T, 2>& y) const {
    check_not_moved(*this);
    check_token_rows(*this, tokens.size(), y.shape());
    check_dense(*this, "y", y);
    ops::check_tokens(
        ctx, [this] { return describe(); }, tokens, vocabulary_);
    scratch_frame frame(ctx.scratch());
    const tensor_view<T, 2> t = tape_or(ctx, frame, y.extent(0));
    if (ctx.training()) ctx.tape().push_value(*this, tokens);
    ops::embedding_forward<T>(ctx, rows(), tokens, t);
    ops::linear_forward<T>(ctx, t, stored(up_), nullptr, y);
  }

  /// Gradients of both factors from dy (tokens x width, dense), with t (tokens x rank) for the rows of the
  /// first factor (the table of `rank` numbers per token) that the forward pass looked up: dup = dy^T t. Row
  /// i of dt = dy up is added to the row of the table's gradient of token i. Rows of other tokens and of the
  /// padding token receive nothing. As in PyTorch, positions of the padding token do contribute to dup. Both
  /// gradients are overwritten, or added to if parameter::accumulate() is true. There is no gradient of the
  /// input. Throws shape_error; state_error without a forward pass in training mode and for a moved-from
  /// layer. After an exception, clear the tape (context::begin_step).
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 2>& dy) const {
    const auto tokens = ctx.tape().template pop_value<std::span<const std::int32_t>>(*this);
    check_not_moved(*this);
    check_token_rows(*this, tokens.size(), dy.shape());
    check_dense(*this, "dy", dy);
    const tensor_view<T, 2> t = ctx.tape().template pop<T>(extents<2>{dy.extent(0), rank_});
    ops::linear_backward_weight<T>(ctx, t, dy, up_gradient(), up_.accumulate());
    ctx.gradient_written(up_);
    scratch_frame frame(ctx.scratch());
    const tensor_view<T, 2> dt = frame.take<T>(t.shape());
    ops::linear_backward_input<T>(ctx, dy, stored(up_), dt);
    ops::embedding_backward<T>(ctx, tokens, dt, padding_, weight_gradient(), down_.accumulate());
    ctx.gradient_written(down_);
  }

  /// Sets how many gradient writes each factor gets in a backward pass: lookups and tied output layers.
  /// The default is one lookup and one tied output layer. Resets the write counts, so it must not be called
  /// between the gradient writes of a step.
  void tie(int writers = 2) {
    down_.set_writers(writers);
    up_.set_writers(writers);
  }

  /// The matrix [vocabulary][rank] that an output layer tied to the table multiplies with output_rows(h):
  /// W h = down (up^T h). The dense Embedding has the same member.
  tensor_view<const T, 2> rows() const { return {down_.template as<T>(), {vocabulary_, rank_}}; }
  /// The parameter that stores rows().
  const parameter<parameter_t<T>>& table() const { return down_; }
  /// Gradient of rows(), [vocabulary][rank].
  tensor_view<parameter_t<T>, 2> weight_gradient() const {
    return {down_.gradient_data(), {vocabulary_, rank_}};
  }

  /// Computes h up, N x rank, for the hidden states h (N x width, dense). The result is stored on the tape in
  /// training, else in `frame`. In training, output_backward must pop these rows in the reverse order of the
  /// pushes. Throws shape_error, and state_error for a moved-from layer.
  template <class Device>
  tensor_view<const T, 2> output_rows(context<Device>& ctx, scratch_frame& frame,
                                      const tensor_view<const T, 2>& h) const {
    check_not_moved(*this);
    check_output(h);
    const tensor_view<T, 2> u = tape_or(ctx, frame, h.extent(0));
    ops::linear_backward_input<T>(ctx, h, stored(up_), u);
    return u;
  }
  /// Memory for the gradient of output_rows: a separate N x rank block of `frame`.
  tensor_view<T, 2> output_row_gradient(scratch_frame& frame, const tensor_view<T, 2>& dh) const {
    return frame.take<T>(extents<2>{dh.extent(0), rank_});
  }
  /// Ends the backward pass of a tied output layer; called after that layer has added its part to
  /// weight_gradient(). From `drows`, the gradient of output_rows(h), computes dh = drows up^T (overwritten)
  /// and dup (+)= h^T drows; h, dh: N x width, dense, no overlap. Pops the rows that output_rows pushed onto
  /// the tape. Throws shape_error, and state_error for a moved-from layer or if the top of the tape is not a
  /// block of the size of `drows`.
  template <class Device>
  void output_backward(context<Device>& ctx, const tensor_view<const T, 2>& h, const tensor_view<T, 2>& drows,
                       const tensor_view<T, 2>& dh) const {
    check_not_moved(*this);
    check_output(h);
    if (drows.shape() != extents<2>{h.extent(0), rank_} || dh.shape() != h.shape()) {
      throw_error<shape_error>({describe(), ": gradients ", drows.shape(), " of the rows and ", dh.shape(),
                                " of h do not fit h ", h.shape(), " and rank ", rank_});
    }
    check_dense(*this, "drows", drows);
    check_dense(*this, "dh", dh);
    ctx.tape().template pop<T>(drows.shape());
    ctx.gradient_written(down_);
    const auto parameter = [&] {
      ops::linear_backward_weight<T>(ctx, drows, h, up_gradient(), up_.accumulate());
      ctx.gradient_written(up_);
    };
    ctx.in_parallel(parameter, [&] { ops::linear_forward<T>(ctx, drows, stored(up_), nullptr, dh); });
  }

  /// Draws random factors for training from scratch, each like a separate PyTorch layer: down like an
  /// embedding, N(0, 1); up like a linear layer, U(+-1/sqrt(rank)).
  void initialize(random_stream random) {
    fill_normal(down_.values(), 1.0, random.child("down.weight"));
    fill_fan_in(up_, rank_, random.child("up.weight"));
  }

  /// Calls f(name, parameter) for each parameter, in execution order: "down.weight", "up.weight".
  template <class F>
  void visit(F&& f) {
    f("down.weight", down_);
    f("up.weight", up_);
  }

 private:
  // A count x rank block on the tape in training, else in `frame`.
  template <class Device>
  tensor_view<T, 2> tape_or(context<Device>& ctx, scratch_frame& frame, index_t count) const {
    const extents<2> inner{count, rank_};
    return ctx.training() ? ctx.tape().template push<T>(inner) : frame.take<T>(inner);
  }
  void check_output(const tensor_view<const T, 2>& h) const {
    if (h.extent(1) != width_) {
      throw_error<shape_error>(
          {describe(), ": rows ", h.shape(), " of a tied output, not of width ", width_});
    }
    check_dense(*this, "h", h);
  }
  static logical_layout checked(index_t vocabulary, index_t width, index_t rank, std::int32_t padding) {
    check_table("LowRankEmbedding", vocabulary, width, padding);
    check_rank(message({"LowRankEmbedding ", vocabulary, " x ", width}), width, vocabulary, rank);
    return {2, {vocabulary, rank, 1, 1}, {rank, 1, 0, 0}};
  }
  static tensor_view<const T, 2> stored(const parameter<parameter_t<T>>& p) {
    return {p.template as<T>(), {p.layout().shape[1], p.layout().shape[0]}};
  }
  tensor_view<parameter_t<T>, 2> up_gradient() const { return {up_.gradient_data(), {rank_, width_}}; }

  index_t vocabulary_, width_, rank_;
  std::int32_t padding_;
  parameter<parameter_t<T>> down_, up_;
};

}  // namespace detail

/// An embedding whose table [vocabulary][width] is down up^T: `down` [vocabulary][rank] is a table of `rank`
/// numbers per token (the thin table), and `up` [width][rank] maps its rows to rows of `width` numbers. It
/// has rank (vocabulary + width) parameters. In PyTorch: nn.Embedding(vocabulary, rank), then nn.Linear(rank,
/// width, bias=False); the factorization of ALBERT (Lan et al., ICLR 2020, section 3.1).
///
///     LowRankEmbedding<float> table(8000, 400, 100);
///     table.initialize({1, 1});
///     table.forward(ctx, tokens, y);  // y: tokens x 400
///
/// An output layer tied to the table uses the same factors; see output_rows.
///
/// `Rank` fixes the rank in the type; with `dynamic_rank` the rank is a constructor argument. `padding` is a
/// token whose row of the thin table has zero gradient; no_token if there is none. A dense table has
/// vocabulary width parameters, so the factors are smaller if rank < vocabulary width / (vocabulary + width).
/// Copies are deep and belong to no network; gradients are not copied. Inference passes in different contexts
/// may share the layer; backward passes of one layer must not run at the same time.
template <class T, index_t Rank = dynamic_rank, class Device = device::cpu>
class LowRankEmbedding : public detail::stored_layer<detail::low_rank_embedding, T, Device> {
  using base = detail::stored_layer<detail::low_rank_embedding, T, Device>;
  PUFFERFISH_DETAIL_LOW_RANK_LAYER(LowRankEmbedding);

  /// The layer with all parameters zero. Throws shape_error for a size below 1, rank_error unless Rank <=
  /// min(vocabulary, width), value_error for a padding token outside the vocabulary.
  LowRankEmbedding(index_t vocabulary, index_t width,
                   std::int32_t padding = no_token) requires(detail::has_rank<T, Rank, Device>)
      : base(vocabulary, width, Rank, padding) {}
  /// Constructs the layer with a rank that is known at run time. Throws shape_error for a size below 1,
  /// rank_error unless 1 <= rank <= min(vocabulary, width), value_error for a padding token outside the
  /// vocabulary.
  LowRankEmbedding(index_t vocabulary, index_t width, index_t rank,
                   std::int32_t padding = no_token) requires(detail::takes_rank<T, Rank, Device>)
      : base(vocabulary, width, rank, padding) {}
};

PUFFERFISH_NAMESPACE_END
