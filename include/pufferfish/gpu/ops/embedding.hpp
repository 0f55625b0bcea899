// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Embedding tables on a device: device versions of ops/embedding/embedding.hpp.
///
/// Matrices have dense rows, and tokens are in memory of the context's device: the host does not read them,
/// so that a token out of range cannot be reported. Work is put into the context's stream. Throw
/// backend_error if a launch fails.

#include <pufferfish/gpu/kernels/embedding/embedding.hpp>
#include <pufferfish/gpu/kernels/step.hpp>
#include <pufferfish/gpu/ops/arguments.hpp>
#include <pufferfish/ops/embedding/embedding.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// y_n = row tokens[n] of the table; a row of NaNs for a token outside 0 .. V - 1. table: V x D, y: N x D,
/// tokens: N. y does not overlap the table. Throws shape_error if the shapes do not fit.
template <class T>
void embedding_forward(context<device::gpu>& ctx, const tensor_view<const T, 2>& table,
                       std::span<const std::int32_t> tokens, const tensor_view<T, 2>& y) {
  detail::check_embedding("embedding_forward", table.shape(), tokens.size(), y.shape());
  gpu::kernels::embedding_forward<T>(ctx.stream(), gpu::detail::rows_of(table),
                                     {tokens.data(), y.extent(0), table.extent(0)}, y.extent(1),
                                     gpu::detail::rows_of(y));
}

/// dtable_v = sum of dy_n over all n with tokens[n] = v, except for v = padding, or with `add` dtable_v +=
/// this sum. Without `add`, rows of tokens that do not occur become zero. Tokens out of range add to nothing.
/// Each sum is in the order of the positions: equal arguments give equal bits, without atomics. dy: N x D,
/// dtable: V x D of floats; no overlap. Scratch: 8 bytes a token and two rows of floats for each 32 tokens.
/// Costs N^2 comparisons for the order of positions. Throws shape_error if the shapes do not fit.
template <class T>
void embedding_backward(context<device::gpu>& ctx, std::span<const std::int32_t> tokens,
                        const tensor_view<const T, 2>& dy, std::int32_t padding,
                        const tensor_view<parameter_t<T>, 2>& dtable, bool add) {
  detail::check_embedding("embedding_backward", dtable.shape(), tokens.size(), dy.shape());
  const index_t count = dy.extent(0), columns = dy.extent(1);
  if (!add) {
    gpu::kernels::fill_rows<parameter_t<T>>(ctx.stream(), nullptr, dtable.data(), dtable.extent(0), columns,
                                            dtable.stride(0));
  }
  if (dy.empty()) return;
  scratch_frame frame(ctx.scratch());
  auto* const order = frame.take<index_t>(count);
  auto* const parts = frame.take<parameter_t<T>>(gpu::kernels::embedding_parts(count, columns));
  const gpu::kernels::token_array all{tokens.data(), count, dtable.extent(0)};
  gpu::kernels::embedding_order(ctx.stream(), all, padding, order);
  gpu::kernels::embedding_backward<T>(ctx.stream(), all, padding, order, gpu::detail::rows_of(dy), columns,
                                      add, parts, gpu::detail::rows_of(dtable));
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
