// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels and launchers of attention: the forward pass, and the launches of the backward pass.

#include <pufferfish/gpu/kernels/attention/attention_backward.cuh>
#include <pufferfish/gpu/kernels/attention/attention_tiles.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Adds a tile of keys, from `key` on, to the softmax of a tile's rows. The scores are replaced by weights
/// relative to the largest score so far, which are written to shared memory (`weights`); earlier sums and
/// results are rescaled to the new largest score. `best`: largest score of each row so far. `sum`: this
/// thread's part of the sum of exp(score - best).
template <int Tile, class T>
__device__ void take_scores(const attention_problem<T>& p, const attention_head<T>& head, index_t query,
                            index_t key, const kept_bits<Tile>& kept, tile_scores<Tile>& scores,
                            float (&best)[own_rows<Tile>], float (&sum)[own_rows<Tile>],
                            tile_result<Tile>& result, float* weights) {
  constexpr float nothing = -HUGE_VALF;
#pragma unroll
  for (int r = 0; r < Tile / thread_rows; ++r) {
    const int row = tile_row(r);
    float most = nothing;
#pragma unroll
    for (int c = 0; c < Tile / thread_columns; ++c) {
      const bool seen = head.sees(p, query + row, key + tile_column(c));
      scores[r][c] = seen ? scores[r][c] * p.scale : nothing;
      most = fmaxf(most, scores[r][c]);
    }
    most = fmaxf(best[r], row_reduce(most, [](float a, float b) { return fmaxf(a, b); }));
    const float factor = most == best[r] ? 1.0F : expf(best[r] - most);
    best[r] = most;
    sum[r] *= factor;
#pragma unroll
    for (int c = 0; c < 4; ++c) result[r][c] *= factor;
#pragma unroll
    for (int c = 0; c < Tile / thread_columns; ++c) {
      const int column = tile_column(c);
      const float weight = scores[r][c] == nothing ? 0.0F : expf(scores[r][c] - most);
      sum[r] += weight;
      weights[row * weight_pitch<Tile> + column] = p.dropout.drops() && !kept(row, column) ? 0.0F : weight;
    }
  }
}

/// Computes `value_columns` columns of the result for a tile of queries of one head.
template <class T, int Tile>
static __global__ void __launch_bounds__(attention_threads, forward_blocks<Tile>)
    /// Block (bx, by, bz): tile bx of the queries of all sequences, head by, columns 64 bz .. of the head's
    /// values. Keys are read tile by tile, with a running maximum and sum (online softmax), so that nothing
    /// of size queries x keys is stored. Every block of bz computes the scores again.
    attention_forward_kernel(grid_dependency earlier, attention_problem<T> p, row_array<T> y,
                             float* log_sums) {
  earlier.wait();
  __shared__ attention_memory<Tile> memory;
  const run_tile tile = find_tile<Tile>(p.queries, static_cast<index_t>(blockIdx.x));
  if (tile.sequence < 0) return;
  const attention_head<T> head(p, tile.sequence, static_cast<int>(blockIdx.y));
  const int column = static_cast<int>(blockIdx.z) * value_columns;
  float best[own_rows<Tile>], sum[own_rows<Tile>];
#pragma unroll
  for (int r = 0; r < Tile / thread_rows; ++r) {
    best[r] = -HUGE_VALF;
    sum[r] = 0.0F;
  }
  tile_result<Tile> result = {};
  const index_t end = head.visible(p, tile.first + Tile);
  for (index_t key = 0; key < end; key += Tile) {
    tile_scores<Tile> scores = {};
    const kept_bits<Tile> kept = draw_kept<Tile>(p, head, tile.first, key, memory.kept);
    add_scores<Tile>(head.q, tile.first, head.k, key, memory.operands, scores);
    take_scores<Tile>(p, head, tile.first, key, kept, scores, best, sum, result, memory.weights);
    add_weighted<Tile>(memory.weights, head.v, key, end, column, memory.operands, result);
  }
  float shares[own_rows<Tile>];
#pragma unroll
  for (int r = 0; r < Tile / thread_rows; ++r) {
    sum[r] = row_reduce(sum[r], plus());
    shares[r] = sum[r] == 0.0F ? 0.0F : (p.dropout.drops() ? p.dropout.scale : 1.0F) / sum[r];
    const index_t query = tile.first + tile_row(r);
    if (log_sums != nullptr && column == 0 && tile_column(0) == 0 && query < head.queries) {
      log_sums[head.head * p.query_rows + head.first_query + query] = best[r] + logf(sum[r]);
    }
  }
  store_result<Tile>(result, shares, y, head.first_query, tile.first, head.queries, head.head, p.value_depth,
                     column);
}

/// Calls f with the edge of a tile as an integral constant, for runs that have `rows` rows in all: 32 if the
/// average run has at most short_run rows, else 64.
template <class F>
void with_attention_tile(index_t rows, index_t sequences, F f) {
  if (rows <= short_run * sequences) {
    f(std::integral_constant<int, 32>());
  } else {
    f(std::integral_constant<int, 64>());
  }
}

/// The grid of the attention kernels: one block for every possible tile. Runs do not overlap, and each run
/// has at most one tile that is not full. Only the device knows the lengths of runs; blocks without a tile
/// end at once. `rows`: rows of the matrix that is cut into tiles; `columns`: columns of a head's result.
template <class T>
grid attention_grid(const attention_problem<T>& p, index_t rows, int tile, int columns) {
  const index_t tiles = rows / tile + p.queries.sequences;
  const int parts = ceil_div(columns, value_columns);
  return {dim3(static_cast<unsigned>(rows == 0 ? 0 : tiles), static_cast<unsigned>(p.heads),
               static_cast<unsigned>(parts)),
          dim3(attention_threads)};
}

template <class T>
void attention_forward(cudaStream_t stream, const attention_problem<T>& problem, row_array<T> y,
                       float* log_sums) {
  const launch_site site(stream, "attention_forward");
  with_attention_tile(problem.query_rows, problem.queries.sequences, [&](auto tile) {
    launch(site, attention_grid(problem, problem.query_rows, tile, problem.value_depth),
           attention_forward_kernel<T, tile>, problem, y, log_sums);
  });
}

template <class T>
void attention_row_products(cudaStream_t stream, const attention_problem<T>& problem, row_array<const T> dy,
                            row_array<const T> y, float* products) {
  launch(stream,
         {dim3(blocks_for(problem.query_rows * problem.heads, attention_threads / warp_threads)),
          dim3(attention_threads)},
         attention_row_products_kernel<T>, problem, dy, y, products);
}

template <class T>
void attention_query_gradient(cudaStream_t stream, const attention_problem<T>& problem, row_array<const T> dy,
                              const float* log_sums, const float* products, row_array<T> dq) {
  const launch_site site(stream, "attention_query_gradient");
  with_attention_tile(problem.query_rows, problem.queries.sequences, [&](auto tile) {
    launch(site, attention_grid(problem, problem.query_rows, tile, problem.depth),
           attention_query_gradient_kernel<T, tile>, problem, dy, log_sums, products, dq);
  });
}

template <class T>
void attention_key_gradient(cudaStream_t stream, const attention_problem<T>& problem, row_array<const T> dy,
                            const float* log_sums, const float* products, row_array<T> dk, row_array<T> dv) {
  const launch_site site(stream, "attention_key_gradient");
  const int columns = problem.depth > problem.value_depth ? problem.depth : problem.value_depth;
  with_attention_tile(problem.key_rows, problem.keys.sequences, [&](auto tile) {
    launch(site, attention_grid(problem, problem.key_rows, tile, columns),
           attention_key_gradient_kernel<T, tile>, problem, dy, log_sums, products, dk, dv);
  });
}

#define PUFFERFISH_INSTANTIATE(T)                                                                          \
  template void attention_forward<T>(cudaStream_t, const attention_problem<T>&, row_array<T>, float*);     \
  template void attention_row_products<T>(cudaStream_t, const attention_problem<T>&, row_array<const T>,   \
                                          row_array<const T>, float*);                                     \
  template void attention_query_gradient<T>(cudaStream_t, const attention_problem<T>&, row_array<const T>, \
                                            const float*, const float*, row_array<T>);                     \
  template void attention_key_gradient<T>(cudaStream_t, const attention_problem<T>&, row_array<const T>,   \
                                          const float*, const float*, row_array<T>, row_array<T>);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
