// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `Linear`: the dense fully connected layer.

#include <array>
#include <span>
#include <utility>

#include <pufferfish/lowrank/factorization/factorize.hpp>
#include <pufferfish/lowrank/layers/layer_group.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/ops/linear/relu_bias.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Fully connected layer over rows, the last dimension of its input: y = W x + b for each row x, that is
///
///     y(m, o) = b(o) + sum over i of W(o, i) x(m, i)
///
/// W is out x in, stored [in][out]. T is the scalar of activations and products; parameters are stored as
/// parameter_t<T>. In a network the layer takes images N x H x W x in as N H W rows.
///
/// Every pass throws state_error if the layer was moved from. The forward pass keeps a view of x on the tape,
/// no copy.
///
/// \code
/// Linear<float> layer(8, 5);
/// layer.initialize({1, 1});  // seed, stream
/// cpu_context ctx;
/// ctx.set_mode(run_mode::training);
/// tensor<float, 2> x({3, 8}), y({3, 5}), dy({3, 5}), dx({3, 8});
/// layer.forward(ctx, x, y.view());
/// layer.backward(ctx, dy, dx.view());
/// \endcode
template <class T>
class Linear {
 public:
  using value_type = T;
  static constexpr bool reads_output = false;

  /// Throws shape_error unless both sizes are positive. Parameters are zero until initialize().
  Linear(index_t in, index_t out, bool bias = true)
      : in_(in),
        out_(out),
        weight_(checked(in, out), parameter_role::weight),
        bias_(logical_layout::vector(bias ? out : 0), parameter_role::bias) {}

  /// Numbers of inputs and outputs.
  index_t in_features() const { return in_; }
  index_t out_features() const { return out_; }
  bool has_bias() const { return bias_.size() > 0; }
  bool is_moved_from() const { return weight_.is_moved_from(); }

  /// Weight [out][in] and bias (a null view if there is no bias), in PyTorch's order.
  tensor_view<parameter_t<T>, 2> weight() { return {weight_.data(), {out_, in_}, {1, out_}}; }
  tensor_view<const parameter_t<T>, 2> weight() const { return {weight_.data(), {out_, in_}, {1, out_}}; }
  tensor_view<parameter_t<T>, 1> bias() { return {has_bias() ? bias_.data() : nullptr, {bias_.size()}}; }
  tensor_view<const parameter_t<T>, 1> bias() const {
    return {has_bias() ? bias_.data() : nullptr, {bias_.size()}};
  }

  std::string describe() const { return "Linear " + std::to_string(in_) + " -> " + std::to_string(out_); }

  /// x: M x in, y: M x out, dense; y does not overlap x. In training, x must stay as it is until backward.
  /// Throws shape_error.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 2>& x, const tensor_view<T, 2>& y) const {
    detail::check_forward(*this, x, y);
    if (ctx.training()) ctx.tape().push_value(*this, x);
    ops::linear_forward<T>(ctx, x, stored(), has_bias() ? bias_.template as<T>() : nullptr, y);
    if (ctx.training() && !shows_inputs()) ctx.rows()(weight_, row_kind::output, tensor_view<const T, 2>(y));
  }

  /// Gradients from dy, of the shape of y, for the last forward pass: dW = dy^T x, db = sum of the rows of
  /// dy, and dx = dy W. The gradients of W and b are overwritten by the first write of a step and added to by
  /// later ones (see parameter); dx (M x in) is overwritten. dx may be a null view and overlaps nothing.
  /// Throws shape_error, and state_error without a forward pass in training mode.
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dx) const {
    run_backward(ctx, dy, dx, false);
  }

  /// Computes the gradients of backward, but adds the gradient of x to dx. Shapes, aliasing and errors are
  /// those of backward.
  template <class Device>
  void backward_add(context<Device>& ctx, const tensor_view<const T, 2>& dy,
                    const tensor_view<T, 2>& dx) const {
    run_backward(ctx, dy, dx, true);
  }

  /// The backward pass for y = relu(layer(x)) from dy, the gradient of y, which becomes the gradient of the
  /// layer's output. With `add`, the gradient of x is added to dx. Otherwise the contract of backward.
  template <class Device>
  void backward_after_relu(context<Device>& ctx, const tensor_view<const T, 2>& y,
                           const tensor_view<T, 2>& dy, const tensor_view<T, 2>& dx, bool add) const {
    if (has_bias()) {
      ops::relu_bias_gradient<T>(ctx, y, dy, dy, bias_.gradient_data(), bias_.accumulate());
    } else {
      ops::relu_backward<T>(ctx, y.flat(), std::as_const(dy).flat(), dy.flat());
    }
    run_backward(ctx, dy, dx, add, true);
  }

  /// The forward passes of several layers that read one x: `ys` are their outputs. A device computes layers
  /// of one shape without biases in one launch. Shapes, aliasing and errors are those of forward.
  template <class Device>
  static void forward_group(context<Device>& ctx, detail::layer_group<Linear> layers,
                            const tensor_view<const T, 2>& x, std::span<const tensor_view<T, 2>> ys) {
    detail::group_array<ops::linear_map<T>> maps;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const Linear& layer = *layers[i];
      detail::check_forward(layer, x, ys[i]);
      maps.push({x, layer.stored(), layer.has_bias() ? layer.bias_.template as<T>() : nullptr, ys[i]});
    }
    if (ctx.training()) ctx.tape().push_value(*layers.front(), x);
    ops::linear_maps_forward<T>(ctx, maps.all());
    for (std::size_t i = 0; i < layers.size() && ctx.training(); ++i) {
      const Linear& layer = *layers[i];
      if (!layer.shows_inputs()) {
        ctx.rows()(layer.weight_, row_kind::output, tensor_view<const T, 2>(ys[i]));
      }
    }
  }
  /// The backward passes of forward_group of the same layers. `to`: where the gradients of x are
  /// written, one for each layer. Shapes, aliasing and errors are those of backward.
  template <class Device>
  static void backward_group(context<Device>& ctx, detail::layer_group<Linear> layers,
                             std::span<const tensor_view<const T, 2>> dys,
                             std::span<const detail::group_gradient<T>> to) {
    const auto x = ctx.tape().template pop_value<tensor_view<const T, 2>>(*layers.front());
    detail::group_array<ops::weight_gradient_map<T>> weights;
    detail::group_array<ops::input_gradient_map<T>> inputs;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const Linear& layer = *layers[i];
      detail::check_backward(layer, x.shape(), dys[i], to[i].dx);
      if (layer.shows_inputs()) ctx.rows()(layer.weight_, row_kind::input, x);
      ctx.rows()(layer.weight_, row_kind::output_gradient, dys[i]);
      weights.push({x, dys[i], layer.gradient(), layer.weight_.accumulate()});
      inputs.push({dys[i], layer.stored()});
    }
    const auto parameters = [&] {
      ops::linear_maps_backward_weight<T>(ctx, weights.all());
      for (std::size_t i = 0; i < layers.size(); ++i) {
        ctx.gradient_written(layers[i]->weight_);
        layers[i]->write_bias_gradient(ctx, dys[i]);
      }
    };
    ctx.in_parallel(parameters, [&] { detail::write_input_gradients<T>(ctx, inputs.all(), to); });
  }

  /// Draws weight and bias from U(+-1/sqrt(in)), PyTorch's default.
  void initialize(random_stream random) {
    detail::fill_fan_in(weight_, in_, random.child("weight"));
    detail::fill_fan_in(bias_, in_, random.child("bias"));
  }

  /// Calls f("weight", W), then f("bias", b) if there is a bias.
  template <class F>
  void visit(F&& f) {
    f("weight", weight_);
    if (has_bias()) f("bias", bias_);
  }

  /// Multiply-accumulates of one forward pass: rows * in * out. Throws shape_error for a negative extent.
  index_t macs(const extents<4>& input) const {
    detail::check_extents(*this, input);
    return input[0] * input[1] * input[2] * in_ * out_;
  }

 private:
  // Weight gradient first, then the bias, then dx, so that an exchange can send the gradients early.
  template <class Device>
  void run_backward(context<Device>& ctx, const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dx,
                    bool add, bool bias_known = false) const {
    const auto x = ctx.tape().template pop_value<tensor_view<const T, 2>>(*this);
    detail::check_backward(*this, x.shape(), dy, dx);
    if (shows_inputs()) ctx.rows()(weight_, row_kind::input, x);
    ctx.rows()(weight_, row_kind::output_gradient, dy);
    const auto parameters = [&] {
      ops::linear_backward_weight<T>(ctx, x, dy, gradient(), weight_.accumulate());
      ctx.gradient_written(weight_);
      write_bias_gradient(ctx, dy, bias_known);
    };
    if (dx.is_null()) return parameters();
    ctx.in_parallel(parameters, [&] { ops::linear_backward_input<T>(ctx, dy, stored(), dx, add); });
  }

  // Writes the gradient of the bias, if there is one. `known`: it is written already.
  template <class Device>
  void write_bias_gradient(context<Device>& ctx, const tensor_view<const T, 2>& dy,
                           bool known = false) const {
    if (!has_bias()) return;
    if (!known) ops::bias_gradient<T>(ctx, dy, bias_.gradient_data(), bias_.accumulate());
    ctx.gradient_written(bias_);
  }

  // Layout of the weight, [out][in] with outputs innermost. Throws shape_error for a size below 1.
  static logical_layout checked(index_t in, index_t out) {
    if (in < 1 || out < 1) {
      PUFFERFISH_THROW(shape_error("Linear: " + std::to_string(in) + " -> " + std::to_string(out) +
                                   " features; both must be positive"));
    }
    return logical_layout::matrix(out, in);
  }
  // An observer needs the rows on one side of the weight only; it gets those of the narrower side.
  bool shows_inputs() const { return in_ < out_; }
  // The weight, and its gradient, as stored: [in][out].
  tensor_view<const T, 2> stored() const { return {weight_.template as<T>(), {in_, out_}}; }
  tensor_view<parameter_t<T>, 2> gradient() const { return {weight_.gradient_data(), {in_, out_}}; }

  index_t in_, out_;
  parameter<parameter_t<T>> weight_, bias_;
};

/// Gives svd_factorize access to weight and bias of a Linear, as views of the layer's memory.
template <class T>
struct layer_traits<Linear<T>> {
  static constexpr auto kind = layer_kind::linear;
  static auto matrices(const Linear<T>& layer) {
    return std::array{named_view<const parameter_t<T>, 2>{"weight", layer.weight()}};
  }
  static tensor_view<const parameter_t<T>, 1> bias(const Linear<T>& layer) { return layer.bias(); }
};

PUFFERFISH_NAMESPACE_END
