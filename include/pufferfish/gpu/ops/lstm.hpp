// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Time steps of an LSTM on a device: device versions of ops/recurrent/lstm.hpp and
/// ops/recurrent/step_product.hpp.
///
/// One kernel forward and one backward; matrices have dense rows, any distance between rows, and are in
/// memory of the context's device. Throw backend_error if a launch fails.

#include <pufferfish/gpu/kernels/recurrent/lstm.hpp>
#include <pufferfish/gpu/ops/arguments.hpp>
#include <pufferfish/gpu/ops/products.hpp>
#include <pufferfish/ops/recurrent/lstm.hpp>
#include <pufferfish/ops/recurrent/step_product.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// With preactivations z in `gates`, row by row: i, f, o = sigmoid(z), g = tanh(z), cell = f before + i g,
/// output = o tanh(cell). The activations replace z. gates: batch x 4 hidden, in the order i, f, g, o;
/// before: batch x hidden, or a null view for zeros; cell, output: batch x hidden. cell may be `before`.
/// Throws shape_error if the shapes do not fit.
template <class T>
void lstm_forward(context<device::gpu>& ctx, const tensor_view<T, 2>& gates,
                  const tensor_view<const T, 2>& before, const tensor_view<T, 2>& cell,
                  const tensor_view<T, 2>& output) {
  detail::check_lstm("lstm_forward", gates.shape(), cell.shape(), output.shape(), true);
  detail::check_lstm("lstm_forward", gates.shape(), cell.shape(), before.shape(), !before.is_null());
  gpu::kernels::lstm_forward<T>(ctx.stream(), cell.extent(0), cell.extent(1), gpu::detail::rows_of(gates),
                                gpu::detail::rows_of(before), gpu::detail::rows_of(cell),
                                gpu::detail::rows_of(output));
}

/// The gradients of lstm_forward, with the same `before` and `cell`. `gates` contains the activations and
/// receives the gradients of the preactivations. The gradient of the output is dy + dh_after. dc_after:
/// gradient of `cell` from the next time step; dc_before: receives the gradient of `before`, must not be a
/// null view, and may be dc_after. Null views of before, dy, dh_after and dc_after count as zeros. All but
/// `gates`: batch x hidden. Throws shape_error.
template <class T>
void lstm_backward(context<device::gpu>& ctx, const tensor_view<T, 2>& gates,
                   const tensor_view<const T, 2>& before, const tensor_view<const T, 2>& cell,
                   const tensor_view<const T, 2>& dy, const tensor_view<const T, 2>& dh_after,
                   const tensor_view<const T, 2>& dc_after, const tensor_view<T, 2>& dc_before) {
  detail::check_lstm("lstm_backward", gates.shape(), cell.shape(), dc_before.shape(), true);
  for (const tensor_view<const T, 2>& other : {dy, before, dh_after, dc_after}) {
    detail::check_lstm("lstm_backward", gates.shape(), cell.shape(), other.shape(), !other.is_null());
  }
  gpu::kernels::lstm_backward<T>(ctx.stream(), cell.extent(0), cell.extent(1), gpu::detail::rows_of(gates),
                                 gpu::detail::rows_of(before), gpu::detail::rows_of(cell),
                                 gpu::detail::rows_of(dy), gpu::detail::rows_of(dh_after),
                                 gpu::detail::rows_of(dc_after), gpu::detail::rows_of(dc_before));
}

/// The right operand of products that are repeated at every time step, on a device. It is used in place:
/// cuBLAS does its own packing.
template <class T>
class step_operand<T, device::gpu> {
 public:
  /// As for the CPU. b has dense rows or dense columns. `b` is K x N. With `groups` matrices, each starts
  /// `group_step` elements after the one before. Only the view is kept: the matrix must outlive the use of
  /// the object.
  step_operand(context<device::gpu>&, scratch_frame&, const tensor_view<const T, 2>& b, index_t,
               index_t groups = 1, index_t group_step = 0)
      : b_(b), groups_(groups), group_step_(group_step) {}

  /// c = a b, or c += a b, as reference::group_product. a, c: rows dense; c overlaps neither operand. a: M x
  /// (groups K), c: M x (groups N); group g uses columns g K .. of a and g N .. of c. Throws as
  /// gpu::multiply.
  void multiply(context<device::gpu>& ctx, const tensor_view<const T, 2>& a, const tensor_view<T, 2>& c,
                bool add) const {
    const index_t depth = b_.extent(0), columns = b_.extent(1);
    PUFFERFISH_ASSERT(
        a.extent(1) == groups_ * depth && c.extent(1) == groups_ * columns && a.extent(0) == c.extent(0),
        "step_operand: shapes do not fit");
    if (groups_ == 1) return gpu::multiply<T>(ctx, a, b_, c, add);
    gpu::multiply_batch<T>(ctx, groups_, a.slice(1, 0, depth), depth, b_, group_step_, c.slice(1, 0, columns),
                           columns, add);
  }

 private:
  tensor_view<const T, 2> b_;
  index_t groups_, group_step_;
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END
