// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Attention on a device: device versions of ops/attention/attention.hpp.
///
/// Matrices have dense rows with any distance between them. They, the arrays of the runs, the mask and `kept`
/// are in memory of the context's device. Work is put into the context's stream. Scores and weights are
/// computed in float and are never stored. A failed launch throws backend_error.

#include <pufferfish/gpu/kernels/attention/attention.hpp>
#include <pufferfish/gpu/ops/arguments.hpp>
#include <pufferfish/ops/attention/attention.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// The operands of a kernel. `in.mask.allowed` keeps its three strides.
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
  return result;
}

}  // namespace gpu::detail

namespace ops {

/// y_i = sum over keys j of dropout(weight_ij) v_j, head by head, with weight = softmax over the keys that
/// the mask allows of q_i k_j scale. `kept`: heads x (rows of q) numbers, which receive the logarithm of each
/// row's sum for the backward pass; nullptr: there is no backward pass, and dropout is off. Rows of y that
/// belong to no sequence are not written. y overlaps no input. Throws shape_error if the shapes do not fit.
template <class T>
void attention_forward(context<device::gpu>& ctx, attention_input<T> in, const tensor_view<T, 2>& y,
                       parameter_t<T>* kept) {
  detail::check_attention_shapes(in, y.shape());
  if (kept == nullptr) in.dropout = {};
  if (y.empty() || in.queries.sequences == 0) return;
  gpu::kernels::attention_forward<T>(ctx.stream(), gpu::detail::problem_of(ctx, in), gpu::detail::rows_of(y),
                                     kept);
}

/// The gradients of attention_forward: dq, dk, dv, shaped as q, k, v. `kept` and y are those of the forward
/// pass, `in` is unchanged, and the step of the context is the same. Rows that belong to no sequence are not
/// written. Outputs overlap nothing. Throws shape_error. Scratch: heads x (rows of q) floats.
template <class T>
void attention_backward(context<device::gpu>& ctx, const attention_input<T>& in, const parameter_t<T>* kept,
                        const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dq,
                        const tensor_view<T, 2>& dk, const tensor_view<T, 2>& dv,
                        const tensor_view<const T, 2>& y) {
  detail::check_attention_shapes(in, dy.shape());
  detail::check_attention_shapes(in, y.shape());
  detail::check_attention_gradients(in, dq.shape(), dk.shape(), dv.shape());
  if (in.queries.sequences == 0) return;
  const gpu::kernels::attention_problem<T> problem = gpu::detail::problem_of(ctx, in);
  scratch_frame frame(ctx.scratch());
  auto* const products = frame.take<float>(in.heads * in.q.extent(0));
  const auto g = gpu::detail::rows_of(dy);
  gpu::kernels::attention_row_products<T>(ctx.stream(), problem, g, gpu::detail::rows_of(y), products);
  gpu::kernels::attention_query_gradient<T>(ctx.stream(), problem, g, kept, products,
                                            gpu::detail::rows_of(dq));
  gpu::kernels::attention_key_gradient<T>(ctx.stream(), problem, g, kept, products, gpu::detail::rows_of(dk),
                                          gpu::detail::rows_of(dv));
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
