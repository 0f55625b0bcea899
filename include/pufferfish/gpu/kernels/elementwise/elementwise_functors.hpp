// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Functions of elements as function objects for the host and the device: activations with their derivatives,
/// and sums. Arguments and results have the type in which kernels compute (float or double).

#include <cmath>

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// The activations of ops/elementwise/activation.hpp, in its order.
enum class activation : int { gelu, gelu_tanh, tanh, sigmoid };

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// max(x, 0). A NaN remains a NaN.
struct relu_of {
  template <class A>
  PUFFERFISH_HOST_DEVICE A operator()(A x) const {
    return x < A{} ? A{} : x;
  }
};

/// Gradient of the input of a ReLU with output y: dy where y > 0 or y is NaN, else 0.
struct relu_gradient_of {
  template <class A>
  PUFFERFISH_HOST_DEVICE A operator()(A y, A dy) const {
    return y <= A{} ? A{} : dy;
  }
};

/// y + x.
struct sum_of {
  template <class A>
  PUFFERFISH_HOST_DEVICE A operator()(A y, A x) const {
    return y + x;
  }
};

/// relu(y + x).
struct relu_of_sum {
  template <class A>
  PUFFERFISH_HOST_DEVICE A operator()(A y, A x) const {
    return relu_of()(y + x);
  }
};

/// factor x.
template <class A>
struct product_with {
  A factor;
  PUFFERFISH_HOST_DEVICE A operator()(A x) const { return x * factor; }
};

/// The logistic function 1 / (1 + exp(-x)).
template <class A>
PUFFERFISH_HOST_DEVICE inline A logistic(A x) {
  return A(1) / (A(1) + std::exp(-x));
}

/// P(N < x) for a standard normal N.
template <class A>
PUFFERFISH_HOST_DEVICE inline A normal_below(A x) {
  return A(0.5) * std::erfc(x * A(-0.70710678118654752440));
}

/// z = 2 sqrt(2 / pi) (x + 0.044715 x^3), the argument of gelu_tanh: (1 + tanh(z / 2)) / 2 = logistic(z).
template <class A>
PUFFERFISH_HOST_DEVICE inline A gelu_argument(A x) {
  return x * A(1.59576912160573071176) * (x * x * A(0.044715) + A(1));
}

/// The activation f(x) of a kind.
template <activation Kind>
struct activation_of {
  template <class A>
  PUFFERFISH_HOST_DEVICE A operator()(A x) const {
    if constexpr (Kind == activation::gelu) {
      return x * normal_below(x);
    } else if constexpr (Kind == activation::gelu_tanh) {
      return x * logistic(gelu_argument(x));
    } else if constexpr (Kind == activation::tanh) {
      return std::tanh(x);
    } else {
      return logistic(x);
    }
  }
};

/// The gradient f'(x) dy of the input of an activation, computed from the kept number: x for GELU, y = f(x)
/// for tanh and sigmoid.
template <activation Kind>
struct activation_gradient_of {
  template <class A>
  PUFFERFISH_HOST_DEVICE A operator()(A kept, A dy) const {
    return slope(kept) * dy;
  }

  /// The derivative f'. gelu: P(N < x) + x density(x). gelu_tanh: s + s (1 - s) x dz/dx with s = logistic(z).
  /// tanh: 1 - y^2. sigmoid: y (1 - y).
  template <class A>
  PUFFERFISH_HOST_DEVICE static A slope(A kept) {
    if constexpr (Kind == activation::gelu) {
      const A density = A(0.39894228040143267794) * std::exp(A(-0.5) * kept * kept);
      // If the density is 0, `kept` may be infinite, and the product of both would be NaN.
      return normal_below(kept) + (density == A{} ? A{} : kept * density);
    } else if constexpr (Kind == activation::gelu_tanh) {
      const A s = logistic(gelu_argument(kept)), bend = s * (A(1) - s);
      const A steep = kept * A(1.59576912160573071176) * (kept * kept * A(0.134145) + A(1));
      return s + (bend == A{} ? A{} : bend * steep);
    } else if constexpr (Kind == activation::tanh) {
      return A(1) - kept * kept;
    } else {
      return kept * (A(1) - kept);
    }
  }
};

PUFFERFISH_KERNELS_END
