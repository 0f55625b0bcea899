// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Embedding: rows of a table by token, and the gradient of the table; the plain reference and the fast form.
///
/// \code
/// std::vector<std::int32_t> tokens{4, 0, 4};
/// tensor<float, 2> table({5, 3}), y({3, 3}), dtable({5, 3});
/// ops::embedding_forward<float>(ctx, table, tokens, y);
/// ops::embedding_backward<float>(ctx, tokens, dy, no_token, dtable, false);
/// \endcode

#include <algorithm>
#include <cstdint>
#include <span>

#include <pufferfish/core/tokens.hpp>
#include <pufferfish/ops/copy/rows.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace ops {

using pufferfish::detail::check_tokens;

/// The check before a pass on the CPU: throws value_error for the first token outside 0 .. vocabulary - 1
/// that is not `allowed`, with its position. On the GPU it checks nothing, since the host cannot read the
/// tokens: there, a token out of range makes the result of a pass NaN.
template <class Device, class Who>
void check_tokens(context<Device>&, const Who& who, std::span<const std::int32_t> tokens, index_t vocabulary,
                  std::int32_t allowed = no_token) {
  if constexpr (is_cpu<Device>) check_tokens(who, tokens, vocabulary, allowed);
}

namespace reference {

/// Reference of embedding_forward: y_n = row tokens[n] of the table. table: V x D; y: N x D; any strides.
template <class T>
void embedding_forward(const tensor_view<const T, 2>& table, std::span<const std::int32_t> tokens,
                       const tensor_view<T, 2>& y) {
  for (index_t n = 0; n < y.extent(0); ++n) {
    const index_t row = tokens[static_cast<std::size_t>(n)];
    for (index_t d = 0; d < y.extent(1); ++d) y(n, d) = table(row, d);
  }
}

/// Reference gradient of the table: row v is overwritten with (or, with `add`, increased by) the sum, in type
/// T, of dy_n over all n with tokens[n] = v. Tokens equal to `padding` are skipped; without `add` the row of
/// the padding becomes zero. dy: N x D, dtable: V x D.
template <class T>
void embedding_backward(std::span<const std::int32_t> tokens, const tensor_view<const T, 2>& dy,
                        std::int32_t padding, const tensor_view<T, 2>& dtable, bool add) {
  for (index_t v = 0; v < dtable.extent(0); ++v) {
    for (index_t d = 0; d < dtable.extent(1); ++d) {
      T sum = add ? dtable(v, d) : T{};
      for (index_t n = 0; n < dy.extent(0); ++n) {
        const std::int32_t token = tokens[static_cast<std::size_t>(n)];
        if (token == v && token != padding) sum += dy(n, d);
      }
      dtable(v, d) = sum;
    }
  }
}

}  // namespace reference

namespace detail {

/// Throws shape_error unless y has one row for each token and the width of the table.
inline void check_embedding(const char* what, const extents<2>& table, std::size_t tokens,
                            const extents<2>& y) {
  if (table[1] != y[1] || static_cast<index_t>(tokens) != y[0]) {
    pufferfish::detail::throw_error<shape_error>(
        {what, ": ", tokens, " rows of a table ", table, " do not fit ", y});
  }
}

}  // namespace detail

/// y_n = row tokens[n] of the table. table: V x D, tokens: N values in 0 .. V - 1, y: N x D; contiguous rows,
/// any row stride; y does not overlap the table. Throws shape_error if the shapes do not fit, value_error for
/// a token out of range (with its position), before anything is written. On a device, a token out of range
/// gives a row of NaNs.
template <class T, class Device>
void embedding_forward(context<Device>& ctx, const tensor_view<const T, 2>& table,
                       std::span<const std::int32_t> tokens, const tensor_view<T, 2>& y) {
  detail::check_embedding("embedding_forward", table.shape(), tokens.size(), y.shape());
  check_tokens(ctx, "embedding_forward", tokens, table.extent(0));
  if constexpr (!is_cpu<Device>) {
    embedding_ops<Device>::embedding_forward(ctx, table, tokens, y);
  } else {
    for_row_chunks(ctx, y.extent(0), y.extent(1), [&](index_t begin, index_t end) {
      for (index_t n = begin; n < end; ++n) {
        std::copy_n(table.data() + tokens[static_cast<std::size_t>(n)] * table.stride(0), y.extent(1),
                    y.data() + n * y.stride(0));
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(sequence, embedding_forward);

/// The gradient of the table (formula: reference::embedding_backward), overwritten or (`add`) added to.
/// Without `add`, rows of unused tokens and of the padding become zero. `padding`: token whose row has no
/// gradient, or no_token; tokens equal to it must be in range, too. Every sum is in the order of positions,
/// in parameter_t<T>. dy: N x D, dtable: V x D, contiguous rows, no overlap. Throws shape_error if the shapes
/// do not fit and, on the CPU, value_error for a token out of range, before anything is written.
///
/// On the CPU, tasks are pieces of 512 columns, so a narrower table is updated by one thread. A device
/// ignores tokens out of range. It first sorts the positions by token, with N^2 comparisons. Scratch there: 8
/// bytes a token and two rows of floats for each 32 tokens.
template <class T, class Device>
void embedding_backward(context<Device>& ctx, std::span<const std::int32_t> tokens,
                        const tensor_view<const T, 2>& dy, std::int32_t padding,
                        const tensor_view<parameter_t<T>, 2>& dtable, bool add) {
  detail::check_embedding("embedding_backward", dtable.shape(), tokens.size(), dy.shape());
  check_tokens(ctx, "embedding_backward", tokens, dtable.extent(0));
  if (!add) clear_rows(ctx, dtable);
  if (dy.empty()) return;
  if constexpr (!is_cpu<Device>) {
    embedding_ops<Device>::embedding_backward(ctx, tokens, dy, padding, dtable, add);
  } else {
    // Tasks divide the columns, not the positions: two positions may have the same token.
    constexpr index_t piece = 512;
    const index_t width = dtable.extent(1);
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, add<T, parameter_t<T>>);
    ctx.parallel_for((width + piece - 1) / piece, [&](index_t task, int) {
      const index_t first = task * piece, count = std::min(piece, width - first);
      for (std::size_t n = 0; n < tokens.size(); ++n) {
        if (tokens[n] == padding) continue;
        kernel(dy.data() + static_cast<index_t>(n) * dy.stride(0) + first,
               dtable.data() + tokens[n] * dtable.stride(0) + first, count);
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(sequence, embedding_backward);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
