// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The arithmetic of an LSTM's time step for one element of the state, for kernels and for the host.

#include <cmath>

#include <pufferfish/gpu/kernels/elementwise/elementwise_functors.hpp>

PUFFERFISH_KERNELS_BEGIN

/// Four numbers, one per gate (input gate, forget gate, candidate, output gate): preactivations, activations
/// or their gradients.
template <class A>
struct lstm_gates_of {
  A i, f, g, o;
};

/// The result of lstm_step_forward.
template <class A>
struct lstm_step {
  lstm_gates_of<A> gates;  ///< activations of the gates
  A cell, output;
};

/// Forward step: i, f, o = logistic(z), g = tanh(z), cell = f before + i g, output = o tanh(cell). z:
/// preactivations; before: cell state before the step.
template <class A>
PUFFERFISH_HOST_DEVICE inline lstm_step<A> lstm_step_forward(const lstm_gates_of<A>& z, A before) {
  using std::tanh;
  const lstm_gates_of<A> a{logistic(z.i), logistic(z.f), tanh(z.g), logistic(z.o)};
  const A cell = a.f * before + a.i * a.g;
  return {a, cell, a.o * tanh(cell)};
}

/// The result of lstm_step_backward.
template <class A>
struct lstm_step_gradient {
  lstm_gates_of<A> gates;  ///< gradients of the preactivations
  A before;                ///< gradient of the cell state before the step
};

/// Computes the backward pass of lstm_step_forward for one element. `a`: the gates' activations; `before`,
/// `cell`: the cell state before and after the step; dh: gradient of the output; dc_after: gradient of `cell`
/// from the next time step. With t = tanh(cell) and * for products:
///
///     dc = dh * o * (1 - t^2) + dc_after
///     gradients of the preactivations:  i: dc * g * i * (1 - i),  f: dc * before * f * (1 - f),
///                                       g: dc * i * (1 - g^2),    o: dh * t * o * (1 - o)
///     gradient of `before`:             dc * f
template <class A>
PUFFERFISH_HOST_DEVICE inline lstm_step_gradient<A> lstm_step_backward(const lstm_gates_of<A>& a, A before,
                                                                       A cell, A dh, A dc_after) {
  using std::tanh;
  const A one = A(1), t = tanh(cell), dc = dh * a.o * (one - t * t) + dc_after;
  return {{dc * a.g * a.i * (one - a.i), dc * before * a.f * (one - a.f), dc * a.i * (one - a.g * a.g),
           dh * t * a.o * (one - a.o)},
          dc * a.f};
}

PUFFERFISH_KERNELS_END
