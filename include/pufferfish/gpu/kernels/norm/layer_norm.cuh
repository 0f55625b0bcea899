// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of layer_norm.hpp. Forward: one block per row; in each pass over the row, a thread reads the
/// elements of the sum that it has written itself, so only the block's sums need barriers.

#include <pufferfish/gpu/kernels/copy/rows.cuh>
#include <pufferfish/gpu/kernels/norm/layer_norm.hpp>
#include <pufferfish/gpu/kernels/reduce/columns.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Applies dropout to the positions position .. position + Width - 1 of the layer's stream: values *= scale
/// where an element is kept, else 0.
template <class A, int Width>
__device__ inline void drop_values(const layer_dropout& dropout, const random_key& key,
                                   std::uint64_t position, lanes<A, Width>& values) {
  const random_run<Width> words = random_words<Width>(key, position);
  for (int i = 0; i < Width; ++i) {
    values[i] = words[i] < dropout.threshold ? A(0) : values[i] * static_cast<A>(dropout.scale);
  }
}

/// Grid: row_grid, one block per row. Three passes of the block over its row compute s and its sum, the
/// squared deviations, and y. Sums are in float, in an order that depends on the number of columns and the
/// access width.
template <class T, int Width>
static __global__ void layer_norm_forward_kernel(grid_dependency earlier, norm_problem<T> p) {
  earlier.wait();
  using A = accumulate_t<T>;
  const layer_dropout& dropout = p.dropout.layer;
  const random_key key = dropout.drops() ? layer_key(*dropout.step, dropout.layer) : random_key{};
  for (index_t m = static_cast<index_t>(blockIdx.x); m < p.rows; m += static_cast<index_t>(gridDim.x)) {
    const std::uint64_t first =
        dropout.drops() ? p.dropout.number(m) * static_cast<std::uint64_t>(p.columns) : 0;
    A total = A(0);
    for_each_column<Width>(p.columns, [&](index_t c) {
      row_values<T, Width> values = load_row<Width>(p.x.row(m) + c);
      if (dropout.drops()) drop_values(dropout, key, first + static_cast<std::uint64_t>(c), values);
      if (p.residual.data != nullptr) {
        const row_values<T, Width> others = load_row<Width>(p.residual.row(m) + c);
        for (int i = 0; i < Width; ++i) values[i] += others[i];
      }
      if (p.sum.data != nullptr) store_row<Width>(p.sum.row(m) + c, values);
      for (int i = 0; i < Width; ++i) total += values[i];
    });
    const A mean = block_sum(total) / static_cast<A>(p.columns);
    const T* const s = p.sum.data != nullptr ? p.sum.row(m) : p.x.row(m);
    A squares = A(0);
    for_each_column<Width>(p.columns, [&](index_t c) {
      const row_values<T, Width> values = load_row<Width>(s + c);
      for (int i = 0; i < Width; ++i) squares += (values[i] - mean) * (values[i] - mean);
    });
    const A variance = block_sum(squares) / static_cast<A>(p.columns);
    const A scale = static_cast<A>(1.0 / sqrt(static_cast<double>(variance) + p.eps));
    if (p.statistics != nullptr && threadIdx.x == 0) {
      p.statistics[2 * m] = mean;
      p.statistics[2 * m + 1] = scale;
    }
    for_each_column<Width>(p.columns, [&](index_t c) {
      row_values<T, Width> values = load_row<Width>(s + c);
      const row_values<T, Width> weights = load_row<Width>(p.weight + c),
                                 biases = load_row<Width>(p.bias + c);
      for (int i = 0; i < Width; ++i) values[i] = (values[i] - mean) * scale * weights[i] + biases[i];
      store_row<Width>(p.y.row(m) + c, values);
    });
  }
}

/// Rows of a block that computes gradients of rows: one for each warp.
inline constexpr int gradient_rows = static_cast<int>(column_threads) / warp_threads;

/// dsum = (g - mean(g) - n mean(g n)) inverse_deviation for row m, with g = dy weight and the normalized row
/// n; dx is dsum with dropout's mask. All lanes of a warp must call this function, which makes two passes
/// over the row. `key`: of dropout.
template <int Width, class T>
__device__ inline void layer_norm_row_gradient(const norm_gradient_problem<T>& p, const random_key& key,
                                               index_t m) {
  using A = accumulate_t<T>;
  const layer_dropout& dropout = p.dropout.layer;
  const auto for_each = [&](auto f) {
    for (index_t c = index_t{block_thread() % warp_threads} * Width; c < p.columns;
         c += warp_threads * Width) {
      f(c);
    }
  };
  const A mean = p.statistics[2 * m], deviation = p.statistics[2 * m + 1];
  A sum = A(0), product = A(0);
  const auto load = [&](index_t c, row_values<T, Width>& n, row_values<T, Width>& g) {
    const row_values<T, Width> weights = load_row<Width>(p.weight + c);
    n = load_row<Width>(p.sum.row(m) + c);
    g = load_row<Width>(p.dy.row(m) + c);
    for (int i = 0; i < Width; ++i) {
      n[i] = (n[i] - mean) * deviation;
      g[i] *= weights[i];
    }
  };
  for_each([&](index_t c) {
    row_values<T, Width> n, g;
    load(c, n, g);
    for (int i = 0; i < Width; ++i) {
      sum += g[i];
      product += g[i] * n[i];
    }
  });
  const A shift = warp_sum(sum) / static_cast<A>(p.columns),
          slope = warp_sum(product) / static_cast<A>(p.columns);
  for_each([&](index_t c) {
    row_values<T, Width> n, g;
    load(c, n, g);
    for (int i = 0; i < Width; ++i) g[i] = (g[i] - shift - n[i] * slope) * deviation;
    if (p.dsum.data != nullptr) store_row<Width>(p.dsum.row(m) + c, g);
    if (p.dx.data == nullptr) return;
    if (dropout.drops()) {
      const std::uint64_t first = p.dropout.number(m) * static_cast<std::uint64_t>(p.columns);
      drop_values(dropout, key, first + static_cast<std::uint64_t>(c), g);
    }
    store_row<Width>(p.dx.row(m) + c, g);
  });
}

/// layer_norm_row_gradient for all rows, by the warps of `blocks` blocks, of which this one is number
/// `block`.
template <int Width, class T>
__device__ inline void layer_norm_row_gradients(const norm_gradient_problem<T>& p, unsigned block,
                                                unsigned blocks) {
  const layer_dropout& dropout = p.dropout.layer;
  const random_key key = dropout.drops() ? layer_key(*dropout.step, dropout.layer) : random_key{};
  const index_t first = index_t{block} * gradient_rows + block_thread() / warp_threads;
  for (index_t m = first; m < p.rows; m += index_t{blocks} * gradient_rows) {
    layer_norm_row_gradient<Width>(p, key, m);
  }
}

/// Grid: column_threads threads a block, one warp for each row.
template <class T, int Width>
static __global__ void layer_norm_input_gradient_kernel(grid_dependency earlier, norm_gradient_problem<T> p) {
  earlier.wait();
  layer_norm_row_gradients<Width>(p, blockIdx.x, gridDim.x);
}

/// A task of sum_columns: sums over rows of dy n and of dy, where n is the normalized row.
template <class T, int Width>
struct layer_norm_sum_task {
  static constexpr int width = Width;
  using state = column_sum_state<2, Width>;

  norm_gradient_problem<T> p;

  struct loaded {
    row_values<T, Width> sum, dy;
    accumulate_t<T> mean, deviation;
  };
  /// Quantity 0: sum of dy n; quantity 1: sum of dy. n is computed again from s and the row's statistics.
  __device__ void add(index_t column, index_t row, index_t end, index_t step, state& s) const {
    const auto load = [&](index_t at) {
      return loaded{load_row<Width>(p.sum.row(at) + column), load_row<Width>(p.dy.row(at) + column),
                    p.statistics[2 * at], p.statistics[2 * at + 1]};
    };
    add_runs<T>(row, end, step, s, load, [](const loaded& values, auto& run) {
      for (int k = 0; k < Width; ++k) {
        run[0][k] += values.dy[k] * ((values.sum[k] - values.mean) * values.deviation);
        run[1][k] += values.dy[k];
      }
    });
  }
};

/// Stores the two gradients of column c.
struct layer_norm_sum_finish {
  norm_parameter_gradients gradients;
  __device__ void operator()(index_t c, const column_sum_state<2, 1>& s) const {
    store_sum(s.sums[0][0], gradients.add_weight, gradients.weight[c]);
    store_sum(s.sums[1][0], gradients.add_bias, gradients.bias[c]);
  }
};

/// The first tiles x parts blocks compute the gradients of the parameters, as in column_sums_kernel; the
/// other blocks compute rows, one for each warp, as in layer_norm_input_gradient_kernel.
template <class T, int Width>
static __global__ void __launch_bounds__(column_threads, 2)
    layer_norm_gradients_kernel(grid_dependency earlier, norm_gradient_problem<T> p, stored_parts parts,
                                unsigned tiles, unsigned* counters, layer_norm_sum_finish finish) {
  earlier.wait();
  const unsigned sums = tiles * static_cast<unsigned>(parts.count);
  if (blockIdx.x < sums) {
    const layer_norm_sum_task<T, Width> task{p};
    return sum_column_part<column_sum_state<2, 1>>(task, parts, counters, finish, blockIdx.x % tiles,
                                                   static_cast<index_t>(blockIdx.x / tiles));
  }
  layer_norm_row_gradients<Width>(p, blockIdx.x - sums, gridDim.x - sums);
}

template <class T>
void layer_norm_forward(cudaStream_t stream, const norm_problem<T>& p) {
  const launch_site site(stream, "layer_norm_forward");
  const bool vectors =
      rows_in_vectors<T>(p.columns, p.x, p.residual, p.sum, p.y) && aligned16(p.weight, p.bias);
  with_width<T>(vectors, [&](auto width) {
    launch(site, row_grid(p.rows, p.columns, width), layer_norm_forward_kernel<T, width>, p);
  });
}

template <class T>
void layer_norm_gradients(cudaStream_t stream, const norm_gradient_problem<T>& p,
                          const column_workspace& work, const norm_parameter_gradients& gradients) {
  const launch_site site(stream, "layer_norm_gradients");
  const bool rows = (p.dsum.data != nullptr || p.dx.data != nullptr) && p.rows > 0 && p.columns > 0;
  const bool in_place = p.dsum.data == p.dy.data || p.dx.data == p.dy.data;
  const bool vectors = rows_in_vectors<T>(p.columns, p.sum, p.dy, p.dsum, p.dx) && aligned16(p.weight);
  with_width<T>(vectors, [&](auto width) {
    const layer_norm_sum_finish finish{gradients};
    if (!rows || in_place) {
      sum_columns<column_sum_state<2, 1>>(site, layer_norm_sum_task<T, width>{p}, p.rows, p.columns, work,
                                          finish);
      if (!rows) return;
      return launch(site, {blocks_for(p.rows, gradient_rows), column_threads},
                    layer_norm_input_gradient_kernel<T, width>, p);
    }
    const column_grid sums(width, p.rows, p.columns, work);
    const unsigned blocks = sums.tiles * static_cast<unsigned>(sums.parts.count);
    launch(site, {dim3(blocks + blocks_for(p.rows, gradient_rows)), sums.threads},
           layer_norm_gradients_kernel<T, width>, p, sums.parts, sums.tiles, work.counters, finish);
  });
}

#define PUFFERFISH_INSTANTIATE(T)                                                      \
  template void layer_norm_forward<T>(cudaStream_t, const norm_problem<T>&);           \
  template void layer_norm_gradients<T>(cudaStream_t, const norm_gradient_problem<T>&, \
                                        const column_workspace&, const norm_parameter_gradients&);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
