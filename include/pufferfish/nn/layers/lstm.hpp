// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `LSTM`: the dense layer, and the layer_traits by which it is factorized.
///
/// Parameters, for d inputs and h outputs; gates in PyTorch's order i, f, g, o, stacked by rows:
///   weight_ih  [4 h x d]   PyTorch's weight_ih (LSTMCell), weight_ih_l0 (LSTM)
///   bias       [4 h]       one vector per gate: PyTorch's bias_ih + bias_hh
///   weight_hh  [4 h x h]

#include <array>
#include <cmath>
#include <string>

#include <pufferfish/lowrank/factorization/factorize.hpp>
#include <pufferfish/lowrank/layers/lstm.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The weights of one side (input or hidden) of a dense LSTM: the matrices of the gates side by side, stored
/// [in][4 hidden]. Implements the interface `Side` of lstm_core.hpp. It keeps no values for the backward
/// pass.
template <class T>
class dense_gates {
 public:
  /// Makes weights of zeros for `in` inputs; `name`: of the parameter.
  dense_gates(const char* name, index_t in, index_t hidden)
      : name_(name),
        in_(in),
        hidden_(hidden),
        weight_(logical_layout::matrix(volume<2>({lstm_gates, hidden}), in), parameter_role::weight) {}

  /// Nothing is kept for the backward pass. A step costs a multiply-add for each weight.
  index_t kept_width() const { return 0; }
  index_t macs() const { return weight_.size(); }

  /// The matrices of all gates as [4 hidden][in], a view of this object's memory.
  tensor_view<parameter_t<T>, 2> weight() {
    return {weight_.data(), {lstm_gates * hidden_, in_}, {1, lstm_gates * hidden_}};
  }
  tensor_view<const parameter_t<T>, 2> weight() const {
    return {weight_.data(), {lstm_gates * hidden_, in_}, {1, lstm_gates * hidden_}};
  }
  /// The matrix of one gate, [hidden][in]. `gate`: 0 i, 1 f, 2 g, 3 o; not checked.
  tensor_view<const parameter_t<T>, 2> weight(index_t gate) const {
    return weight().slice(0, gate * hidden_, hidden_);
  }

  // z = W x + b for all rows of x.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 2>& x, const T* bias,
               const tensor_view<T, 2>&, const tensor_view<T, 2>& z) const {
    ops::strided_product<T>(ctx, x, stored(), z, false, bias);
  }

  // Dense weights are not merged: they have one matrix already.
  template <class Device>
  bool merges(index_t, index_t) const {
    return false;
  }

  // z += W x for the rows of one step. The weight is packed once for all steps.
  template <class Device>
  class forward_steps {
   public:
    forward_steps(context<Device>& ctx, scratch_frame& frame, const dense_gates& side, index_t steps,
                  const tensor_view<T, 2>&)
        : matrix_(side.stored()), weight_(ctx, frame, matrix_, steps) {}
    tensor_view<const T, 2> matrix() const { return matrix_; }
    void operator()(context<Device>& ctx, const tensor_view<const T, 2>& x, const tensor_view<T, 2>&,
                    const tensor_view<T, 2>& z) const {
      weight_.multiply(ctx, x, z, true);
    }

   private:
    tensor_view<const T, 2> matrix_;
    ops::step_operand<T, Device> weight_;
  };

  // dx = W^T dz for the rows of one step. The weight is packed once for all steps.
  template <class Device>
  class backward_steps {
   public:
    backward_steps(context<Device>& ctx, scratch_frame& frame, const dense_gates& side, index_t steps,
                   const tensor_view<const T, 2>&)
        : matrix_(side.stored()), weight_(ctx, frame, transpose(matrix_), steps) {}
    tensor_view<const T, 2> matrix() const { return matrix_; }
    void operator()(context<Device>& ctx, const tensor_view<const T, 2>& dz, const tensor_view<T, 2>&,
                    const tensor_view<T, 2>& dx) const {
      if (!dx.is_null()) weight_.multiply(ctx, dz, dx, false);
    }
    void finish(context<Device>&, const tensor_view<const T, 2>&, const tensor_view<T, 2>&,
                const tensor_view<const T, 2>&, const tensor_view<T, 2>&) const {}

   private:
    tensor_view<const T, 2> matrix_;
    ops::step_operand<T, Device> weight_;
  };

  // The gradient of W, dz^T x, over all rows at once.
  template <class Device>
  void backward_weight(context<Device>& ctx, const tensor_view<const T, 2>& x, const tensor_view<const T, 2>&,
                       const tensor_view<const T, 2>& dz, const tensor_view<const T, 2>&) const {
    ctx.rows()(weight_, row_kind::input, x);
    ctx.rows()(weight_, row_kind::output_gradient, dz);
    ops::strided_weight_gradient<T>(ctx, x, dz, {weight_.gradient_data(), stored().shape()},
                                    weight_.accumulate());
    ctx.gradient_written(weight_);
  }
  template <class Device>
  void backward_kept(context<Device>&, const tensor_view<const T, 2>&, const tensor_view<T, 2>&) const {}
  // dx = W^T dz for all rows.
  template <class Device>
  void backward_input(context<Device>& ctx, const tensor_view<const T, 2>& dz, const tensor_view<const T, 2>&,
                      const tensor_view<T, 2>& dx) const {
    ops::strided_product<T>(ctx, dz, transpose(stored()), dx);
  }

  // Uniform in +-sqrt(6 / (in + hidden)): Xavier's distribution for the matrix of one gate.
  void initialize(random_stream random) {
    const double bound = std::sqrt(6.0 / static_cast<double>(in_ + hidden_));
    fill_uniform(weight_.values(), -bound, bound, random);
  }

  template <class F>
  void visit(F&& f) {
    f(name_, weight_);
  }

 private:
  tensor_view<const T, 2> stored() const { return {weight_.template as<T>(), {in_, lstm_gates * hidden_}}; }

  const char* name_;
  index_t in_, hidden_;
  parameter<parameter_t<T>> weight_;
};

}  // namespace detail

/// An LSTM input -> hidden:
///   z = W_ih x + W_hh h + b;  i, f, o = sigmoid(z_i), sigmoid(z_f), sigmoid(z_o);  g = tanh(z_g)
///   c' = f c + i g;  h' = o tanh(c')
/// (Hochreiter, Schmidhuber, Neural Computation 9(8), 1997, with a forget gate).
///
/// The passes, the state, their aliasing and their errors are those of recurrent_layer. A pass over `steps`
/// steps computes the products with W_ih for all steps at once and those with W_hh step by step. In training
/// it keeps gates and cells of every step on the tape.
///
/// \code
/// LSTM<float> layer(64, 128);
/// layer.initialize({1, 1});
/// tensor<float, 3> x({35, 20, 64}), y({35, 20, 128});  // steps x batch x features
/// tensor<float, 2> h({20, 128}), c({20, 128});         // zeros
/// const recurrent_state<float> state{h, c};
/// layer.forward(ctx, x.view(), state, y.view(), state);  // the state is updated in place
/// \endcode
template <class T>
class LSTM : public detail::lstm_core<T, detail::dense_gates<T>> {
  using gates = detail::dense_gates<T>;

 public:
  /// Throws shape_error for a size below 1. Parameters are zero until initialize().
  LSTM(index_t input, index_t hidden)
      : detail::lstm_core<T, gates>("LSTM", input, hidden,
                                    gates("weight_ih", checked(input), checked(hidden)),
                                    gates("weight_hh", checked(hidden), checked(hidden))) {}

  /// PyTorch's weight_ih [4 hidden][input], a view of the layer's memory. Rows k hidden .. (k + 1) hidden - 1
  /// belong to gate k in the order i, f, g, o.
  tensor_view<parameter_t<T>, 2> input_weight() { return this->input_side().weight(); }
  tensor_view<const parameter_t<T>, 2> input_weight() const { return this->input_side().weight(); }
  /// PyTorch's weight_hh [4 hidden][hidden], a view of the layer's memory, with the rows in the order of
  /// input_weight().
  tensor_view<parameter_t<T>, 2> hidden_weight() { return this->hidden_side().weight(); }
  tensor_view<const parameter_t<T>, 2> hidden_weight() const { return this->hidden_side().weight(); }

  /// Text for errors: "LSTM input -> hidden".
  std::string describe() const override {
    return detail::message({"LSTM ", this->input_size(), " -> ", this->hidden_size()});
  }

 private:
  // The base class throws for an invalid size; until then the parameters need a valid one.
  static index_t checked(index_t size) { return std::max<index_t>(size, 1); }
};

/// Gives svd_factorize access to the matrices and biases of an LSTM, as views of the layer's memory.
template <class T>
struct layer_traits<LSTM<T>> {
  static constexpr auto kind = layer_kind::lstm;
  /// One matrix per side and gate: the input side first, gates in the order i, f, g, o.
  static auto matrices(const LSTM<T>& layer) {
    const auto of = [](const tensor_view<const parameter_t<T>, 2>& all, index_t gate) {
      const index_t hidden = all.extent(0) / lstm_gates;
      return all.slice(0, gate * hidden, hidden);
    };
    const auto input = layer.input_weight(), hidden = layer.hidden_weight();
    using view = named_view<const parameter_t<T>, 2>;
    return std::array{view{"weight_ii", of(input, 0)},  view{"weight_if", of(input, 1)},
                      view{"weight_ig", of(input, 2)},  view{"weight_io", of(input, 3)},
                      view{"weight_hi", of(hidden, 0)}, view{"weight_hf", of(hidden, 1)},
                      view{"weight_hg", of(hidden, 2)}, view{"weight_ho", of(hidden, 3)}};
  }
  /// One bias per gate, in the order i, f, g, o.
  static auto biases(const LSTM<T>& layer) {
    const index_t hidden = layer.hidden_size();
    const auto of = [&](index_t gate) { return layer.bias().slice(0, gate * hidden, hidden); };
    using view = named_view<const parameter_t<T>, 1>;
    return std::array{view{"bias_i", of(0)}, view{"bias_f", of(1)}, view{"bias_g", of(2)},
                      view{"bias_o", of(3)}};
  }
};

PUFFERFISH_NAMESPACE_END
