// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The operations of ops/embedding/ on a device. Operands are in memory of the context's device. The
/// functions launch kernels in the context's stream and do not wait. Tokens are in device memory, where the
/// host does not check them; the row of a token outside the vocabulary is NaN. A failed launch throws
/// backend_error.

#include <pufferfish/gpu/kernels/embedding/embedding.hpp>
#include <pufferfish/gpu/kernels/embedding/positions.hpp>
#include <pufferfish/gpu/ops/arguments.hpp>
#include <pufferfish/gpu/ops/copy.hpp>
#include <pufferfish/ops/embedding/embedding.hpp>
#include <pufferfish/ops/embedding/positions.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Device implementation of the functions of ops/embedding/, where shapes and errors are described.
template <>
struct embedding_ops<device::gpu> {
  /// y_n = row tokens[n] of the table. One kernel.
  template <class T>
  static void embedding_forward(context<device::gpu>& ctx, const tensor_view<const T, 2>& table,
                                std::span<const std::int32_t> tokens, const tensor_view<T, 2>& y) {
    gpu::kernels::embedding_forward<T>(ctx.stream(), gpu::detail::rows_of(table),
                                       {tokens.data(), y.extent(0), table.extent(0)}, y.extent(1),
                                       gpu::detail::rows_of(y));
  }

  /// Adds each row of dy to the row of dtable that belongs to its token; positions of the padding token are
  /// skipped. Unless `add` is set, the caller has filled dtable with zeros. Three kernels, without atomics:
  /// each sum has a fixed order. Scratch: count numbers of the order, and embedding_parts() partial sums.
  template <class T>
  static void embedding_backward(context<device::gpu>& ctx, std::span<const std::int32_t> tokens,
                                 const tensor_view<const T, 2>& dy, std::int32_t padding,
                                 const tensor_view<parameter_t<T>, 2>& dtable, bool add) {
    const index_t count = dy.extent(0), columns = dy.extent(1);
    scratch_frame frame(ctx.scratch());
    auto* const order = frame.take<index_t>(count);
    auto* const parts = frame.take<parameter_t<T>>(gpu::kernels::embedding_parts(count, columns));
    const gpu::kernels::token_array all{tokens.data(), count, dtable.extent(0)};
    gpu::kernels::embedding_order(ctx.stream(), all, padding, order);
    gpu::kernels::embedding_backward<T>(ctx.stream(), all, padding, order, gpu::detail::rows_of(dy), columns,
                                        add, parts, gpu::detail::rows_of(dtable));
  }

  /// Adds the sinusoid of position places[n] to row n of x.
  template <class T>
  static void add_positions(context<device::gpu>& ctx, const std::int32_t* places,
                            const tensor_view<T, 2>& x) {
    gpu::kernels::add_positions<T>(ctx.stream(), places, 1, gpu::detail::rows_of(x), gpu::detail::rows_of(x),
                                   x.extent(0), x.extent(1));
  }

  /// y_n = x_n + the sinusoid of position n % length.
  template <class T>
  static void add_positions_in_turn(context<device::gpu>& ctx, index_t length,
                                    const tensor_view<const T, 2>& x, const tensor_view<T, 2>& y) {
    gpu::kernels::add_positions<T>(ctx.stream(), nullptr, length, gpu::detail::rows_of(x),
                                   gpu::detail::rows_of(y), y.extent(0), y.extent(1));
  }
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END
