// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Layer normalisation: a block a row. What a thread wrote of the sum in one pass it reads in the next.

#include <pufferfish/gpu/kernels/layer_norm.hpp>
#include <pufferfish/gpu/kernels/rows.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Calls f(column) for the calling thread's share of a row.
template <int Width, class F>
__device__ inline void for_each_column(index_t columns, F f) {
  for (index_t c = static_cast<index_t>(threadIdx.x) * Width; c < columns;
       c += static_cast<index_t>(blockDim.x) * Width) {
    f(c);
  }
}

/// values *= scale where dropout keeps, else 0.
template <int Width, class A>
__device__ inline void drop_values(const layer_dropout& dropout, std::uint64_t stream, std::uint64_t position,
                                   A (&values)[Width]) {
  std::uint32_t words[Width];
  random_words(dropout.step->seed, stream, position, words);
  for (int i = 0; i < Width; ++i) {
    values[i] = words[i] < dropout.threshold ? A(0) : values[i] * static_cast<A>(dropout.scale);
  }
}

template <class T, int Width>
static __global__ void layer_norm_forward_kernel(norm_problem<T> p) {
  using A = accumulate_t<T>;
  const layer_dropout& dropout = p.dropout.layer;
  const std::uint64_t stream = dropout.drops() ? dropout.stream() : 0;
  for (index_t m = static_cast<index_t>(blockIdx.x); m < p.rows; m += static_cast<index_t>(gridDim.x)) {
    const std::uint64_t first =
        dropout.drops() ? p.dropout.number(m) * static_cast<std::uint64_t>(p.columns) : 0;
    A total = A(0);
    for_each_column<Width>(p.columns, [&](index_t c) {
      A values[Width], others[Width];
      load_values<Width>(p.x.row(m) + c, values);
      if (dropout.drops()) {
        drop_values<Width>(dropout, stream, first + static_cast<std::uint64_t>(c), values);
      }
      if (p.residual.data != nullptr) {
        load_values<Width>(p.residual.row(m) + c, others);
        for (int i = 0; i < Width; ++i) values[i] += others[i];
      }
      if (p.sum.data != nullptr) store_values<Width>(values, p.sum.row(m) + c);
      for (int i = 0; i < Width; ++i) total += values[i];
    });
    const A mean = block_sum(total) / static_cast<A>(p.columns);
    const T* const s = p.sum.data != nullptr ? p.sum.row(m) : p.x.row(m);
    A squares = A(0);
    for_each_column<Width>(p.columns, [&](index_t c) {
      A values[Width];
      load_values<Width>(s + c, values);
      for (int i = 0; i < Width; ++i) squares += (values[i] - mean) * (values[i] - mean);
    });
    const A variance = block_sum(squares) / static_cast<A>(p.columns);
    const A scale = static_cast<A>(1.0 / sqrt(static_cast<double>(variance) + p.eps));
    if (p.statistics != nullptr && threadIdx.x == 0) {
      p.statistics[2 * m] = static_cast<T>(mean);
      p.statistics[2 * m + 1] = static_cast<T>(scale);
    }
    for_each_column<Width>(p.columns, [&](index_t c) {
      A values[Width], weights[Width], biases[Width];
      load_values<Width>(s + c, values);
      load_values<Width>(p.weight + c, weights);
      load_values<Width>(p.bias + c, biases);
      for (int i = 0; i < Width; ++i) values[i] = (values[i] - mean) * scale * weights[i] + biases[i];
      store_values<Width>(values, p.y.row(m) + c);
    });
  }
}

/// dsum = (g - mean(g) - n mean(g n)) inverse_deviation with g = dy weight; dx is that under dropout's mask.
template <class T, int Width>
static __global__ void layer_norm_input_gradient_kernel(norm_gradient_problem<T> p) {
  using A = accumulate_t<T>;
  const layer_dropout& dropout = p.dropout.layer;
  const std::uint64_t stream = dropout.drops() ? dropout.stream() : 0;
  for (index_t m = static_cast<index_t>(blockIdx.x); m < p.rows; m += static_cast<index_t>(gridDim.x)) {
    const A mean = static_cast<A>(p.statistics[2 * m]), deviation = static_cast<A>(p.statistics[2 * m + 1]);
    A sum = A(0), product = A(0);
    const auto load = [&](index_t c, A(&n)[Width], A(&g)[Width]) {
      A weights[Width];
      load_values<Width>(p.sum.row(m) + c, n);
      load_values<Width>(p.dy.row(m) + c, g);
      load_values<Width>(p.weight + c, weights);
      for (int i = 0; i < Width; ++i) {
        n[i] = (n[i] - mean) * deviation;
        g[i] *= weights[i];
      }
    };
    for_each_column<Width>(p.columns, [&](index_t c) {
      A n[Width], g[Width];
      load(c, n, g);
      for (int i = 0; i < Width; ++i) {
        sum += g[i];
        product += g[i] * n[i];
      }
    });
    const A shift = block_sum(sum) / static_cast<A>(p.columns),
            slope = block_sum(product) / static_cast<A>(p.columns);
    for_each_column<Width>(p.columns, [&](index_t c) {
      A n[Width], g[Width];
      load(c, n, g);
      for (int i = 0; i < Width; ++i) g[i] = (g[i] - shift - n[i] * slope) * deviation;
      if (p.dsum.data != nullptr) store_values<Width>(g, p.dsum.row(m) + c);
      if (p.dx.data == nullptr) return;
      if (dropout.drops()) {
        const std::uint64_t first = p.dropout.number(m) * static_cast<std::uint64_t>(p.columns);
        drop_values<Width>(dropout, stream, first + static_cast<std::uint64_t>(c), g);
      }
      store_values<Width>(g, p.dx.row(m) + c);
    });
  }
}

/// Sums over rows: a warp's lanes have 32 columns, a block's 8 warps every eighth row of a part. In float
/// over short runs, then in double.
inline constexpr int norm_sum_warps = 8;

template <class T>
static __global__ void layer_norm_sums_kernel(norm_gradient_problem<T> p, index_t splits, double* parts) {
  using A = accumulate_t<T>;
  __shared__ double found[2][norm_sum_warps][warp_threads];
  const int lane = static_cast<int>(threadIdx.x), warp = static_cast<int>(threadIdx.y);
  const index_t c = static_cast<index_t>(blockIdx.x) * warp_threads + lane;
  const index_t split = static_cast<index_t>(blockIdx.y);
  const index_t end = p.rows * (split + 1) / splits;
  constexpr index_t run = 16;
  double weight_sum = 0.0, bias_sum = 0.0;
  for (index_t m = p.rows * split / splits + warp; m < end && c < p.columns; m += run * norm_sum_warps) {
    A weighted = A(0), plain = A(0);
    for (index_t i = m; i < m + run * norm_sum_warps && i < end; i += norm_sum_warps) {
      const A dy = static_cast<A>(p.dy.row(i)[c]);
      const A n = (static_cast<A>(p.sum.row(i)[c]) - static_cast<A>(p.statistics[2 * i])) *
                  static_cast<A>(p.statistics[2 * i + 1]);
      weighted += dy * n;
      plain += dy;
    }
    weight_sum += static_cast<double>(weighted);
    bias_sum += static_cast<double>(plain);
  }
  found[0][warp][lane] = weight_sum;
  found[1][warp][lane] = bias_sum;
  __syncthreads();
  if (warp > 1 || c >= p.columns) return;
  double total = 0.0;
  for (int w = 0; w < norm_sum_warps; ++w) total += found[warp][w][lane];
  parts[(2 * split + warp) * p.columns + c] = total;
}

static __global__ void layer_norm_merge_kernel(const double* parts, index_t splits, index_t columns,
                                               double* dweight, double* dbias) {
  for (index_t i = grid_thread(); i < 2 * columns; i += grid_threads()) {
    double total = 0.0;
    for (index_t split = 0; split < splits; ++split) total += parts[2 * split * columns + i];
    (i < columns ? dweight[i] : dbias[i - columns]) = total;
  }
}

template <class T>
void layer_norm_forward(cudaStream_t stream, const norm_problem<T>& p) {
  const launch_site site(stream, "layer_norm_forward");
  const bool vectors = rows_in_vectors<T>(p.columns, p.x, p.residual, p.sum, p.y) &&
                       aligned16(p.weight, p.bias);
  with_width<T>(vectors, [&](auto width) {
    launch(site, row_grid(p.rows, p.columns, width), layer_norm_forward_kernel<T, width>, p);
  });
}

template <class T>
void layer_norm_input_gradient(cudaStream_t stream, const norm_gradient_problem<T>& p) {
  const launch_site site(stream, "layer_norm_input_gradient");
  if (p.dsum.data == nullptr && p.dx.data == nullptr) return;
  const bool vectors =
      rows_in_vectors<T>(p.columns, p.sum, p.dy, p.dsum, p.dx) && aligned16(p.weight);
  with_width<T>(vectors, [&](auto width) {
    launch(site, row_grid(p.rows, p.columns, width), layer_norm_input_gradient_kernel<T, width>, p);
  });
}

template <class T>
void layer_norm_parameter_gradients(cudaStream_t stream, const norm_gradient_problem<T>& p, double* parts,
                                    double* dweight, double* dbias) {
  const index_t splits = layer_norm_splits(p.rows);
  launch(stream,
         {dim3(static_cast<unsigned>(ceil_div(p.columns, warp_threads)), static_cast<unsigned>(splits)),
          dim3(warp_threads, norm_sum_warps)},
         layer_norm_sums_kernel<T>, p, splits, parts);
  launch(stream, {dim3(blocks_for(2 * p.columns, 128)), dim3(128)}, layer_norm_merge_kernel, parts, splits,
         p.columns, dweight, dbias);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                       \
  template void layer_norm_forward<T>(cudaStream_t, const norm_problem<T>&);                            \
  template void layer_norm_input_gradient<T>(cudaStream_t, const norm_gradient_problem<T>&);            \
  template void layer_norm_parameter_gradients<T>(cudaStream_t, const norm_gradient_problem<T>&, double*, \
                                                  double*, double*);
PUFFERFISH_INSTANTIATE(float)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
