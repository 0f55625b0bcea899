// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of attention: the backward pass. Weights are p = exp(score - log sum). With s = 1 / (1 - dropout
/// rate), u = p for weights that dropout keeps, else 0, and g = dy v s for those, else 0. Then dv = s u^T dy,
/// dscore = p (g - dy y), dq = scale dscore k, and dk = scale dscore^T q. Blocks for tiles of queries compute
/// dq, blocks for tiles of keys compute dk and dv, so every sum has a fixed order.

#include <pufferfish/gpu/kernels/attention/attention_steps.cuh>

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
/// the sum, negative and to the base 2, and the dot product of dy and y.
struct query_record {
  float shift, product;
};

/// The numbers of queries, in device memory, that the backward pass reads: the arrays log_sums and products
/// of attention_query_gradient. products nullptr: each block computes the products that it needs from dy and
/// y.
template <class T>
struct query_numbers {
  const float *log_sums, *products;
  row_array<const T> y;
};

/// Reads the record of a query of a head; the product is 0 if it is not in memory. All weights of a query
/// that sees no key are hidden, and the rows of a query that does not exist are 0, so their logarithm is 0.
template <class T>
__device__ inline query_record read_query(const attention_problem<T>& p, const attention_head<T>& head,
                                          const query_numbers<T>& numbers, int query) {
  if (query >= head.queries) return {0.0F, 0.0F};
  const index_t at = head.head * p.query_rows + head.first_query + query;
  const float log_sum = numbers.log_sums[at];
  return {log_sum == -HUGE_VALF ? 0.0F : -log_sum * log2_e,
          numbers.products == nullptr ? 0.0F : numbers.products[at]};
}

/// Writes the products of the `Edge` queries from `first` on to records[i].product: 0 for a query that does
/// not exist. Warps take the queries by turns; the sums are those of attention_row_products_kernel. A barrier
/// must follow.
template <int Edge, class T>
__device__ inline void write_products(const head_rows<T>& dy, const head_rows<T>& y, int first,
                                      query_record* records) {
  const int lane = block_thread() % warp_threads;
#pragma unroll 4
  for (int i = block_thread() / warp_threads; i < Edge; i += attention_threads / warp_threads) {
    float sum = 0.0F;
    if (first + i < dy.rows) {
      const T *const a = dy.data + (first + i) * dy.stride, *const b = y.data + (first + i) * y.stride;
      for (int c = lane; c < dy.columns; c += warp_threads) {
        sum += static_cast<float>(a[c]) * static_cast<float>(b[c]);
      }
    }
    sum = warp_sum(sum);
    if (lane == 0) records[i].product = sum;
  }
}

/// Factor of weights that are kept.
template <class T>
__device__ float kept_factor(const attention_problem<T>& p) {
  return p.dropout.drops() ? p.dropout.scale : 1.0F;
}

/// Computes 64 columns of dq for tile `number` of the queries of one head: columns 64 blockIdx.z .. of the
/// depth of head blockIdx.y. Sums run over keys in order. `Own`: numbers.products is nullptr.
template <class Block, bool Own, class T>
__device__ inline void query_gradient_tile(const attention_problem<T>& p, const row_array<const T>& dy,
                                           const query_numbers<T>& numbers, const row_array<T>& dq,
                                           index_t number) {
  constexpr int edge = Block::edge;
  using scores_tile = typename Block::scores;
  __shared__ typename Block::memory memory;
  const int column = static_cast<int>(blockIdx.z) * result_columns;
  if (p.query_gaps) clear_result_gaps<edge>(p.queries, p.query_rows, number, dq, p.depth);
  const run_tile tile = find_tile<edge>(p.queries, number);
  if (tile.sequence < 0 || column >= p.depth) return;
  const attention_head<T> head(p, tile.sequence, static_cast<int>(blockIdx.y));
  const attention_operands<T> operands{{head.q, head.of_queries(dy, p.value_depth)}, {head.k, head.v}};
  const int end = head.visible(p, tile.first + edge);
  Block block(memory, operands, tile.first, 0, end);
  typename Block::result result;
  array_of<query_record, scores_tile::own_rows> queries;
#pragma unroll
  for (int r = 0; r < scores_tile::own_rows; ++r) {
    queries[r] = read_query(p, head, numbers, tile.first + result.row(r));
  }
  if constexpr (Own) {
    __shared__ query_record own[static_cast<std::size_t>(edge)];
    write_products<edge>(operands.left[1], head.of_queries(numbers.y, p.value_depth), tile.first, own);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < scores_tile::own_rows; ++r) queries[r].product = own[result.row(r)].product;
  }
  const float scale = p.scale * log2_e, factor = kept_factor(p);
  for (int key = 0; key < end; key += edge) {
    const auto mask = tile_mask<T>::template of<edge>(p, head, tile.first, key);
    const kept_bits<edge> kept = draw_kept<edge>(p, head, tile.first, key, memory.kept);
    block.fetch(key);
    scores_tile scores, gradients;
    block.add_scores(0, scores);
    block.add_scores(1, gradients);
    hide_pairs<false>(mask, -HUGE_VALF, scores);
    hide_pairs<false>(mask, 0.0F, gradients);
    if (p.dropout.drops()) keep_only(gradients, 0.0F, chosen_elements(gradients, kept));
#pragma unroll
    for (int r = 0; r < scores_tile::own_rows; ++r) {
#pragma unroll
      for (int c = 0; c < scores_tile::own_columns; ++c) {
        const float weight = fast_exp2(fmaf(scores.at(r, c), scale, queries[r].shift));
        scores.at(r, c) = weight * fmaf(gradients.at(r, c), factor, -queries[r].product);
      }
    }
    block.add_weighted(scores, 0, column, result);
    block.release();
  }
  store_result(result, p.scale, dq, head.first_query, tile.first, head.queries, head.head, p.depth, column);
}

/// Computes 64 columns of dk and of dv for tile `number` of the keys of one head: columns 64 blockIdx.z .. of
/// both depths of head blockIdx.y. Rows of tiles belong to keys. Sums run over queries in order. Columns
/// beyond a depth are not stored. `Own`: numbers.products is nullptr.
template <class Block, bool Own, class T>
__device__ inline void key_gradient_tile(const attention_problem<T>& p, const row_array<const T>& dy,
                                         const query_numbers<T>& numbers, const row_array<T>& dk,
                                         const row_array<T>& dv, index_t number) {
  constexpr int edge = Block::edge;
  using scores_tile = typename Block::scores;
  __shared__ typename Block::memory memory;
  __shared__ query_record queries[static_cast<std::size_t>(edge)];
  if (p.key_gaps) {
    clear_result_gaps<edge>(p.keys, p.key_rows, number, dk, p.depth);
    clear_result_gaps<edge>(p.keys, p.key_rows, number, dv, p.value_depth);
  }
  const run_tile tile = find_tile<edge>(p.keys, number);
  if (tile.sequence < 0) return;
  const attention_head<T> head(p, tile.sequence, static_cast<int>(blockIdx.y));
  const int column = static_cast<int>(blockIdx.z) * result_columns;
  const attention_operands<T> operands{{head.k, head.v}, {head.q, head.of_queries(dy, p.value_depth)}};
  // First query that sees the first key of the tile.
  const int sees = p.causal ? tile.first + head.queries - head.keys : 0;
  const int first = sees > 0 ? sees / edge * edge : 0;
  Block block(memory, operands, tile.first, first, head.queries);
  typename Block::result key_result, value_result;
  const float scale = p.scale * log2_e, factor = kept_factor(p);
  const auto record_at = [&](int query) {
    return block_thread() < edge ? read_query(p, head, numbers, query + block_thread()) : query_record{};
  };
  query_record record = record_at(first);
  for (int query = first; query < head.queries; query += edge) {
    const auto mask = tile_mask<T>::template of<edge>(p, head, query, tile.first);
    const kept_bits<edge> kept = draw_kept<edge>(p, head, query, tile.first, memory.kept);
    if constexpr (Own) {
      if (block_thread() < edge) queries[block_thread()].shift = record.shift;
      write_products<edge>(operands.right[1], head.of_queries(numbers.y, p.value_depth), query, queries);
    } else {
      if (block_thread() < edge) queries[block_thread()] = record;
    }
    record = record_at(query + edge);  // read during the products
    block.fetch(query);
    scores_tile scores, gradients;
    block.add_scores(0, scores);
    block.add_scores(1, gradients);
    hide_pairs<true>(mask, -HUGE_VALF, scores);
    hide_pairs<true>(mask, 0.0F, gradients);
    std::uint32_t kept_pairs = 0;
    if (p.dropout.drops()) {
      kept_pairs = chosen_elements(scores, [&](int row, int at) { return kept(at, row); });
      keep_only(gradients, 0.0F, kept_pairs);
    }
#pragma unroll
    for (int c = 0; c < scores_tile::own_columns; ++c) {
      const query_record of = queries[scores.column(c)];
#pragma unroll
      for (int r = 0; r < scores_tile::own_rows; ++r) {
        const float weight = fast_exp2(fmaf(scores.at(r, c), scale, of.shift));
        scores.at(r, c) = weight;
        gradients.at(r, c) = weight * fmaf(gradients.at(r, c), factor, -of.product);
      }
    }
    if (p.dropout.drops()) keep_only(scores, 0.0F, kept_pairs);
    block.add_weighted(scores, 1, column, value_result);
    block.add_weighted(gradients, 0, column, key_result);
    block.release();
  }
  store_result(key_result, p.scale, dk, head.first_key, tile.first, head.keys, head.head, p.depth, column);
  store_result(value_result, factor, dv, head.first_key, tile.first, head.keys, head.head, p.value_depth,
               column);
}

/// Grid: (tiles of queries, heads, 64 columns of a head's depth).
template <class T, class Block>
static __global__ void __launch_bounds__(attention_threads, Block::query_blocks)
    attention_query_gradient_kernel(grid_dependency earlier, attention_problem<T> p, row_array<const T> dy,
                                    query_numbers<T> numbers, row_array<T> dq) {
  earlier.wait();
  query_gradient_tile<Block, false>(p, dy, numbers, dq, static_cast<index_t>(blockIdx.x));
}
/// Grid: (tiles of keys, heads, 64 columns of the larger depth of a head).
template <class T, class Block>
static __global__ void __launch_bounds__(attention_threads, Block::key_blocks)
    attention_key_gradient_kernel(grid_dependency earlier, attention_problem<T> p, row_array<const T> dy,
                                  query_numbers<T> numbers, row_array<T> dk, row_array<T> dv) {
  earlier.wait();
  key_gradient_tile<Block, false>(p, dy, numbers, dk, dv, static_cast<index_t>(blockIdx.x));
}
/// Both kinds of tiles in one launch, where a block computes the products of its queries itself. Grid:
/// (query_tiles tiles of queries, then tiles of keys; heads; 64 columns of the larger depth of a head).
template <class T, class Block>
static __global__ void __launch_bounds__(attention_threads, Block::key_blocks)
    attention_gradients_kernel(grid_dependency earlier, attention_problem<T> p, row_array<const T> dy,
                               query_numbers<T> numbers, row_array<T> dq, row_array<T> dk, row_array<T> dv,
                               unsigned query_tiles) {
  earlier.wait();
  if (blockIdx.x < query_tiles) {
    query_gradient_tile<Block, true>(p, dy, numbers, dq, static_cast<index_t>(blockIdx.x));
  } else {
    key_gradient_tile<Block, true>(p, dy, numbers, dk, dv, static_cast<index_t>(blockIdx.x - query_tiles));
  }
}

PUFFERFISH_KERNELS_END
