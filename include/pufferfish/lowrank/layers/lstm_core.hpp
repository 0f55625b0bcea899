// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the common part of dense and low-rank LSTM layers: everything except the matrices. A `Side` is
/// the matrix of one input of the gates (x or the previous h), dense or factorized. It maps rows of `in`
/// numbers to preactivations, rows of 4 hidden numbers:
///
///     class ExampleSide {                                   // copyable
///      public:
///       index_t kept_width() const;                         // numbers per row kept for the backward pass
///       template <class Device>
///       bool merges(steps, batch) const;                    // whether single steps use one merged matrix
///       template <class Device>
///       class forward_steps, backward_steps;                // (ctx, scratch frame, side, steps, merged)
///
///       // z = side(x) + bias, all rows at once.
///       void forward(context&, x, bias, kept, z) const;
///       // Of forward_steps: z += side(x) for the rows of one step. Its constructor writes the product of
///       // the factors to `merged` [in x 4 hidden] unless that is null.
///       void operator()(context&, x, kept, z) const;
///       // Of both: the matrix of single steps [in x 4 hidden]; a null view if they use two factors.
///       tensor_view<const T, 2> matrix() const;
///       // Of backward_steps: computes dx = side'(dz) and dkept, the gradient of kept, for one step.
///       void operator()(context&, dz, dkept, dx) const;
///       // Of backward_steps: computes kept and dkept for all rows if the calls did not.
///       void finish(context&, x, kept, dz, dkept) const;
///       // Gradients of the matrices, all rows at once.
///       void backward_weight(context&, x, kept, dz, dkept) const;
///       // Gradients of kept and of the input, all rows at once.
///       void backward_kept(context&, dz, dkept) const;
///       void backward_input(context&, dz, dkept, dx) const;
///     };

#include <algorithm>
#include <string>
#include <utility>

#include <pufferfish/core/tensor.hpp>
#include <pufferfish/lowrank/layers/lstm_kept.hpp>
#include <pufferfish/lowrank/layers/recurrent.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/ops/copy/rows.hpp>
#include <pufferfish/ops/linear/column_sums.hpp>
#include <pufferfish/ops/recurrent/lstm.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// i, f, o = sigmoid(z), g = tanh(z) with z = W_ih x + W_hh h + b; c' = f c + i g; h' = o tanh(c'). Each gate
/// has one bias vector; the gates i, f, g, o are stored side by side.
template <class T, class Side>
class lstm_core : public recurrent_layer<T> {
 public:
  using kept_values = lstm_kept<T>;
  bool is_moved_from() const { return bias_.is_moved_from(); }
  index_t input_kept_width() const { return input_side_.kept_width(); }
  index_t hidden_kept_width() const { return hidden_side_.kept_width(); }

  /// The forward pass of recurrent_layer: y and the state `after` from x and the state `before`.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 3>& x, const recurrent_state<const T>& before,
               const tensor_view<T, 3>& y, const recurrent_state<T>& after = {}) const {
    check_views(x, y);
    this->check_state(x.extent(1), before);
    this->check_state(x.extent(1), recurrent_state<const T>(after));
    const lstm_shapes size{x.extent(0), x.extent(1), this->hidden_size()};
    scratch_frame frame(ctx.scratch());
    const index_t merged = hidden_side_.template merges<Device>(size.steps, size.batch) ? size.hidden : 0;
    const auto kept = kept_values::take(ctx, frame, size, !before.is_null(),
                                        {input_kept_width(), hidden_kept_width(), merged});
    if (!before.is_null()) {
      ops::copy_rows<T>(ctx, before.h, kept.h_before);
      ops::copy_rows<T>(ctx, before.c, kept.c_before);
    }
    compute_forward(ctx, x, kept, y, after);
    if (ctx.training()) ctx.tape().push_value(*this, kept_views{x, y, kept});
  }
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 3>& dy, const tensor_view<T, 3>& dx,
                const recurrent_state<const T>& from_after = {},
                const recurrent_state<T>& to_before = {}) const {
    check_gradients(dy, dx, from_after, to_before);
    const auto views = ctx.tape().template pop_value<kept_views>(*this);
    if (dy.shape() != views.y.shape()) {
      throw_error<shape_error>({this->describe(), ": the gradient of the output is ", dy.shape(),
                                ", the output ", views.y.shape()});
    }
    views.kept.give_back(ctx);
    compute_backward(ctx, views, dy, dx, from_after, to_before);
  }

  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    forward(ctx, this->sequence("x", x), recurrent_state<const T>(), this->sequence("y", y));
  }
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    backward(ctx, this->sequence("dy", dy), dx.is_null() ? tensor_view<T, 3>() : this->sequence("dx", dx));
  }

  /// Computes the forward pass with a newly allocated result. In training, the backward pass reads the result
  /// y, which must exist until then.
  [[nodiscard]] tensor<T, 3> forward(context<device::cpu>& ctx, const tensor_view<const T, 3>& x,
                                     const recurrent_state<const T>& before = {},
                                     const recurrent_state<T>& after = {}) const {
    tensor<T, 3> y({x.extent(0), x.extent(1), this->hidden_size()});
    forward(ctx, x, before, y.view(), after);
    return y;
  }
  [[nodiscard]] tensor<T, 4> forward(context<device::cpu>& ctx, const tensor_view<const T, 4>& x) const {
    tensor<T, 4> y(this->output_shape(x.shape()));
    forward(ctx, x, y.view());
    return y;
  }
  tensor<T, 3> backward(context<device::cpu>& ctx, const tensor_view<const T, 3>& dy,
                        const recurrent_state<const T>& from_after = {},
                        const recurrent_state<T>& to_before = {}) const {
    tensor<T, 3> dx(ctx.tape().template top_value<kept_views>(*this).x.shape());
    backward(ctx, dy, dx.view(), from_after, to_before);
    return dx;
  }
  tensor<T, 4> backward(context<device::cpu>& ctx, const tensor_view<const T, 4>& dy) const {
    tensor<T, 4> dx({dy.extent(0), dy.extent(1), 1, this->input_size()});
    backward(ctx, dy, dx.view());
    return dx;
  }

  /// Computes the forward pass without the tape, for programs that store the kept values themselves. Reads
  /// `kept.h_before` and `c_before`, writes the rest of `kept`. Without a backward pass `kept.cells` may have
  /// one step's rows. If `kept.merged` is null, factors are not merged.
  template <class Device>
  void forward_keeping(context<Device>& ctx, const tensor_view<const T, 3>& x, const kept_values& kept,
                       const tensor_view<T, 3>& y, const recurrent_state<T>& after) const {
    check_views(x, y);
    this->check_state(x.extent(1), recurrent_state<T>{kept.h_before, kept.c_before});
    this->check_state(x.extent(1), recurrent_state<const T>(after));
    compute_forward(ctx, x, kept, y, after);
  }
  /// The backward pass of forward_keeping, with the same x, y and `kept`. Overwrites `kept.gates`.
  template <class Device>
  void backward_kept(context<Device>& ctx, const tensor_view<const T, 3>& x, const tensor_view<const T, 3>& y,
                     const kept_values& kept, const tensor_view<const T, 3>& dy, const tensor_view<T, 3>& dx,
                     const recurrent_state<const T>& from_after = {},
                     const recurrent_state<T>& to_before = {}) const {
    check_gradients(dy, dx, from_after, to_before);
    compute_backward(ctx, {x, y, kept}, dy, dx, from_after, to_before);
  }

  /// The biases of the four gates, concatenated: 4 hidden elements.
  tensor_view<parameter_t<T>, 1> bias() { return {bias_.data(), {bias_.size()}}; }
  tensor_view<const parameter_t<T>, 1> bias() const { return {bias_.data(), {bias_.size()}}; }

  /// Multiply-accumulates for an input steps x batch x 1 x input.
  index_t macs(const extents<4>& input) const {
    return input[0] * input[1] * (input_side_.macs() + hidden_side_.macs());
  }

  /// Calls f(name, parameter) for each parameter, in execution order.
  template <class F>
  void visit(F&& f) {
    input_side_.visit(f);
    f("bias", bias_);
    hidden_side_.visit(f);
  }

  /// Draws every matrix of every gate from Xavier's uniform distribution, with zero biases, as in the
  /// language model of Wang et al. (Pufferfish, MLSys 2021).
  void initialize(random_stream random) {
    input_side_.initialize(random.child("weight_ih"));
    hidden_side_.initialize(random.child("weight_hh"));
    std::fill_n(bias_.data(), bias_.size(), parameter_t<T>{});
  }

 protected:
  lstm_core(const char* name, index_t input, index_t hidden, Side input_side, Side hidden_side)
      : recurrent_layer<T>(name, input, hidden),
        input_side_(std::move(input_side)),
        hidden_side_(std::move(hidden_side)),
        bias_(logical_layout::vector(volume<2>({lstm_gates, hidden})), parameter_role::bias) {}

  const Side& input_side() const { return input_side_; }
  Side& input_side() { return input_side_; }
  const Side& hidden_side() const { return hidden_side_; }
  Side& hidden_side() { return hidden_side_; }

 private:
  void check_views(const tensor_view<const T, 3>& x, const tensor_view<const T, 3>& y) const {
    check_not_moved(*this);
    this->check(x.shape(), y.shape());
    check_dense(*this, "x", x);
    check_dense(*this, "y", y);
  }
  void check_gradients(const tensor_view<const T, 3>& dy, const tensor_view<T, 3>& dx,
                       const recurrent_state<const T>& from_after,
                       const recurrent_state<T>& to_before) const {
    check_not_moved(*this);
    this->check(dx.is_null() ? extents<3>{dy.extent(0), dy.extent(1), this->input_size()} : dx.shape(),
                dy.shape());
    check_dense(*this, "dy", dy);
    check_dense_if_wanted(*this, "dx", dx);
    this->check_state(dy.extent(1), from_after);
    this->check_state(dy.extent(1), recurrent_state<const T>(to_before));
  }

  struct kept_views {
    tensor_view<const T, 3> x, y;
    kept_values kept;
  };

  // The input side of all steps is one product; the hidden side is one small product per step.
  template <class Device>
  void compute_forward(context<Device>& ctx, const tensor_view<const T, 3>& x, const kept_values& kept,
                       const tensor_view<T, 3>& y, const recurrent_state<T>& after) const {
    const lstm_shapes size{x.extent(0), x.extent(1), this->hidden_size()};
    scratch_frame frame(ctx.scratch());
    input_side_.forward(ctx, size.rows_of(x), bias_.template as<T>(), kept.input, kept.gates);
    const typename Side::template forward_steps<Device> add_hidden(ctx, frame, hidden_side_, size.steps,
                                                                   kept.merged);
    const bool computed =
        ops::lstm_forward_steps<T>(ctx, kept.sequence(size, add_hidden.matrix()), size.rows_of(y));
    for (index_t t = 0; t < size.steps && !computed; ++t) {
      const tensor_view<const T, 2> h = t == 0 ? kept.h_before : size.step_of(y, t - 1);
      if (!h.is_null()) add_hidden(ctx, h, size.at(kept.hidden, t), size.at(kept.gates, t));
      ops::lstm_forward<T>(ctx, size.at(kept.gates, t), t == 0 ? kept.c_before : kept.cell(size, t - 1),
                           kept.cell(size, t), size.step_of(y, t));
    }
    if (!after.is_null()) {
      store(ctx, size.steps == 0 ? tensor_view<const T, 2>(kept.h_before) : size.step_of(y, size.steps - 1),
            after.h);
      store(ctx, size.steps == 0 ? kept.c_before : kept.cell(size, size.steps - 1), after.c);
    }
  }

  // From the last step to the first: gate gradients overwrite kept.gates; then all weight gradients in wide
  // products.
  template <class Device>
  void compute_backward(context<Device>& ctx, const kept_views& views, const tensor_view<const T, 3>& dy,
                        const tensor_view<T, 3>& dx, const recurrent_state<const T>& from_after,
                        const recurrent_state<T>& to_before) const {
    const kept_values& kept = views.kept;
    const lstm_shapes size{views.x.extent(0), views.x.extent(1), this->hidden_size()};
    scratch_frame frame(ctx.scratch());
    const auto take = [&frame](index_t rows, index_t columns) {
      return take_rows<T, Device>(rows, columns, [&](index_t count) { return frame.take<T>(count); });
    };
    const tensor_view<T, 2> dh = take(size.batch, size.hidden), dc = take(size.batch, size.hidden);
    const tensor_view<T, 2> dkept = take(size.rows(), hidden_side_.kept_width());
    if (!from_after.is_null()) {
      ops::copy_rows<T>(ctx, from_after.h, dh);
      ops::copy_rows<T>(ctx, from_after.c, dc);
    } else if (size.steps == 0) {
      ops::clear_rows<T>(ctx, dh);
      ops::clear_rows<T>(ctx, dc);
    }
    const bool wanted = !to_before.is_null();
    const typename Side::template backward_steps<Device> through_hidden(ctx, frame, hidden_side_, size.steps,
                                                                        kept.merged);
    const tensor_view<const T, 2> nothing;
    const bool given = !from_after.is_null();
    const tensor_view<T, 2> none;
    const bool computed = ops::lstm_backward_steps<T>(
        ctx, kept.sequence(size, through_hidden.matrix()), size.rows_of(dy), given ? dh : nothing,
        given ? dc : nothing, wanted ? dh : none, wanted ? dc : none);
    for (index_t t = computed ? 0 : size.steps; t-- > 0;) {
      const bool last = t + 1 == size.steps && !given;
      ops::lstm_backward<T>(ctx, size.at(kept.gates, t), t == 0 ? kept.c_before : kept.cell(size, t - 1),
                            kept.cell(size, t), size.step_of(dy, t), last ? nothing : dh, last ? nothing : dc,
                            dc);
      if (t > 0 || wanted || !kept.h_before.is_null()) {
        through_hidden(ctx, size.at(kept.gates, t), size.at(dkept, t),
                       t > 0 || wanted ? dh : tensor_view<T, 2>());
      }
    }
    if (wanted) {
      ops::copy_rows<T>(ctx, dh, to_before.h);
      ops::copy_rows<T>(ctx, dc, to_before.c);
    }
    const tensor_view<const T, 2> dz = kept.gates;
    const tensor_view<T, 2> dinput = take(size.rows(), input_side_.kept_width());
    input_side_.backward_kept(ctx, dz, dinput);
    const auto parameters = [&] {
      backward_hidden_weight(ctx, size, views, through_hidden, dz, dkept);
      ops::column_sums<T>(ctx, dz, bias_.gradient_data(), bias_.accumulate());
      ctx.gradient_written(bias_);
      input_side_.backward_weight(ctx, size.rows_of(views.x), kept.input, dz, dinput);
    };
    if (dx.is_null()) return parameters();
    ctx.in_parallel(parameters, [&] { input_side_.backward_input(ctx, dz, dinput, size.rows_of(dx)); });
  }

  // The hidden side's input in step t is the hidden state before that step: h_before for t = 0, else row
  // block t - 1 of y.
  template <class Device, class Steps>
  void backward_hidden_weight(context<Device>& ctx, const lstm_shapes& size, const kept_views& views,
                              const Steps& single_steps, const tensor_view<const T, 2>& dz,
                              const tensor_view<T, 2>& dkept) const {
    const tensor_view<const T, 2> y = size.rows_of(views.y);
    const bool state = !views.kept.h_before.is_null() && size.steps > 0;
    const index_t first = state ? 0 : std::min(size.batch, size.rows()), rows = size.rows() - first;
    scratch_frame frame(ctx.scratch());
    tensor_view<const T, 2> h = y.slice(0, 0, rows);
    if (state) {
      const tensor_view<T, 2> all =
          take_rows<T, Device>(size.rows(), size.hidden, [&](index_t count) { return frame.take<T>(count); });
      ops::copy_rows<T>(ctx, views.kept.h_before, all.slice(0, 0, size.batch));
      ops::copy_rows<T>(ctx, y.slice(0, 0, rows - size.batch), all.slice(0, size.batch, rows - size.batch));
      h = all;
    }
    const auto own = [&](const auto& all) { return all.slice(0, first, rows); };
    single_steps.finish(ctx, h, own(views.kept.hidden), own(dz), own(dkept));
    hidden_side_.backward_weight(ctx, h, own(views.kept.hidden), own(dz), own(dkept));
  }

  template <class Device>
  static void store(context<Device>& ctx, const tensor_view<const T, 2>& from, const tensor_view<T, 2>& to) {
    from.is_null() ? ops::clear_rows<T>(ctx, to) : ops::copy_rows<T>(ctx, from, to);
  }

  Side input_side_, hidden_side_;
  parameter<parameter_t<T>> bias_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
