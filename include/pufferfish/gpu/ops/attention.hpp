// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The operations of ops/attention/ on a device: scaled dot-product attention, and clearing of rows outside
/// of all sequences (token_runs). Operands are in memory of the context's device. The functions launch
/// kernels in the context's stream and do not wait. A failed launch throws backend_error.

#include <pufferfish/gpu/kernels/attention/attention.hpp>
#include <pufferfish/gpu/kernels/copy/rows.hpp>
#include <pufferfish/gpu/ops/arguments.hpp>
#include <pufferfish/ops/attention/attention.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Kernel arguments for the operands of an attention. `in.mask.allowed` keeps its three strides.
template <class T>
kernels::attention_problem<T> problem_of(const context<device::gpu>& ctx, const ops::attention_input<T>& in) {
  kernels::attention_problem<T> result{};
  result.q = rows_of(in.q);
  result.k = rows_of(in.k);
  result.v = rows_of(in.v);
  result.query_rows = in.q.extent(0);
  result.key_rows = in.k.extent(0);
  result.queries = arrays_of(in.queries);
  result.keys = arrays_of(in.keys);
  result.heads = static_cast<int>(in.heads);
  result.depth = static_cast<int>(in.depth());
  result.value_depth = static_cast<int>(in.value_depth());
  result.causal = in.mask.causal;
  result.allowed = in.mask.allowed.data();
  for (std::size_t i = 0; i < 3; ++i) result.allowed_strides[i] = in.mask.allowed.stride(i);
  result.scale = static_cast<float>(in.scale());
  result.dropout = dropout_of(ctx, in.dropout.probability, in.dropout.random);
  result.first_sequence = in.dropout.first_sequence;
  result.query_gaps = in.queries.total != in.q.extent(0);
  result.key_gaps = in.keys.total != in.k.extent(0);
  result.tensor = kernels::attention_plans::tensor(result);
  return result;
}

}  // namespace gpu::detail

namespace ops {

/// Device implementation of the functions of ops/attention/, where shapes and errors are described.
template <>
struct attention_ops<device::gpu> {
  /// first[s] = s length, and count[s] = lengths[s], or `length` if `lengths` is nullptr; all arrays in
  /// device memory.
  static void make_runs(context<device::gpu>& ctx, index_t sequences, index_t length, const index_t* lengths,
                        index_t* first, index_t* count) {
    gpu::kernels::make_runs(ctx.stream(), sequences, length, lengths, first, count);
  }

  /// Writes zeros to the rows of x that belong to no sequence. The kernel compares each row's number with the
  /// run of every sequence.
  template <class T>
  static void clear_rows_outside(context<device::gpu>& ctx, const token_runs& runs,
                                 const tensor_view<T, 2>& x) {
    gpu::kernels::clear_rows_outside<T>(ctx.stream(), gpu::detail::arrays_of(runs), gpu::detail::rows_of(x),
                                        x.extent(0), x.extent(1));
  }

  /// y = softmax(scale q k^T) v for each head and sequence. `kept` receives heads x (rows of q) numbers in
  /// training: for each row of scores, the logarithm of the sum of its exponentials, which the backward pass
  /// needs. nullptr in inference.
  template <class T>
  static void attention_forward(context<device::gpu>& ctx, const attention_input<T>& in,
                                const tensor_view<T, 2>& y, parameter_t<T>* kept) {
    gpu::kernels::attention_forward<T>(ctx.stream(), gpu::detail::problem_of(ctx, in),
                                       gpu::detail::rows_of(y), kept);
  }

  /// Computes dq, dk and dv from dy, and from the y and `kept` of the forward pass. Dropout reads the number
  /// of the step from device memory; it must still be the step of the forward pass. Scratch: heads x (rows of
  /// q) floats.
  template <class T>
  static void attention_backward(context<device::gpu>& ctx, const attention_input<T>& in,
                                 const parameter_t<T>* kept, const tensor_view<const T, 2>& dy,
                                 const tensor_view<T, 2>& dq, const tensor_view<T, 2>& dk,
                                 const tensor_view<T, 2>& dv, const tensor_view<const T, 2>& y) {
    const gpu::kernels::attention_problem<T> problem = gpu::detail::problem_of(ctx, in);
    scratch_frame frame(ctx.scratch());
    auto* const products = frame.take<float>(in.heads * in.q.extent(0));
    gpu::kernels::attention_gradients<T>(ctx.stream(), problem, gpu::detail::rows_of(dy),
                                         gpu::detail::rows_of(y), kept, products, gpu::detail::rows_of(dq),
                                         gpu::detail::rows_of(dk), gpu::detail::rows_of(dv));
  }
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END
