// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The elementwise part of one time step of an LSTM, forward and backward: a plain reference and the fast
/// implementation, which reads and writes each operand once.
///
/// A row of gates has 4 * hidden elements: `hidden` elements each for the input gate i, the forget gate f,
/// the cell candidate g and the output gate o, in PyTorch's order. Before the forward pass, the caller stores
/// the preactivations in the gates: the products of the input and of the previous output with their weights,
/// plus the bias.
///
/// \code
/// weight.multiply(ctx, h, gates, true);  // step_operand: gates += h W
/// ops::lstm_forward<float>(ctx, gates, cell_before, cell, h_next);
/// ops::lstm_backward<float>(ctx, gates, cell_before, cell, dy, dh, dcell, dcell);  // gates: now gradients
/// \endcode
///
/// Source: Hochreiter, Schmidhuber: "Long short-term memory", Neural Computation 9(8), 1997. The forget gate:
/// Gers, Schmidhuber, Cummins: "Learning to forget: continual prediction with LSTM", Neural Computation
/// 12(10), 2000.

#include <cmath>
#include <cstdint>

#include <pufferfish/core/message.hpp>
#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Number of gates of an LSTM; a row stores them in the order input gate, forget gate, cell candidate, output
/// gate.
inline constexpr index_t lstm_gates = 4;

namespace ops {

/// Operands of all time steps of an LSTM layer. Rows of gates and cells are ordered by step, then by
/// sequence; rows are contiguous.
template <class T>
struct lstm_sequence {
  index_t batch;                               ///< number of sequences, not 0
  tensor_view<const T, 2> weight;              ///< of the previous output, hidden x 4 hidden; may be null
  tensor_view<const T, 2> h_before, c_before;  ///< the initial state, batch x hidden; null views: zeros
  tensor_view<T, 2> gates;                     ///< steps batch x 4 hidden
  /// The cell state after each step, steps batch x hidden. A forward pass may have batch rows for all steps.
  tensor_view<T, 2> cells;

  index_t steps() const { return gates.extent(0) / batch; }
};

namespace reference {

/// The definition of one time step. With the preactivations z_i, z_f, z_g and z_o in `gates`: i =
/// sigmoid(z_i), f = sigmoid(z_f), g = tanh(z_g), o = sigmoid(z_o), cell = f before + i g, output = o
/// tanh(cell). Each element is computed in double and rounded. The activations overwrite the preactivations.
/// gates: batch x 4 hidden; before: batch x hidden, or a null view for zeros; cell, output: batch x hidden.
template <class T>
void lstm_forward(const tensor_view<T, 2>& gates, const tensor_view<const T, 2>& before,
                  const tensor_view<T, 2>& cell, const tensor_view<T, 2>& output) {
  const index_t hidden = cell.extent(1);
  const auto sigmoid = [](T z) { return 1.0 / (1.0 + std::exp(-static_cast<double>(z))); };
  for (index_t b = 0; b < cell.extent(0); ++b) {
    for (index_t j = 0; j < hidden; ++j) {
      const double i = sigmoid(gates(b, j)), f = sigmoid(gates(b, hidden + j)),
                   g = std::tanh(static_cast<double>(gates(b, 2 * hidden + j))),
                   o = sigmoid(gates(b, 3 * hidden + j));
      const double c = (before.is_null() ? 0.0 : f * static_cast<double>(before(b, j))) + i * g;
      gates(b, j) = static_cast<T>(i);
      gates(b, hidden + j) = static_cast<T>(f);
      gates(b, 2 * hidden + j) = static_cast<T>(g);
      gates(b, 3 * hidden + j) = static_cast<T>(o);
      cell(b, j) = static_cast<T>(c);
      output(b, j) = static_cast<T>(o * std::tanh(c));
    }
  }
}

/// The definition of the gradients of lstm_forward. `gates` holds the activations, which are overwritten with
/// the gradients dz of the preactivations. The gradient of the output has two parts: dh = dy + dh_after, from
/// the next layer and from the next time step. dc_after is the gradient of the cell from the next time step;
/// dc_before receives the gradient of `before`. With t = tanh(cell):
///
/// dc = dc_after + dh o (1 - t^2), dz_i = dc g i (1 - i), dz_f = dc before f (1 - f), dz_g = dc i (1 - g^2),
/// dz_o = dh t o (1 - o), dc_before = dc f.
///
/// gates: batch x 4 hidden; all others: batch x hidden. Null views of before, dy, dh_after and dc_after count
/// as zeros. Each element is computed in double and rounded.
template <class T>
void lstm_backward(const tensor_view<T, 2>& gates, const tensor_view<const T, 2>& before,
                   const tensor_view<const T, 2>& cell, const tensor_view<const T, 2>& dy,
                   const tensor_view<const T, 2>& dh_after, const tensor_view<const T, 2>& dc_after,
                   const tensor_view<T, 2>& dc_before) {
  const index_t hidden = cell.extent(1);
  for (index_t b = 0; b < cell.extent(0); ++b) {
    for (index_t j = 0; j < hidden; ++j) {
      const auto at = [b, j](const auto& view) {
        return view.is_null() ? 0.0 : static_cast<double>(view(b, j));
      };
      const auto gate = [&](index_t k) { return static_cast<double>(gates(b, k * hidden + j)); };
      const double i = gate(0), f = gate(1), g = gate(2), o = gate(3), t = std::tanh(at(cell));
      const double dh = at(dy) + at(dh_after), dc = at(dc_after) + dh * o * (1.0 - t * t);
      const double old = at(before);
      gates(b, j) = static_cast<T>(dc * g * i * (1.0 - i));
      gates(b, hidden + j) = static_cast<T>(dc * old * f * (1.0 - f));
      gates(b, 2 * hidden + j) = static_cast<T>(dc * i * (1.0 - g * g));
      gates(b, 3 * hidden + j) = static_cast<T>(dh * t * o * (1.0 - o));
      dc_before(b, j) = static_cast<T>(dc * f);
    }
  }
}

}  // namespace reference

namespace detail {

/// Operands of one row of a forward step. `before` may be nullptr, which counts as zeros.
template <class T>
struct lstm_row {
  T* gates;
  const T* before;
  T *cell, *output;
  index_t hidden;
};
/// Operands of one row of a backward step. `dh` is the gradient dh_after. `before`, `dy`, `dh` and `dc_after`
/// may be nullptr, which counts as zeros.
template <class T>
struct lstm_gradient_row {
  T* gates;
  const T *before, *cell, *dy, *dh, *dc_after;
  T* dc_before;
  index_t hidden;
};

#define PUFFERFISH_KERNELS lstm_cell
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/recurrent/lstm.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// Address of row b of a view, or nullptr for a null view.
template <class T>
T* row_or_null(const tensor_view<T, 2>& view, index_t b) {
  return view.is_null() ? nullptr : view.data() + b * view.stride(0);
}

/// Throws shape_error unless `gates` is batch x 4 hidden for a cell of batch x hidden, and, if `given` is
/// true, `other` has the shape of `cell`. `what`: the operation's name, for the error text.
inline void check_lstm(const char* what, const extents<2>& gates, const extents<2>& cell,
                       const extents<2>& other, bool given) {
  if (gates != extents<2>{cell[0], lstm_gates * cell[1]} || (given && other != cell)) {
    pufferfish::detail::throw_error<shape_error>(
        {what, ": gates ", gates, ", cell ", cell, ", another operand ", other});
  }
}

/// Cost of an element of an LSTM, with its exponentials, in elements of a cheap elementwise pass. It
/// determines the number of rows of a task.
inline constexpr index_t lstm_row_weight = 16;

}  // namespace detail

/// One time step of an LSTM (formulas: reference::lstm_forward). gates: batch x 4 hidden, the preactivations,
/// overwritten with the activations, which the backward pass needs; before: batch x hidden, or a null view
/// for zeros; cell, output: batch x hidden, overwritten. All rows are contiguous, with any row stride. `cell`
/// may be `before`; no other operands overlap. A NaN preactivation results in a NaN activation. On the CPU,
/// the error is a few units in the last place. Throws shape_error if the shapes do not fit.
template <class T, class Device>
void lstm_forward(context<Device>& ctx, const tensor_view<T, 2>& gates, const tensor_view<const T, 2>& before,
                  const tensor_view<T, 2>& cell, const tensor_view<T, 2>& output) {
  detail::check_lstm("lstm_forward", gates.shape(), cell.shape(), output.shape(), true);
  detail::check_lstm("lstm_forward", gates.shape(), cell.shape(), before.shape(), !before.is_null());
  if constexpr (!is_cpu<Device>) {
    recurrent_ops<Device>::lstm_forward(ctx, gates, before, cell, output);
  } else {
    const index_t hidden = cell.extent(1);
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::lstm_cell, lstm_forward_row<T>);
    for_row_chunks(ctx, cell.extent(0), detail::lstm_row_weight * hidden, [&](index_t begin, index_t end) {
      for (index_t b = begin; b < end; ++b) {
        kernel({detail::row_or_null(gates, b), detail::row_or_null(before, b), detail::row_or_null(cell, b),
                detail::row_or_null(output, b), hidden});
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(sequence, lstm_forward);

/// Gradients of lstm_forward (formulas: reference::lstm_backward). gates: batch x 4 hidden, the activations
/// of the forward pass, overwritten with the gradients of the preactivations; before, cell: the states before
/// and after the forward pass; dy, dh_after, dc_after: batch x hidden; dc_before: batch x hidden,
/// overwritten, not a null view (not checked). before, dy, dh_after and dc_after may be null views, which
/// count as zeros. All rows are contiguous, with any row stride. dc_before may be dc_after; no other operands
/// overlap. Throws shape_error if the shapes do not fit.
template <class T, class Device>
void lstm_backward(context<Device>& ctx, const tensor_view<T, 2>& gates,
                   const tensor_view<const T, 2>& before, const tensor_view<const T, 2>& cell,
                   const tensor_view<const T, 2>& dy, const tensor_view<const T, 2>& dh_after,
                   const tensor_view<const T, 2>& dc_after, const tensor_view<T, 2>& dc_before) {
  detail::check_lstm("lstm_backward", gates.shape(), cell.shape(), dc_before.shape(), true);
  for (const tensor_view<const T, 2>& other : {dy, before, dh_after, dc_after}) {
    detail::check_lstm("lstm_backward", gates.shape(), cell.shape(), other.shape(), !other.is_null());
  }
  if constexpr (!is_cpu<Device>) {
    recurrent_ops<Device>::lstm_backward(ctx, gates, before, cell, dy, dh_after, dc_after, dc_before);
  } else {
    const index_t hidden = cell.extent(1);
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::lstm_cell, lstm_backward_row<T>);
    for_row_chunks(ctx, cell.extent(0), detail::lstm_row_weight * hidden, [&](index_t begin, index_t end) {
      for (index_t b = begin; b < end; ++b) {
        kernel({detail::row_or_null(gates, b), detail::row_or_null(before, b), detail::row_or_null(cell, b),
                detail::row_or_null(dy, b), detail::row_or_null(dh_after, b),
                detail::row_or_null(dc_after, b), detail::row_or_null(dc_before, b), hidden});
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(sequence, lstm_backward);

/// Computes all time steps of a forward pass at once, where the device has such a kernel. Each step adds
/// h weight to its rows of `gates`, where h is the output of the step before, and calls lstm_forward. On
/// entry `gates` has the preactivations without these products. output: steps batch x hidden. Returns false
/// if nothing was computed: always on the CPU, for a null weight, and without steps. No operands overlap.
template <class T, class Device>
bool lstm_forward_steps(context<Device>& ctx, const lstm_sequence<T>& sequence,
                        const tensor_view<T, 2>& output) {
  if constexpr (!is_cpu<Device>) {
    if (sequence.weight.is_null() || sequence.gates.empty()) return false;
    return recurrent_ops<Device>::lstm_forward_steps(ctx, sequence, output);
  }
  return false;
}

/// Computes all time steps of a backward pass at once, where the device has such a kernel: for each step from
/// the last one on, lstm_backward, then dh = dz weight^T. dy: steps batch x hidden; dh_after, dc_after:
/// gradient of the state after the last step, batch x hidden, null views: zeros; dh_before, dc_before:
/// gradient of the initial state, null views: not computed; they may be dh_after and dc_after. Returns false
/// under the conditions of lstm_forward_steps.
template <class T, class Device>
bool lstm_backward_steps(context<Device>& ctx, const lstm_sequence<T>& sequence,
                         const tensor_view<const T, 2>& dy, const tensor_view<const T, 2>& dh_after,
                         const tensor_view<const T, 2>& dc_after, const tensor_view<T, 2>& dh_before,
                         const tensor_view<T, 2>& dc_before) {
  if constexpr (!is_cpu<Device>) {
    if (sequence.weight.is_null() || sequence.gates.empty()) return false;
    return recurrent_ops<Device>::lstm_backward_steps(ctx, sequence, dy, dh_after, dc_after, dh_before,
                                                      dc_before);
  }
  return false;
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
