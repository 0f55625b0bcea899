// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels and launchers of attention: the forward pass, and the launches of the backward pass.

#include <pufferfish/gpu/kernels/attention/attention_backward.cuh>
#include <pufferfish/gpu/kernels/attention/attention_floats.cuh>
#include <pufferfish/gpu/kernels/attention/attention_steps.cuh>
#include <pufferfish/gpu/kernels/attention/attention_tensor.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Computes 64 columns of the result for a tile of queries of one head.
template <class T, class Block>
static __global__ void __launch_bounds__(attention_threads, Block::forward_blocks)
    /// Block (bx, by, bz): tile bx of the queries of all sequences, head by, columns 64 bz .. of the head's
    /// values. Keys are read tile by tile, with a running maximum and sum (online softmax), so that nothing
    /// of size queries x keys is stored. Every block of bz computes the scores again.
    attention_forward_kernel(grid_dependency earlier, attention_problem<T> p, row_array<T> y,
                             float* log_sums) {
  earlier.wait();
  constexpr int edge = Block::edge;
  using scores_tile = typename Block::scores;
  __shared__ typename Block::memory memory;
  const int column = static_cast<int>(blockIdx.z) * result_columns;
  if (p.query_gaps)
    clear_result_gaps<edge>(p.queries, p.query_rows, static_cast<index_t>(blockIdx.x), y, p.value_depth);
  const run_tile tile = find_tile<edge>(p.queries, static_cast<index_t>(blockIdx.x));
  if (tile.sequence < 0) return;
  const attention_head<T> head(p, tile.sequence, static_cast<int>(blockIdx.y));
  const attention_operands<T> operands{{head.q, head.q.part(0, 0)},
                                       {head.k, head.v.part(column, result_columns)}};
  const int end = head.visible(p, tile.first + edge);
  Block block(memory, operands, tile.first, 0, end);
  typename Block::result result;
  own_row_values<scores_tile> best, sum;
#pragma unroll
  for (int r = 0; r < scores_tile::own_rows; ++r) {
    best[r] = -HUGE_VALF;
    sum[r] = 0.0F;
  }
  for (int key = 0; key < end; key += edge) {
    const auto mask = tile_mask<T>::template of<edge>(p, head, tile.first, key);
    const kept_bits<edge> kept = draw_kept<edge>(p, head, tile.first, key, memory.kept);
    block.fetch(key);
    scores_tile scores;
    block.add_scores(0, scores);
    hide_pairs<false>(mask, -HUGE_VALF, scores);
    take_scores<Block>(p.scale * log2_e, scores, best, sum, result);
    if (p.dropout.drops()) keep_only(scores, 0.0F, chosen_elements(scores, kept));
    block.add_weighted(scores, 1, 0, result);
    block.release();
  }
#pragma unroll
  for (int r = 0; r < scores_tile::own_rows; ++r) {
    sum[r] = row_reduce<Block::row_lanes>(sum[r], plus());
    const float share = sum[r] == 0.0F ? 0.0F : 1.0F / sum[r];
#pragma unroll
    for (int c = 0; c < Block::result::own_columns; ++c) result.at(r, c) *= share;
    const int query = tile.first + result.row(r);
    if (log_sums != nullptr && column == 0 && result.column(0) == 0 && query < head.queries) {
      log_sums[head.head * p.query_rows + head.first_query + query] = best[r] * p.scale + logf(sum[r]);
    }
  }
  store_result(result, p.dropout.drops() ? p.dropout.scale : 1.0F, y, head.first_query, tile.first,
               head.queries, head.head, p.value_depth, column);
}

/// Calls f(type_identity) with the kind of block that cuts a matrix of `rows` rows with `sequences` runs into
/// tiles.
template <class T, class F>
void with_attention_block(const attention_problem<T>& p, index_t rows, index_t sequences, F f) {
  if constexpr (sizeof(T) == 2) {
    if (p.tensor) return f(std::type_identity<tensor_block<T>>());
  }
  if (attention_plans::is_short(rows, sequences)) {
    f(std::type_identity<float_block<T, 32>>());
  } else {
    f(std::type_identity<float_block<T, 64>>());
  }
}

/// The grid of an attention kernel: one block for every possible tile. Runs do not overlap, and each run has
/// at most one tile that is not full. Only the device knows the lengths of runs; blocks without a tile end at
/// once. `rows`: rows of the matrix that is cut into tiles; `columns`: columns of a head's result; `left`,
/// `right`: panels of a block's matrices.
template <class Block, class T>
grid attention_grid(const attention_problem<T>& p, index_t rows, int columns, int left, int right) {
  const index_t tiles = rows / Block::edge + p.queries.sequences;
  return {dim3(static_cast<unsigned>(rows == 0 ? 0 : tiles), static_cast<unsigned>(p.heads),
               static_cast<unsigned>(ceil_div(columns, result_columns))),
          dim3(attention_threads), Block::shared_bytes(left, right)};
}

template <class T>
void attention_forward(cudaStream_t stream, const attention_problem<T>& problem, row_array<T> y,
                       float* log_sums) {
  const launch_site site(stream, "attention_forward");
  const int panels = attention_plans::panels(problem.depth);
  with_attention_block(problem, problem.query_rows, problem.queries.sequences, [&](auto kind) {
    using Block = typename decltype(kind)::type;
    launch(site, attention_grid<Block>(problem, problem.query_rows, problem.value_depth, panels, panels + 1),
           attention_forward_kernel<T, Block>, problem, y, log_sums);
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
  const int panels = attention_plans::panels(problem.depth) + attention_plans::panels(problem.value_depth);
  with_attention_block(problem, problem.query_rows, problem.queries.sequences, [&](auto kind) {
    using Block = typename decltype(kind)::type;
    launch(site, attention_grid<Block>(problem, problem.query_rows, problem.depth, panels, panels),
           attention_query_gradient_kernel<T, Block>, problem, dy, query_numbers<T>{log_sums, products, {}},
           dq);
  });
}

template <class T>
void attention_key_gradient(cudaStream_t stream, const attention_problem<T>& problem, row_array<const T> dy,
                            const float* log_sums, const float* products, row_array<T> dk, row_array<T> dv) {
  const launch_site site(stream, "attention_key_gradient");
  const int panels = attention_plans::panels(problem.depth) + attention_plans::panels(problem.value_depth);
  const int columns = problem.depth > problem.value_depth ? problem.depth : problem.value_depth;
  with_attention_block(problem, problem.key_rows, problem.keys.sequences, [&](auto kind) {
    using Block = typename decltype(kind)::type;
    launch(site, attention_grid<Block>(problem, problem.key_rows, columns, panels, panels),
           attention_key_gradient_kernel<T, Block>, problem, dy, query_numbers<T>{log_sums, products, {}}, dk,
           dv);
  });
}

template <class T>
void attention_gradients(cudaStream_t stream, const attention_problem<T>& problem, row_array<const T> dy,
                         row_array<const T> y, const float* log_sums, float* products, row_array<T> dq,
                         row_array<T> dk, row_array<T> dv) {
  if (!attention_plans::gradients_together(problem)) {
    attention_row_products<T>(stream, problem, dy, y, products);
    attention_query_gradient<T>(stream, problem, dy, log_sums, products, dq);
    return attention_key_gradient<T>(stream, problem, dy, log_sums, products, dk, dv);
  }
  const launch_site site(stream, "attention_gradients");
  using Block = float_block<T, 32>;
  const int columns = problem.depth > problem.value_depth ? problem.depth : problem.value_depth;
  grid blocks = attention_grid<Block>(problem, problem.query_rows, columns, 0, 0);
  const unsigned query_tiles = blocks.blocks.x;
  blocks.blocks.x += attention_grid<Block>(problem, problem.key_rows, columns, 0, 0).blocks.x;
  launch(site, blocks, attention_gradients_kernel<T, Block>, problem, dy,
         query_numbers<T>{log_sums, nullptr, y}, dq, dk, dv, query_tiles);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                            \
  template void attention_forward<T>(cudaStream_t, const attention_problem<T>&, row_array<T>, float*);       \
  template void attention_row_products<T>(cudaStream_t, const attention_problem<T>&, row_array<const T>,     \
                                          row_array<const T>, float*);                                       \
  template void attention_query_gradient<T>(cudaStream_t, const attention_problem<T>&, row_array<const T>,   \
                                            const float*, const float*, row_array<T>);                       \
  template void attention_key_gradient<T>(cudaStream_t, const attention_problem<T>&, row_array<const T>,     \
                                          const float*, const float*, row_array<T>, row_array<T>);           \
  template void attention_gradients<T>(cudaStream_t, const attention_problem<T>&, row_array<const T>,        \
                                       row_array<const T>, const float*, float*, row_array<T>, row_array<T>, \
                                       row_array<T>);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
