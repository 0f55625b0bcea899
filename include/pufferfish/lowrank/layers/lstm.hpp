// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `LowRankLSTM`: an LSTM whose eight matrices (input and hidden side of four gates) are products up * down.
///
/// Parameters for d inputs, h outputs, ranks r_ih and r_hh; the gates are in PyTorch's order i, f, g, o:
///   weight_ih.down  [4 r_ih x d]     first factor of gate k: from row k r_ih on
///   weight_ih.up    [4 h x r_ih]     second factor of gate k: from row k h on
///   bias            [4 h]            one vector per gate (PyTorch's bias_ih + bias_hh)
///   weight_hh.down  [4 r_hh x h]
///   weight_hh.up    [4 h x r_hh]
/// Gate k's rows k h .. of PyTorch's weight_ih (see LSTM) are gate k's rows of `up` times those of `down`.

#include <array>
#include <cmath>
#include <optional>
#include <string>

#include <pufferfish/lowrank/layers/linear.hpp>
#include <pufferfish/lowrank/layers/lstm_core.hpp>
#include <pufferfish/lowrank/rank.hpp>
#include <pufferfish/ops/recurrent/step_product.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// One side (input or hidden) of a low-rank LSTM. The first factors of the gates are stored side by side,
/// [in][4 rank], so one product computes all four. The second factors are stored as [rank][4 hidden], one
/// block of columns per gate; as a matrix they are block diagonal. The outputs of the first factors are kept;
/// with merged matrices they are computed in the backward pass.
template <class T>
class low_rank_gates {
 public:
  /// Throws rank_error unless 1 <= rank <= min(in, hidden).
  low_rank_gates(const std::array<const char*, 2>& names, index_t in, index_t hidden, index_t rank)
      : names_(names),
        in_(in),
        hidden_(hidden),
        rank_(rank),
        down_(checked(names[0], in, hidden, rank), parameter_role::weight),
        up_(logical_layout::matrix(volume<2>({lstm_gates, hidden}), rank), parameter_role::weight) {}

  index_t rank() const { return rank_; }
  /// Number of values per row that a pass keeps: the outputs of all first factors.
  index_t kept_width() const { return lstm_gates * rank_; }
  /// Multiply-adds per row with both factors.
  index_t macs() const { return lstm_gates * rank_ * (in_ + hidden_); }

  /// First factor of one gate's matrix: [rank][in]. The view is of this object's memory, column-major: its
  /// row stride is 1. `gate`: 0 i, 1 f, 2 g, 3 o; not checked.
  tensor_view<parameter_t<T>, 2> down(index_t gate) { return gate_view(down_, gate, rank_, in_); }
  tensor_view<const parameter_t<T>, 2> down(index_t gate) const { return gate_view(down_, gate, rank_, in_); }
  /// Second factor of one gate's matrix: [hidden][rank]. The view is of this object's memory, column-major:
  /// its row stride is 1. `gate`: 0 i, 1 f, 2 g, 3 o; not checked.
  tensor_view<parameter_t<T>, 2> up(index_t gate) { return gate_view(up_, gate, hidden_, rank_); }
  tensor_view<const parameter_t<T>, 2> up(index_t gate) const { return gate_view(up_, gate, hidden_, rank_); }

  /// up * down of all gates, stacked by rows: [4 hidden][in]. Newly allocated.
  tensor<parameter_t<T>, 2> to_dense() const {
    tensor<parameter_t<T>, 2> dense({lstm_gates * hidden_, in_});
    stack_arena scratch;
    for (index_t gate = 0; gate < lstm_gates; ++gate) {
      native_gemm(scratch).multiply<parameter_t<T>>(up(gate), down(gate),
                                                    dense.view().slice(0, gate * hidden_, hidden_));
    }
    return dense;
  }

  /// For all rows at once: kept = x down (4 rank wide), and z = kept up + bias with one product per gate.
  /// kept and z are overwritten.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 2>& x, const T* bias,
               const tensor_view<T, 2>& kept, const tensor_view<T, 2>& z) const {
    ops::strided_product<T>(ctx, x, stored(down_), kept);
    ops::strided_products<T>(ctx, lstm_gates, gates<const T>(kept, rank_), gates(stored(up_), hidden_),
                             gates(z, hidden_), bias);
  }

  /// Whether passes over `steps` single steps of `batch` rows use the product up * down, because that is
  /// faster than two products with the factors.
  template <class Device>
  bool merges(index_t steps, index_t batch) const {
    return ops::step_operand<T, Device>::merges(steps, batch, lstm_gates * hidden_ * in_, macs());
  }

  /// The products of single steps, for the rows of one step: kept = x down, z += kept up. Prepares the
  /// weights for `steps` calls; the side and `frame` must outlive the object. Unless `merged` is null, it
  /// receives up * down of all gates, [in][4 hidden], and steps are z += x merged; kept is then left to
  /// backward_steps.
  template <class Device>
  class forward_steps {
    using operand = ops::step_operand<T, Device>;

   public:
    forward_steps(context<Device>& ctx, scratch_frame& frame, const low_rank_gates& side, index_t steps,
                  const tensor_view<T, 2>& merged)
        : merged_(merged),
          first_(ctx, frame, merges() ? side.merge(ctx, merged) : side.stored(side.down_), steps) {
      if (merges()) return;
      up_.emplace(ctx, frame, gates(side.stored(side.up_), side.hidden_).first, steps, lstm_gates,
                  side.hidden_);
    }
    void operator()(context<Device>& ctx, const tensor_view<const T, 2>& x, const tensor_view<T, 2>& kept,
                    const tensor_view<T, 2>& z) const {
      first_.multiply(ctx, x, merges() ? z : kept, merges());
      if (up_) up_->multiply(ctx, kept, z, true);
    }
    tensor_view<const T, 2> matrix() const { return merged_; }

   private:
    bool merges() const { return !merged_.is_null(); }

    tensor_view<const T, 2> merged_;
    operand first_;  // down, or up * down
    std::optional<operand> up_;
  };

  /// The backward products of single steps: dkept = dz up^T and, unless dx is null, dx = dkept down^T; with
  /// the merged matrix of forward_steps, dx = dz merged^T. After all steps finish() computes, from the rows
  /// of all steps, what merged matrices left out: kept and dkept.
  template <class Device>
  class backward_steps {
    using operand = ops::step_operand<T, Device>;

   public:
    backward_steps(context<Device>& ctx, scratch_frame& frame, const low_rank_gates& side, index_t steps,
                   const tensor_view<const T, 2>& merged)
        : side_(&side),
          merged_(merged),
          last_(ctx, frame, transpose(merged.is_null() ? side.stored(side.down_) : merged), steps) {
      if (!merged.is_null()) return;
      up_.emplace(ctx, frame, transpose(gates(side.stored(side.up_), side.hidden_).first), steps, lstm_gates,
                  side.hidden_);
    }
    void operator()(context<Device>& ctx, const tensor_view<const T, 2>& dz, const tensor_view<T, 2>& dkept,
                    const tensor_view<T, 2>& dx) const {
      if (up_) up_->multiply(ctx, dz, dkept, false);
      if (!dx.is_null()) last_.multiply(ctx, up_ ? dkept : dz, dx, false);
    }
    tensor_view<const T, 2> matrix() const { return merged_; }
    void finish(context<Device>& ctx, const tensor_view<const T, 2>& x, const tensor_view<T, 2>& kept,
                const tensor_view<const T, 2>& dz, const tensor_view<T, 2>& dkept) const {
      if (up_) return;
      ops::strided_product<T>(ctx, x, side_->stored(side_->down_), kept);
      side_->backward_kept(ctx, dz, dkept);
    }

   private:
    const low_rank_gates* side_;
    tensor_view<const T, 2> merged_;
    operand last_;  // down, or up * down
    std::optional<operand> up_;
  };

  /// Gradients of both factors from all rows: dup = kept^T dz for each gate, ddown = x^T dkept; overwritten,
  /// or added to if parameter::accumulate() is true.
  template <class Device>
  void backward_weight(context<Device>& ctx, const tensor_view<const T, 2>& x,
                       const tensor_view<const T, 2>& kept, const tensor_view<const T, 2>& dz,
                       const tensor_view<const T, 2>& dkept) const {
    ops::strided_weight_gradients<T>(ctx, lstm_gates, gates(kept, rank_), gates(dz, hidden_),
                                     gates(gradient(up_), hidden_), up_.accumulate());
    ctx.gradient_written(up_);
    ops::strided_weight_gradient<T>(ctx, x, dkept, gradient(down_), down_.accumulate());
    ctx.gradient_written(down_);
  }
  /// dkept = dz up^T for all rows.
  template <class Device>
  void backward_kept(context<Device>& ctx, const tensor_view<const T, 2>& dz,
                     const tensor_view<T, 2>& dkept) const {
    ops::strided_products<T>(ctx, lstm_gates, gates(dz, hidden_), transpose(gates(stored(up_), hidden_)),
                             gates(dkept, rank_));
  }
  /// dx = dkept down^T for all rows.
  template <class Device>
  void backward_input(context<Device>& ctx, const tensor_view<const T, 2>&,
                      const tensor_view<const T, 2>& dkept, const tensor_view<T, 2>& dx) const {
    ops::strided_product<T>(ctx, dkept, transpose(stored(down_)), dx);
  }

  /// Draws each factor of each gate from Xavier's uniform distribution.
  void initialize(random_stream random) {
    fill(down_, rank_ + in_, random.child("down"));
    fill(up_, hidden_ + rank_, random.child("up"));
  }

  template <class F>
  void visit(F&& f) {
    f(names_[0], down_);
    f(names_[1], up_);
  }

 private:
  /// Writes up * down of all gates as one matrix, [in][4 hidden], to `result`, and returns it.
  template <class Device>
  tensor_view<const T, 2> merge(context<Device>& ctx, const tensor_view<T, 2>& result) const {
    ops::strided_products<T>(ctx, lstm_gates, gates(stored(down_), rank_), gates(stored(up_), hidden_),
                             gates(result, hidden_));
    return result;
  }
  static logical_layout checked(const char* name, index_t in, index_t hidden, index_t rank) {
    check_rank(message({"LowRankLSTM, ", name}), hidden, in, rank);
    return logical_layout::matrix(volume<2>({lstm_gates, rank}), in);
  }
  static void fill(parameter<parameter_t<T>>& p, index_t fans, random_stream random) {
    const double bound = std::sqrt(6.0 / static_cast<double>(fans));
    fill_uniform(p.values(), -bound, bound, random);
  }
  /// The gates of a matrix that stores them side by side, `width` columns each.
  template <class U>
  static ops::column_blocks<U> gates(const tensor_view<U, 2>& all, index_t width) {
    return ops::column_blocks<U>::of(all, width);
  }
  template <class Parameter>
  static auto gate_view(Parameter& p, index_t gate, index_t rows, index_t cols) {
    using element = std::remove_pointer_t<decltype(p.data())>;
    return tensor_view<element, 2>(p.data() + gate * rows, {rows, cols}, {1, lstm_gates * rows});
  }
  static tensor_view<const T, 2> stored(const parameter<parameter_t<T>>& p) {
    return {p.template as<T>(), {p.layout().shape[1], p.layout().shape[0]}};
  }
  static tensor_view<parameter_t<T>, 2> gradient(const parameter<parameter_t<T>>& p) {
    return {p.gradient_data(), {p.layout().shape[1], p.layout().shape[0]}};
  }

  std::array<const char*, 2> names_;
  index_t in_, hidden_, rank_;
  parameter<parameter_t<T>> down_, up_;
};

/// The implementation of LowRankLSTM for any ranks.
template <class T>
class low_rank_lstm : public lstm_core<T, low_rank_gates<T>> {
  using core = lstm_core<T, low_rank_gates<T>>;
  using gates = low_rank_gates<T>;

 public:
  static constexpr auto low_rank_kind = layer_kind::lstm;

  /// All parameters are zero. Throws rank_error unless 1 <= input_rank <= min(input, hidden) and 1 <=
  /// hidden_rank <= hidden; a size below 1 has no valid rank.
  low_rank_lstm(index_t input, index_t hidden, index_t input_rank, index_t hidden_rank)
      : core("LowRankLSTM", input, hidden,
             gates({"weight_ih.down", "weight_ih.up"}, input, hidden, input_rank),
             gates({"weight_hh.down", "weight_hh.up"}, hidden, hidden, hidden_rank)) {}

  index_t input_rank() const { return this->input_side().rank(); }
  index_t hidden_rank() const { return this->hidden_side().rank(); }

  /// First factor [input_rank][input] of the input side of one gate (0 i, 1 f, 2 g, 3 o; not checked), a view
  /// of the layer's own memory with row stride 1. It is valid until the layer is destroyed, moved, or bound
  /// to the arena of a network. Writing to it changes the layer. Throws state_error for a moved-from layer.
  tensor_view<parameter_t<T>, 2> input_down(index_t gate) { return this->input_side().down(gate); }
  tensor_view<const parameter_t<T>, 2> input_down(index_t gate) const {
    return this->input_side().down(gate);
  }
  /// Second factor [hidden][input_rank] of the input side of one gate; otherwise the contract of input_down.
  tensor_view<parameter_t<T>, 2> input_up(index_t gate) { return this->input_side().up(gate); }
  tensor_view<const parameter_t<T>, 2> input_up(index_t gate) const { return this->input_side().up(gate); }
  /// First factor [hidden_rank][hidden] of the hidden side of one gate; otherwise the contract of input_down.
  tensor_view<parameter_t<T>, 2> hidden_down(index_t gate) { return this->hidden_side().down(gate); }
  tensor_view<const parameter_t<T>, 2> hidden_down(index_t gate) const {
    return this->hidden_side().down(gate);
  }
  /// Second factor [hidden][hidden_rank] of the hidden side of one gate; otherwise the contract of
  /// input_down.
  tensor_view<parameter_t<T>, 2> hidden_up(index_t gate) { return this->hidden_side().up(gate); }
  tensor_view<const parameter_t<T>, 2> hidden_up(index_t gate) const { return this->hidden_side().up(gate); }

  /// PyTorch's weight_ih [4 hidden][input] of the equivalent dense layer. Newly allocated; computed in the
  /// calling thread with 4 hidden input input_rank multiply-adds.
  tensor<parameter_t<T>, 2> input_to_dense() const { return this->input_side().to_dense(); }
  /// PyTorch's weight_hh [4 hidden][hidden] of the equivalent dense layer. Newly allocated; computed in the
  /// calling thread with 4 hidden hidden hidden_rank multiply-adds.
  tensor<parameter_t<T>, 2> hidden_to_dense() const { return this->hidden_side().to_dense(); }

  std::string describe() const override {
    const index_t in = input_rank(), hidden = hidden_rank();
    return message({"LowRankLSTM ", this->input_size(), " -> ", this->hidden_size(),
                    in == hidden ? ", rank " : ", ranks ", in,
                    in == hidden ? std::string() : " and " + std::to_string(hidden)});
  }
};

}  // namespace detail

/// An LSTM input -> hidden with eight matrices up * down. Each side has its own rank; each gate has one bias
/// vector; there is no nonlinearity between the factors (Wang et al., Pufferfish, MLSys 2021, section 2):
///   z = W_ih x + W_hh h + b;  i, f, o = sigmoid(z_i), sigmoid(z_f), sigmoid(z_o);  g = tanh(z_g)
///   c' = f c + i g;  h' = o tanh(c')
///
/// `Rank` fixes the rank of both sides in the type; with `dynamic_rank` the ranks are constructor arguments.
/// The weights number 4 input_rank (input + hidden) + 8 hidden_rank hidden, and there are 4 hidden biases;
/// the dense layer has 4 hidden (input + hidden) weights. Each step needs as many multiply-adds per sequence
/// as there are weights, or 4 hidden^2 for the hidden side if a device multiplies it by merged matrices.
///
/// \code
/// cpu_context ctx;
/// LowRankLSTM<float> layer(650, 650, 160, 160);  // input, hidden, input rank, hidden rank
/// layer.initialize({1, 1});
/// tensor<float, 3> x({35, 20, 650}), y({35, 20, 650});  // steps x batch x features
/// layer.forward(ctx, x.view(), {}, y.view());           // from a zero state
/// \endcode
///
/// Passes, states, aliasing and errors: see recurrent_layer. Names of the parameters: see the top of this
/// file. Copies are deep and belong to no network; gradients are not copied.
template <class T, index_t Rank = dynamic_rank, class Device = device::cpu>
class LowRankLSTM : public detail::stored_layer<detail::low_rank_lstm, T, Device> {
  using base = detail::stored_layer<detail::low_rank_lstm, T, Device>;
  PUFFERFISH_DETAIL_LOW_RANK_LAYER(LowRankLSTM);

  /// The layer with all parameters zero. Throws rank_error unless Rank <= min(input, hidden), also for a size
  /// below 1.
  LowRankLSTM(index_t input, index_t hidden) requires(detail::has_rank<T, Rank, Device>)
      : base(input, hidden, Rank, Rank) {}
  /// Constructs the layer with ranks that are known at run time. Throws rank_error unless 1 <= input_rank <=
  /// min(input, hidden) and 1 <= hidden_rank <= hidden.
  LowRankLSTM(index_t input, index_t hidden, index_t input_rank,
              index_t hidden_rank) requires(detail::takes_rank<T, Rank, Device>)
      : base(input, hidden, input_rank, hidden_rank) {}
};

PUFFERFISH_NAMESPACE_END
