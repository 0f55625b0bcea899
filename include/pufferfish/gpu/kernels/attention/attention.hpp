// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of attention over runs of rows. The matrix of weights is never stored: the softmax is applied to
/// tiles of scores in registers, and the backward pass computes the tiles again from the logarithm of each
/// row's sum (Dao, Fu, Ermon, Rudra, Ré: "FlashAttention", NeurIPS 2022; Milakov, Gimelshein: "Online
/// normalizer calculation for softmax", 2018).
///
/// Order of use: attention_forward; in the backward pass attention_row_products, then
/// attention_query_gradient and attention_key_gradient, all with the same problem.

#include <pufferfish/gpu/kernels/copy/rows.hpp>
#include <pufferfish/gpu/kernels/elementwise/layer_dropout.hpp>
#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// As ops::attention_input. query_rows, key_rows: number of rows of the matrices that contain the runs.
template <class T>
struct attention_problem {
  row_array<const T> q, k, v;
  index_t query_rows, key_rows;
  run_arrays queries, keys;
  int heads, depth, value_depth;  ///< depths of one head
  bool causal;
  const unsigned char* allowed;  ///< nullptr: all
  index_t allowed_strides[3];
  float scale;            ///< factor of the scores
  layer_dropout dropout;  ///< dropout of the weights
  std::uint64_t first_sequence;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// If the average run has no more rows than this, tiles have 32 rows, else 64.
inline constexpr index_t short_run = 40;

/// Writes y, and log_sums[head * query_rows + row] = log sum_j exp(score_ij) unless it is nullptr. log_sums:
/// heads x query_rows floats; -infinity for a query that sees no key, whose y is 0. Rows of no run are not
/// written. The launchers but attention_row_products start one block of 128 threads per tile of 32 or 64
/// rows, head and 64 columns of the result; no atomics.
template <class T>
void attention_forward(cudaStream_t stream, const attention_problem<T>& problem, row_array<T> y,
                       float* log_sums);

/// products[head * query_rows + row] = dot product of dy and y over the columns of the head. For all rows,
/// also those of no run. products: heads x query_rows floats.
template <class T>
void attention_row_products(cudaStream_t stream, const attention_problem<T>& problem, row_array<const T> dy,
                            row_array<const T> y, float* products);

/// The gradients of q; then those of k and v. log_sums is the result of attention_forward, products that of
/// attention_row_products. Rows of no run are not written.
template <class T>
void attention_query_gradient(cudaStream_t stream, const attention_problem<T>& problem, row_array<const T> dy,
                              const float* log_sums, const float* products, row_array<T> dq);
template <class T>
void attention_key_gradient(cudaStream_t stream, const attention_problem<T>& problem, row_array<const T> dy,
                            const float* log_sums, const float* products, row_array<T> dk, row_array<T> dv);

PUFFERFISH_KERNELS_END
