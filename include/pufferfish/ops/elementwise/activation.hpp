// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// GELU, tanh and the logistic function, with their gradients: the plain reference and the fast form.
///
/// The kind is a template argument of the fast forms and a function argument of the reference. Both GELU
/// gradients need the input x. The gradients of tanh and sigmoid (the logistic function) need the output y,
/// which the next layer keeps anyway; keeps_output() tells which of the two a kind needs.
///
/// \code
/// constexpr activation_kind kind = activation_kind::gelu;
/// ops::activation_forward<kind, float>(ctx, x.flat(), y.flat());
/// ops::activation_backward<kind, float>(ctx, x.flat(), dy.flat(), dx.flat());  // tanh: y instead of x
/// \endcode

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <span>

#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Smooth elementwise functions. gelu: x P(N < x) for a standard normal N (Hendrycks, Gimpel: "Gaussian error
/// linear units", 2016). gelu_tanh: the approximation x / 2 (1 + tanh(u)) of gelu with u = sqrt(2 / pi) (x +
/// 0.044715 x^3), from the same paper. tanh: the hyperbolic tangent. sigmoid: 1 / (1 + exp(-x)).
///
/// Derivatives: gelu: P(N < x) + x exp(-x^2 / 2) / sqrt(2 pi). gelu_tanh: (1 + t) / 2 + x / 2 (1 - t^2) u',
/// with t = tanh(u). tanh: 1 - y^2. sigmoid: y (1 - y).
enum class activation_kind { gelu, gelu_tanh, tanh, sigmoid };

/// Whether the gradient is computed from the output y; otherwise it is computed from the input x.
constexpr bool keeps_output(activation_kind kind) {
  return kind == activation_kind::tanh || kind == activation_kind::sigmoid;
}

namespace ops {
namespace reference {

/// y_i = f(x_i), in double. x and y: x.size() elements each; y may be x.
template <class T>
void activation_forward(activation_kind kind, std::span<const T> x, std::span<T> y) {
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto v = static_cast<double>(x[i]);
    const double cubic = std::sqrt(2.0 / std::numbers::pi) * (v + 0.044715 * v * v * v);
    y[i] = static_cast<T>(kind == activation_kind::gelu        ? 0.5 * v * std::erfc(-v / std::numbers::sqrt2)
                          : kind == activation_kind::gelu_tanh ? 0.5 * v * (1.0 + std::tanh(cubic))
                          : kind == activation_kind::tanh      ? std::tanh(v)
                                                               : 1.0 / (1.0 + std::exp(-v)));
  }
}

/// dx_i = f'(x_i) dy_i, in double. `kept` is y where keeps_output(kind), else x. All spans have kept.size()
/// elements; dx may be dy or kept.
template <class T>
void activation_backward(activation_kind kind, std::span<const T> kept, std::span<const T> dy,
                         std::span<T> dx) {
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const auto v = static_cast<double>(kept[i]);
    double slope = 0.0;
    if (kind == activation_kind::gelu) {
      slope = 0.5 * std::erfc(-v / std::numbers::sqrt2) +
              v * std::exp(-0.5 * v * v) / std::sqrt(2.0 * std::numbers::pi);
    } else if (kind == activation_kind::gelu_tanh) {
      const double factor = std::sqrt(2.0 / std::numbers::pi);
      const double t = std::tanh(factor * (v + 0.044715 * v * v * v));
      slope = 0.5 * (1.0 + t) + 0.5 * v * (1.0 - t * t) * factor * (1.0 + 3.0 * 0.044715 * v * v);
    } else {
      slope = kind == activation_kind::tanh ? 1.0 - v * v : v * (1.0 - v);
    }
    dx[i] = static_cast<T>(slope * static_cast<double>(dy[i]));
  }
}

}  // namespace reference

namespace detail {

#define PUFFERFISH_KERNELS activations
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/elementwise/activation.inc>
#include <pufferfish/linalg/for_each_target.inc>

}  // namespace detail

/// y_i = f(x_i), computed in T. The spans must have the same length, else the assertion fails; y may be x. A
/// NaN stays a NaN. On the CPU the exponentials in these functions have an error of at most two units in the
/// last place; exponentials below the normal numbers are 0.
template <activation_kind Kind, class T, class Device>
void activation_forward(context<Device>& ctx, std::span<const T> x, std::span<T> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "activation_forward: lengths differ");
  if constexpr (!is_cpu<Device>) {
    elementwise_ops<Device>::template activation_forward<Kind>(ctx, x, y);
  } else {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::activations, activate<Kind, T>);
    for_chunks(ctx, static_cast<index_t>(y.size()),
               [=](index_t begin, index_t end) { kernel(x.data() + begin, y.data() + begin, end - begin); });
  }
}

/// dx_i = f'(x_i) dy_i, overwritten. `kept` is the output y if keeps_output(Kind), else the input x. The
/// spans must have one length, else the assertion fails; dx may be dy or `kept`.
template <activation_kind Kind, class T, class Device>
void activation_backward(context<Device>& ctx, std::span<const T> kept, std::span<const T> dy,
                         std::span<T> dx) {
  PUFFERFISH_ASSERT(kept.size() == dy.size() && dy.size() == dx.size(),
                    "activation_backward: lengths differ");
  if constexpr (!is_cpu<Device>) {
    elementwise_ops<Device>::template activation_backward<Kind>(ctx, kept, dy, dx);
  } else {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::activations, activation_gradient<Kind, T>);
    for_chunks(ctx, static_cast<index_t>(dx.size()), [=](index_t begin, index_t end) {
      kernel(kept.data() + begin, dy.data() + begin, dx.data() + begin, end - begin);
    });
  }
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
