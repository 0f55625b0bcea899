// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Time steps of an LSTM on a device. Matrices are in memory of the context's device. The functions launch
/// kernels in the context's stream and do not wait. A failed launch throws backend_error.

#include <pufferfish/gpu/kernels/gemm/few_rows.hpp>
#include <pufferfish/gpu/kernels/recurrent/lstm.hpp>
#include <pufferfish/gpu/kernels/recurrent/lstm_steps.hpp>
#include <pufferfish/gpu/ops/arguments.hpp>
#include <pufferfish/gpu/ops/products.hpp>
#include <pufferfish/ops/recurrent/lstm.hpp>
#include <pufferfish/ops/recurrent/step_product.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Device implementation of the functions of ops/recurrent/. Each function is one kernel.
template <>
struct recurrent_ops<device::gpu> {
  /// All steps of a forward pass in one cooperative launch. Returns false, and has computed nothing, unless
  /// elements have 16 bits, there are product_costs::fewest_steps steps, and the device has room for the
  /// weights in the shared memory of all blocks (kernels::plan_lstm_steps).
  template <class T>
  static bool lstm_forward_steps(context<device::gpu>& ctx, const lstm_sequence<T>& s,
                                 const tensor_view<T, 2>& output) {
    scratch_frame frame(ctx.scratch());
    const gpu::kernels::lstm_steps_plan plan = plan_of(ctx, s, false);
    if (plan.columns == 0) return false;
    gpu::kernels::lstm_forward_steps<T>(
        ctx.stream(), plan,
        {s.steps(), s.batch, s.weight.extent(0), gpu::detail::rows_of(s.weight),
         gpu::detail::rows_of(s.h_before), gpu::detail::rows_of(s.c_before), gpu::detail::rows_of(s.gates),
         gpu::detail::rows_of(s.cells), s.cells.extent(0) != s.gates.extent(0), gpu::detail::rows_of(output)},
        frame.take<T>(plan.exchange), ctx.counters());
    return true;
  }
  /// All steps of a backward pass, under the conditions of lstm_forward_steps.
  template <class T>
  static bool lstm_backward_steps(context<device::gpu>& ctx, const lstm_sequence<T>& s,
                                  const tensor_view<const T, 2>& dy, const tensor_view<const T, 2>& dh_after,
                                  const tensor_view<const T, 2>& dc_after, const tensor_view<T, 2>& dh_before,
                                  const tensor_view<T, 2>& dc_before) {
    scratch_frame frame(ctx.scratch());
    const gpu::kernels::lstm_steps_plan plan = plan_of(ctx, s, true);
    if (plan.columns == 0) return false;
    gpu::kernels::lstm_backward_steps<T>(
        ctx.stream(), plan,
        {s.steps(), s.batch, s.weight.extent(0), gpu::detail::rows_of(s.weight),
         gpu::detail::rows_of(s.gates), gpu::detail::rows_of(s.c_before), gpu::detail::rows_of(s.cells),
         gpu::detail::rows_of(dy), gpu::detail::rows_of(dh_after), gpu::detail::rows_of(dc_after),
         gpu::detail::rows_of(dh_before), gpu::detail::rows_of(dc_before)},
        frame.take<T>(plan.exchange), ctx.counters());
    return true;
  }

  /// Replaces the preactivations in `gates` by activations, and computes the new cell state and output.
  template <class T>
  static void lstm_forward(context<device::gpu>& ctx, const tensor_view<T, 2>& gates,
                           const tensor_view<const T, 2>& before, const tensor_view<T, 2>& cell,
                           const tensor_view<T, 2>& output) {
    gpu::kernels::lstm_forward<T>(ctx.stream(), cell.extent(0), cell.extent(1), gpu::detail::rows_of(gates),
                                  gpu::detail::rows_of(before), gpu::detail::rows_of(cell),
                                  gpu::detail::rows_of(output));
  }

  /// Replaces the activations in `gates` by gradients of the preactivations, and computes dc_before, the
  /// gradient of the cell state before the step.
  template <class T>
  static void lstm_backward(context<device::gpu>& ctx, const tensor_view<T, 2>& gates,
                            const tensor_view<const T, 2>& before, const tensor_view<const T, 2>& cell,
                            const tensor_view<const T, 2>& dy, const tensor_view<const T, 2>& dh_after,
                            const tensor_view<const T, 2>& dc_after, const tensor_view<T, 2>& dc_before) {
    gpu::kernels::lstm_backward<T>(ctx.stream(), cell.extent(0), cell.extent(1), gpu::detail::rows_of(gates),
                                   gpu::detail::rows_of(before), gpu::detail::rows_of(cell),
                                   gpu::detail::rows_of(dy), gpu::detail::rows_of(dh_after),
                                   gpu::detail::rows_of(dc_after), gpu::detail::rows_of(dc_before));
  }

 private:
  template <class T>
  static gpu::kernels::lstm_steps_plan plan_of(context<device::gpu>& ctx, const lstm_sequence<T>& s,
                                               bool backward) {
    if (sizeof(T) != 2 || s.steps() < ctx.blas().costs().fewest_steps) return {};
    return gpu::kernels::plan_lstm_steps(s.batch, s.weight.extent(0), backward,
                                         gpu::detail::cooperative_blocks_of(ctx),
                                         gpu::detail::shared_memory_of(ctx));
  }
};

/// Right operand of the products of single time steps. The operand is used in place, because cuBLAS packs it.
/// Products of few rows of 16-bit elements use a kernel of this library, which is faster.
template <class T>
class step_operand<T, device::gpu> {
 public:
  /// Whether the caller should multiply the factors of a low-rank layer into one matrix of `merged` elements
  /// before the time loop: only for at least 4 steps, at most 64 rows a step, and a matrix of at most 4 times
  /// as many elements as the factors have (`factors`).
  static bool merges(index_t steps, index_t batch, index_t merged, index_t factors) {
    return steps >= 4 && batch <= 64 && merged <= 4 * factors;
  }

  /// Refers to b, which must outlive this object. `groups`: number of products that multiply() computes at
  /// once; operand i begins i group_step elements after b.
  step_operand(context<device::gpu>&, scratch_frame&, const tensor_view<const T, 2>& b, index_t,
               index_t groups = 1, index_t group_step = 0)
      : b_(b), groups_(groups), group_step_(group_step) {}

  /// c = a b, or with `add` c += a b, where b is this operand. With several groups, columns i K .. of a and i
  /// N .. of c belong to group i, for operands K x N. Throws the errors of gpu::multiply.
  void multiply(context<device::gpu>& ctx, const tensor_view<const T, 2>& a, const tensor_view<T, 2>& c,
                bool add) const {
    const index_t depth = b_.extent(0), columns = b_.extent(1);
    PUFFERFISH_ASSERT(
        a.extent(1) == groups_ * depth && c.extent(1) == groups_ * columns && a.extent(0) == c.extent(0),
        "step_operand: shapes do not fit");
    if (groups_ == 1 && by_few_rows(ctx, a, c, add)) return;
    if (groups_ == 1) return gpu::multiply<T>(ctx, a, b_, c, add);
    gpu::multiply_batch<T>(ctx, groups_, a.slice(1, 0, depth), depth, b_, group_step_, c.slice(1, 0, columns),
                           columns, add);
  }

 private:
  // Multiplies with the library's kernel if it supports the operands. Returns whether it did.
  bool by_few_rows(context<device::gpu>& ctx, const tensor_view<const T, 2>& a, const tensor_view<T, 2>& c,
                   bool add) const {
    if constexpr (sizeof(T) == 2) {
      if (gpu::kernels::few_rows_shared_bytes > gpu::detail::shared_memory_of(ctx)) return false;
      const bool turned = b_.stride(1) != 1;
      if (turned && b_.stride(0) != 1) return false;
      const auto left = gpu::detail::rows_of(a), right = gpu::detail::rows_of(turned ? transpose(b_) : b_);
      const index_t rows = c.extent(0), depth = b_.extent(0), columns = b_.extent(1);
      if (!gpu::kernels::is_few_rows_product<T>(left, right, turned, rows, depth, columns)) return false;
      gpu::kernels::few_rows_product<T>(ctx.stream(), left, right, turned, gpu::detail::rows_of(c), rows,
                                        depth, columns, add);
      return true;
    } else {
      return false;
    }
  }

  tensor_view<const T, 2> b_;
  index_t groups_, group_step_;
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END
