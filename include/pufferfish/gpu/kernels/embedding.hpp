// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of rows of a table by token, and of the table's gradient.

#include <pufferfish/gpu/kernels/rows.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Tokens on the device. Those outside 0 .. vocabulary - 1 read NaN and add to no gradient.
struct token_array {
  const std::int32_t* tokens;
  index_t count, vocabulary;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// y_n = row tokens[n] of the table.
template <class T>
void embedding_forward(cudaStream_t stream, row_array<const T> table, const token_array& tokens,
                       index_t columns, row_array<T> y);

/// order: the positions of tokens in the order of tokens, those of a token from first to last; behind them
/// those that add to no gradient (`padding`; no token: -1). Every position counts those before it: count^2
/// comparisons, 32 a warp and step. (A thousand tokens: a microsecond or two; 30 thousand: about a tenth of a
/// millisecond.)
void embedding_order(cudaStream_t stream, const token_array& tokens, std::int32_t padding, index_t* order);

/// Positions whose rows one block adds up; elements of `parts` that the next launcher needs.
inline constexpr index_t embedding_window = 32;
inline index_t embedding_parts(index_t count, index_t columns) {
  return 2 * ((count + embedding_window - 1) / embedding_window) * columns;
}
/// dtable_v (+)= sum of dy_n over the positions of token v, in their order: up to embedding_window rows in
/// float, their sums in double. Without `add`, rows of tokens that do not occur are left alone.
template <class T>
void embedding_backward(cudaStream_t stream, const token_array& tokens, std::int32_t padding,
                        const index_t* order, row_array<const T> dy, index_t columns, bool add,
                        accumulate_t<T>* parts, row_array<accumulate_t<T>> dtable);

PUFFERFISH_KERNELS_END
