// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of attention over runs of rows. The matrix of weights is never stored: the softmax is applied to
/// tiles of scores in registers, and the backward pass computes the tiles again from the logarithm of each
/// row's sum (Dao, Fu, Ermon, Rudra, Ré: "FlashAttention", NeurIPS 2022; Milakov, Gimelshein: "Online
/// normalizer calculation for softmax", 2018).
///
/// Order of use: attention_forward; in the backward pass attention_gradients, or attention_row_products, then
/// attention_query_gradient and attention_key_gradient; all with the same problem.
///
/// There are two kinds of kernels, which compute the same function. Kernels on float units multiply floats.
/// Kernels on tensor cores multiply numbers of 16 bits with sums in float (Dao: "FlashAttention-2", ICLR
/// 2024); see attention_plans::tensor. They round weights and gradients of scores to T before these are
/// multiplied by v, dy, k or q. With u = 2^-8 for bfloat16 and 2^-11 for half, and weights p_ij, rounding
/// changes y_i by at most u sum_j p_ij |v_j|, dv_j by at most u sum_i p_ij |dy_i|, and dq_i and dk_j by at
/// most u times the sums of |dscore_ij k_j| and |dscore_ij q_i|; half adds 2^-25 for each weight and each
/// gradient of a score. Both kinds recompute weights in the backward pass with a relative error of about
/// 2^-22 times the larger one of |score| and |log sum|, draw the same dropout, and write log_sums of the same
/// meaning, so a forward pass of one kind may precede a backward pass of the other.

#include <pufferfish/gpu/kernels/copy/rows.hpp>
#include <pufferfish/gpu/kernels/elementwise/layer_dropout.hpp>
#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// The arguments of attention, as in ops::attention_input, with pointers to device memory. query_rows and
/// key_rows are the numbers of rows of the matrices that contain the runs.
template <class T>
struct attention_problem {
  row_array<const T> q, k, v;  ///< rows of queries, keys and values; the columns of all heads side by side
  index_t query_rows, key_rows;
  run_arrays queries, keys;       ///< the rows of each sequence, fewer than 2^30 in a sequence
  int heads, depth, value_depth;  ///< number of heads; columns of a head in q and k, and in v
  bool causal;                    ///< whether query i sees only the keys up to i + (keys - queries)
  /// Mask: a pair of query and key counts if its byte is not 0; nullptr: all pairs
  const unsigned char* allowed;
  index_t allowed_strides[3];    ///< strides of the mask: sequence, query, key
  float scale;                   ///< factor of the scores, positive
  layer_dropout dropout;         ///< dropout of the weights
  std::uint64_t first_sequence;  ///< number of the first sequence in the global batch, for dropout's streams
  /// Whether rows of queries, or of keys, may belong to no run. Kernels write zeros to these rows of their
  /// results; without gaps they do not look for them.
  bool query_gaps, key_gaps;
  bool tensor;  ///< products on tensor cores, for T of 16 bits (attention_plans::tensor); float: no effect
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Rules that choose the kernels. They depend on shapes alone.
namespace attention_plans {

/// Kernels on float units: if the average run has no more rows than this, tiles have 32 rows, else 64.
inline constexpr index_t short_run = 40;
/// Kernels on tensor cores are used if the average run has at least this number of rows.
inline constexpr index_t tensor_run = 128;
/// Tensor cores: rows of a tile, and columns of a panel of operands in shared memory.
inline constexpr int tensor_edge = 64, panel = 64;
/// Largest number of panels in shared memory: 90 KB of at least 99 KB from compute capability 8.0 on.
inline constexpr int most_panels = 10;

/// Number of panels of a matrix.
constexpr int panels(int columns) { return (columns + panel - 1) / panel; }
/// Whether there is room for a second stage of the right matrices, so that copies run ahead of products.
/// `left`, `right`: numbers of panels of the left and right matrices.
constexpr bool runs_ahead(int left, int right) { return left + 2 * right <= most_panels; }

/// Whether attention is computed on tensor cores: for 16-bit types, average runs of queries and keys from
/// tensor_run rows on, and heads of up to 320 columns of q and v together, each counted in whole panels.
template <class T>
bool tensor(const attention_problem<T>& p) {
  return sizeof(T) == 2 && p.query_rows >= tensor_run * p.queries.sequences &&
         p.key_rows >= tensor_run * p.keys.sequences &&
         2 * (panels(p.depth) + panels(p.value_depth)) <= most_panels;
}

/// Whether the kernels on float units have tiles of 32 rows. `rows`: of a matrix with `sequences` runs.
inline bool is_short(index_t rows, index_t sequences) { return rows <= short_run * sequences; }

/// Whether one launch computes the gradients of queries, keys and values: for short runs of queries and of
/// keys on float units. Each block then computes the dot products of dy and y that it needs itself. For
/// longer runs too many blocks would compute the same ones.
template <class T>
bool gradients_together(const attention_problem<T>& p) {
  return !(sizeof(T) == 2 && p.tensor) && is_short(p.query_rows, p.queries.sequences) &&
         is_short(p.key_rows, p.keys.sequences);
}

}  // namespace attention_plans

/// Writes y and, unless it is nullptr, log_sums[head * query_rows + row] = log sum_j exp(score_ij), heads x
/// query_rows floats. For a query that sees no key, the logarithm is -infinity and y is 0. Rows that belong
/// to no run become 0 if problem.query_gaps is set, and are not written otherwise. All launchers except
/// attention_row_products start one block of 128 threads for each tile of 32 or 64 rows, each head, and each
/// 64 columns of the result; none uses atomics. Throws backend_error if a launch fails.
template <class T>
void attention_forward(cudaStream_t stream, const attention_problem<T>& problem, row_array<T> y,
                       float* log_sums);

/// products[head * query_rows + row] = dot product of dy and y over the columns of the head. The products are
/// computed for all rows, also for those that belong to no run. products: heads x query_rows floats.
template <class T>
void attention_row_products(cudaStream_t stream, const attention_problem<T>& problem, row_array<const T> dy,
                            row_array<const T> y, float* products);

/// Writes dq, the gradient of the queries. log_sums is the result of attention_forward, products that of
/// attention_row_products. Rows that belong to no run: as in attention_forward.
template <class T>
void attention_query_gradient(cudaStream_t stream, const attention_problem<T>& problem, row_array<const T> dy,
                              const float* log_sums, const float* products, row_array<T> dq);
/// Writes dk and dv, the gradients of the keys and of the values. The arguments are those of
/// attention_query_gradient.
template <class T>
void attention_key_gradient(cudaStream_t stream, const attention_problem<T>& problem, row_array<const T> dy,
                            const float* log_sums, const float* products, row_array<T> dk, row_array<T> dv);

/// The whole backward pass: dq, dk and dv, in one launch if attention_plans::gradients_together(problem),
/// else by the three launchers above. y: the result of the forward pass; products: as in
/// attention_row_products, may be unused. The bits are those of the three launchers.
template <class T>
void attention_gradients(cudaStream_t stream, const attention_problem<T>& problem, row_array<const T> dy,
                         row_array<const T> y, const float* log_sums, float* products, row_array<T> dq,
                         row_array<T> dk, row_array<T> dv);

PUFFERFISH_KERNELS_END
