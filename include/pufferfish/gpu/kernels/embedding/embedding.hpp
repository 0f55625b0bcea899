// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of embedding tables: lookups of rows by token, and the table's gradient. Each throws
/// backend_error if its launch fails.
///
/// Order of use: embedding_forward; in the backward pass embedding_order, then embedding_backward with the
/// same tokens and padding.

#include <pufferfish/gpu/kernels/copy/rows.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Token numbers in device memory. A token outside 0 .. vocabulary - 1 has a row of NaN, and adds to no
/// gradient.
struct token_array {
  const std::int32_t* tokens;
  index_t count, vocabulary;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// y_n = row tokens[n] of the table, for all tokens. table: vocabulary x columns; y: count x columns. One
/// block per row.
template <class T>
void embedding_forward(cudaStream_t stream, row_array<const T> table, const token_array& tokens,
                       index_t columns, row_array<T> y);

/// Writes the positions 0 .. count - 1 to `order`, sorted by token, equal tokens by position. The positions
/// that add to no gradient (token `padding`, or an invalid token) are last. padding -1: no padding token.
/// Every position counts the positions before it in this order: count^2 comparisons, 32 per warp and step. (A
/// thousand tokens take 1 to 2 microseconds, 30 thousand about 0.1 milliseconds.)
void embedding_order(cudaStream_t stream, const token_array& tokens, std::int32_t padding, index_t* order);

/// Number of positions whose rows one block adds.
inline constexpr index_t embedding_window = 32;
/// Number of elements of `parts` for embedding_backward.
inline index_t embedding_parts(index_t count, index_t columns) {
  return 2 * ((count + embedding_window - 1) / embedding_window) * columns;
}
/// dtable_v (+)= sum of dy_n over the positions n of token v, in their order: up to embedding_window rows in
/// float, the sums of these in double. Without `add`, rows of tokens that do not occur are unchanged.
/// `order`: the result of embedding_order; `parts`: embedding_parts elements; dy: count x columns; dtable:
/// vocabulary x columns. No overlap.
template <class T>
void embedding_backward(cudaStream_t stream, const token_array& tokens, std::int32_t padding,
                        const index_t* order, row_array<const T> dy, index_t columns, bool add,
                        accumulate_t<T>* parts, row_array<accumulate_t<T>> dtable);

PUFFERFISH_KERNELS_END
