// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Activations: `ReLU`, `GELU`, `GELUTanh`, `Tanh`, `Sigmoid`. All work element by element, on images of any
/// extents, and have neither parameters nor options:
///
///     net.add("fc1", Linear<float>(784, 256)).add("act", GELU<float>());

#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/ops/elementwise/activation.hpp>
#include <pufferfish/ops/elementwise/relu.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// y = max(x, 0), element by element. Keeps a view of y, no copy, for the backward pass.
template <class T>
class ReLU {
 public:
  using value_type = T;
  static constexpr bool is_relu = true;  // a batch norm before this layer can apply the ReLU (forward_fused)
  static constexpr bool output_in_place = true;
  static constexpr bool gradient_in_place = true;
  static constexpr bool reads_input = false;

  std::string describe() const { return "ReLU"; }
  /// Any shape; the output has the shape of the input.
  extents<4> output_shape(const extents<4>& input) const { return input; }

  /// x, y: dense, of one shape; y may be x. In training, y must stay as it is until the backward pass.
  /// Throws shape_error.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    detail::check_forward(*this, x, y);
    ops::relu_forward<T>(ctx, x.flat(), y.flat());
    if (ctx.training()) ctx.tape().push_value(*this, tensor_view<const T, 4>(y));
  }

  /// dx = dy where y > 0, else 0; dx may be dy, or a null view. Throws shape_error, and state_error without a
  /// forward pass in training mode.
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    const auto y = ctx.tape().template pop_value<tensor_view<const T, 4>>(*this);
    detail::check_backward(*this, y.shape(), dy, dx);
    if (dx.is_null()) return;
    ops::relu_backward<T>(ctx, y.flat(), dy.flat(), dx.flat());
  }
};

namespace detail {

/// An activation of ops/elementwise/activation.hpp as a layer. Keeps a view (not a copy) of x or y for the
/// backward pass. dx = f'(x) dy. The derivative is computed from y for Tanh (1 - y^2) and Sigmoid (y (1 -
/// y)), and from x for both forms of GELU.
template <class T, activation_kind Kind>
class smooth_activation {
 public:
  using value_type = T;
  static constexpr bool output_in_place = true;
  static constexpr bool gradient_in_place = true;
  static constexpr bool reads_input = !keeps_output(Kind);
  static constexpr bool reads_output = keeps_output(Kind);

  std::string describe() const {
    return Kind == activation_kind::gelu        ? "GELU"
           : Kind == activation_kind::gelu_tanh ? "GELU (tanh)"
           : Kind == activation_kind::tanh      ? "Tanh"
                                                : "Sigmoid";
  }
  extents<4> output_shape(const extents<4>& input) const { return input; }

  /// x, y: dense, of one shape; y may be x if the gradient is computed from y, and in inference. In
  /// training, both must stay as they are until the backward pass. Throws shape_error.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    check_forward(*this, x, y, keeps_output(Kind) || !ctx.training());
    ops::activation_forward<Kind, T>(ctx, x.flat(), y.flat());
    if (ctx.training()) ctx.tape().push_value(*this, keeps_output(Kind) ? tensor_view<const T, 4>(y) : x);
  }

  /// dx may be dy, or a null view. Throws shape_error, and state_error without a forward pass in training
  /// mode.
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    const auto kept = ctx.tape().template pop_value<tensor_view<const T, 4>>(*this);
    check_backward(*this, kept.shape(), dy, dx);
    if (dx.is_null()) return;
    ops::activation_backward<Kind, T>(ctx, kept.flat(), dy.flat(), dx.flat());
  }
};

}  // namespace detail

/// y = x P(N(0, 1) < x), by the error function (PyTorch's default).
/// Source: Hendrycks, Gimpel: "Gaussian error linear units", 2016. The backward pass reads x, so y may be x
/// in inference only.
template <class T>
class GELU : public detail::smooth_activation<T, activation_kind::gelu> {};

/// y = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))): the cheaper form of GELU.
/// Source: Hendrycks, Gimpel, 2016. The backward pass reads x, so y may be x in inference only.
template <class T>
class GELUTanh : public detail::smooth_activation<T, activation_kind::gelu_tanh> {};

/// y = tanh(x).
/// The backward pass reads y: dx = (1 - y^2) dy.
template <class T>
class Tanh : public detail::smooth_activation<T, activation_kind::tanh> {};

/// y = 1 / (1 + exp(-x)).
/// The backward pass reads y: dx = y (1 - y) dy.
template <class T>
class Sigmoid : public detail::smooth_activation<T, activation_kind::sigmoid> {};

PUFFERFISH_NAMESPACE_END
