// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of embedding tables: rows by token, and the table's gradient.
///
/// Order of use: embedding_forward; in the backward pass embedding_order, then embedding_backward with the
/// same tokens and padding.

#include <pufferfish/gpu/kernels/copy/rows.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Tokens on the device. The row of a token outside 0 .. vocabulary - 1 is NaN; it adds to no gradient.
struct token_array {
  const std::int32_t* tokens;
  index_t count, vocabulary;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// y_n = row tokens[n] of the table. One block a row.
template <class T>
void embedding_forward(cudaStream_t stream, row_array<const T> table, const token_array& tokens,
                       index_t columns, row_array<T> y);

/// order: the positions, sorted by token, equal tokens by position; after them the positions that add to no
/// gradient (token `padding`, -1: none; or an invalid token). Every position counts the positions before it
/// in this order: count^2 comparisons, 32 per warp and step. (A thousand tokens take a microsecond or two, 30
/// thousand about a tenth of a millisecond.)
void embedding_order(cudaStream_t stream, const token_array& tokens, std::int32_t padding, index_t* order);

/// Number of positions whose rows a block adds up; number of elements of `parts` for embedding_backward.
inline constexpr index_t embedding_window = 32;
inline index_t embedding_parts(index_t count, index_t columns) {
  return 2 * ((count + embedding_window - 1) / embedding_window) * columns;
}
/// dtable_v (+)= sum of dy_n over the positions of token v, in their order: up to embedding_window rows in
/// float, their sums in double. Without `add`, rows of tokens that do not occur are unchanged. `order` is the
/// result of embedding_order, `parts` has embedding_parts elements. dy: count x columns, dtable: vocabulary x
/// columns; no overlap.
template <class T>
void embedding_backward(cudaStream_t stream, const token_array& tokens, std::int32_t padding,
                        const index_t* order, row_array<const T> dy, index_t columns, bool add,
                        accumulate_t<T>* parts, row_array<accumulate_t<T>> dtable);

PUFFERFISH_KERNELS_END
