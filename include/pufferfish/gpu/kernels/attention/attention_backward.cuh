// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of attention: the backward pass. Weights are p = exp(score - log sum). With s = 1 / (1 - dropout
/// rate), u = p s for weights that dropout keeps, else 0, and g = dy v s for those, else 0. Then dv = u^T dy,
/// dscore = p (g - dy y) scale, dq = dscore k, and dk = dscore^T q. Blocks for tiles of queries compute dq,
/// blocks for tiles of keys compute dk and dv, so every sum has a fixed order.

#include <pufferfish/gpu/kernels/attention/attention_tiles.cuh>

PUFFERFISH_KERNELS_BEGIN

/// One warp for each row and head. Warp w of the grid computes the pairs w, w + warps, ..., where pair row +
/// query_rows head belongs to a row and a head.
template <class T>
static __global__ void attention_row_products_kernel(grid_dependency earlier, attention_problem<T> p,
                                                     row_array<const T> dy, row_array<const T> y,
                                                     float* products) {
  earlier.wait();
  const int lane = block_thread() % warp_threads;
  const index_t warps = grid_threads() / warp_threads;
  for (index_t at = grid_thread() / warp_threads; at < p.query_rows * p.heads; at += warps) {
    const index_t row = at % p.query_rows, column = at / p.query_rows * p.value_depth;
    const T *const a = dy.row(row) + column, *const b = y.row(row) + column;
    float sum = 0.0F;
    for (int c = lane; c < p.value_depth; c += warp_threads) {
      sum += static_cast<float>(a[c]) * static_cast<float>(b[c]);
    }
    sum = warp_sum(sum);
    if (lane == 0) products[at] = sum;
  }
}

/// The two numbers of a query from which its weights and their gradients are computed again: the logarithm of
/// the sum, and the dot product of dy and y.
struct query_record {
  float log_sum, product;
};

/// Reads the record at position `at` of both arrays. A query that does not exist has the logarithm -infinity,
/// which makes its weights 0.
__device__ inline query_record read_query(const float* log_sums, const float* products, index_t at,
                                          bool exists) {
  return exists ? query_record{log_sums[at], products[at]} : query_record{-HUGE_VALF, 0.0F};
}

/// The weight u after dropout, and the gradient of the score.
struct score_gradient {
  float used, dscore;
};
/// Computes u and dscore of a pair of query and key by the formulas at the top of this file. `seen`: the mask
/// allows the pair; `kept`: dropout keeps its weight; `gradient`: dot product of the query's dy and the key's
/// v.
template <class T>
__device__ inline score_gradient differentiate(const attention_problem<T>& p, bool seen, bool kept,
                                               float score, float gradient, const query_record& query) {
  if (!seen || query.log_sum == -HUGE_VALF) return {0.0F, 0.0F};
  const float weight = expf(score * p.scale - query.log_sum);
  const float factor = !p.dropout.drops() ? 1.0F : kept ? p.dropout.scale : 0.0F;
  return {weight * factor, weight * (gradient * factor - query.product) * p.scale};
}

/// Computes `value_columns` columns of dq for a tile of queries of one head.
template <class T, int Tile>
static __global__ void __launch_bounds__(attention_threads, backward_blocks<Tile>)
    /// Block (bx, by, bz): tile bx of the queries, head by, columns 64 bz .. of the head's depth. Sums run
    /// over keys in order.
    attention_query_gradient_kernel(grid_dependency earlier, attention_problem<T> p, row_array<const T> dy,
                                    const float* log_sums, const float* products, row_array<T> dq) {
  earlier.wait();
  __shared__ attention_memory<Tile> memory;
  const run_tile tile = find_tile<Tile>(p.queries, static_cast<index_t>(blockIdx.x));
  if (tile.sequence < 0) return;
  const attention_head<T> head(p, tile.sequence, static_cast<int>(blockIdx.y));
  const head_rows<T> g = head.of_queries(dy, p.value_depth);
  const int column = static_cast<int>(blockIdx.z) * value_columns;
  query_record queries[own_rows<Tile>];
  float ones[own_rows<Tile>];
#pragma unroll
  for (int r = 0; r < Tile / thread_rows; ++r) {
    const index_t query = tile.first + tile_row(r);
    queries[r] = read_query(log_sums, products, head.head * p.query_rows + head.first_query + query,
                            query < head.queries);
    ones[r] = 1.0F;
  }
  tile_result<Tile> result = {};
  const index_t end = head.visible(p, tile.first + Tile);
  for (index_t key = 0; key < end; key += Tile) {
    tile_scores<Tile> scores = {}, gradients = {};
    const kept_bits<Tile> kept = draw_kept<Tile>(p, head, tile.first, key, memory.kept);
    add_scores<Tile>(head.q, tile.first, head.k, key, memory.operands, scores);
    add_scores<Tile>(g, tile.first, head.v, key, memory.operands, gradients);
#pragma unroll
    for (int r = 0; r < Tile / thread_rows; ++r) {
      const int row = tile_row(r);
#pragma unroll
      for (int c = 0; c < Tile / thread_columns; ++c) {
        const int at = tile_column(c);
        memory.weights[row * weight_pitch<Tile> + at] =
            differentiate(p, head.sees(p, tile.first + row, key + at), p.dropout.drops() && kept(row, at),
                          scores[r][c], gradients[r][c], queries[r])
                .dscore;
      }
    }
    add_weighted<Tile>(memory.weights, head.k, key, end, column, memory.operands, result);
  }
  store_result<Tile>(result, ones, dq, head.first_query, tile.first, head.queries, head.head, p.depth,
                     column);
}

/// Computes `value_columns` columns of dk and of dv for a tile of keys of one head. Rows of threads belong to
/// keys.
template <class T, int Tile>
static __global__ void __launch_bounds__(attention_threads, backward_blocks<Tile>)
    /// Block (bx, by, bz): tile bx of the keys, head by, columns 64 bz .. of both depths. Sums run over
    /// queries in order. Columns beyond a depth are not stored.
    attention_key_gradient_kernel(grid_dependency earlier, attention_problem<T> p, row_array<const T> dy,
                                  const float* log_sums, const float* products, row_array<T> dk,
                                  row_array<T> dv) {
  earlier.wait();
  __shared__ attention_memory<Tile> memory;
  const run_tile tile = find_tile<Tile>(p.keys, static_cast<index_t>(blockIdx.x));
  if (tile.sequence < 0) return;
  const attention_head<T> head(p, tile.sequence, static_cast<int>(blockIdx.y));
  const head_rows<T> g = head.of_queries(dy, p.value_depth);
  const int column = static_cast<int>(blockIdx.z) * value_columns;
  float ones[own_rows<Tile>];
#pragma unroll
  for (int r = 0; r < Tile / thread_rows; ++r) ones[r] = 1.0F;
  tile_result<Tile> key_result = {}, value_result = {};
  // First query that sees the first key of the tile.
  const index_t first = p.causal ? tile.first + head.queries - head.keys : 0;
  for (index_t query = first > 0 ? first / Tile * Tile : 0; query < head.queries; query += Tile) {
    tile_scores<Tile> scores = {}, gradients = {};
    const kept_bits<Tile> kept = draw_kept<Tile>(p, head, query, tile.first, memory.kept);
    add_scores<Tile>(head.k, tile.first, head.q, query, memory.operands, scores);
    add_scores<Tile>(head.v, tile.first, g, query, memory.operands, gradients);
#pragma unroll
    for (int c = 0; c < Tile / thread_columns; ++c) {
      const int at = tile_column(c);
      const query_record record =
          read_query(log_sums, products, head.head * p.query_rows + head.first_query + query + at,
                     query + at < head.queries);
#pragma unroll
      for (int r = 0; r < Tile / thread_rows; ++r) {
        const int row = tile_row(r);
        const score_gradient both =
            differentiate(p, head.sees(p, query + at, tile.first + row), p.dropout.drops() && kept(at, row),
                          scores[r][c], gradients[r][c], record);
        memory.weights[row * weight_pitch<Tile> + at] = both.used;
        scores[r][c] = both.dscore;
      }
    }
    add_weighted<Tile>(memory.weights, g, query, head.queries, column, memory.operands, value_result);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < Tile / thread_rows; ++r) {
#pragma unroll
      for (int c = 0; c < Tile / thread_columns; ++c) {
        memory.weights[tile_row(r) * weight_pitch<Tile> + tile_column(c)] = scores[r][c];
      }
    }
    add_weighted<Tile>(memory.weights, head.q, query, head.queries, column, memory.operands, key_result);
  }
  store_result<Tile>(key_result, ones, dk, head.first_key, tile.first, head.keys, head.head, p.depth, column);
  store_result<Tile>(value_result, ones, dv, head.first_key, tile.first, head.keys, head.head, p.value_depth,
                     column);
}

PUFFERFISH_KERNELS_END
