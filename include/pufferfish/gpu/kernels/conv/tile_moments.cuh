// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: moments, or gradient sums, of the columns of a tile, from the registers that hold the results of
/// a product.

#include <pufferfish/gpu/kernels/elementwise/relu_mask.hpp>
#include <pufferfish/gpu/kernels/gemm/tile_product.cuh>
#include <pufferfish/gpu/kernels/reduce/moment_parts.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Shared memory of save_moments: first value, sum of distances from it and sum of their squares of each
/// sharer in each column, then the number of values of each sharer. The padding of the rows distributes them
/// over the banks.
template <class Product>
struct tile_moments {
  static constexpr int stride = Product::columns + 8, size = Product::sharers * stride;
  static constexpr std::size_t bytes = (3 * size + Product::sharers) * sizeof(float);
};

/// Saves the moments of the first `rows` > 0 rows of a product's results, rounded to T, as those of part
/// `part`. first_column: column of the matrix for the product's first column. All threads of the product must
/// call this function. `memory`: tile_moments<Product>::bytes bytes of shared memory; a barrier must separate
/// its uses.
///
/// A thread sums distances from its first value in each column, so that a large mean does not cancel digits.
template <class T, class Product>
__device__ inline void save_moments(const moment_store& store, const Product& product, int rows,
                                    int first_column, int part, float* memory) {
  using shared = tile_moments<Product>;
  const auto rounded = [&](int i, int j) { return static_cast<float>(static_cast<T>(product.value(i, j))); };
  float count = 0.0F;
#pragma unroll
  for (int i = 0; i < Product::own_rows; ++i) count += product.row(i) < rows ? 1.0F : 0.0F;
  float* const own = memory + product.sharer() * shared::stride;
#pragma unroll
  for (int j = 0; j < Product::own_columns; ++j) {
    const float near = rounded(0, j);
    float sum = 0.0F, squares = 0.0F;
#pragma unroll
    for (int i = 1; i < Product::own_rows; ++i) {
      const float distance = product.row(i) < rows ? rounded(i, j) - near : 0.0F;
      sum += distance;
      squares += distance * distance;
    }
    own[product.column(j)] = near;
    own[shared::size + product.column(j)] = sum;
    own[2 * shared::size + product.column(j)] = squares;
  }
  float* const counts = memory + 3 * shared::size;
  if (product.column(0) == 0) counts[product.sharer()] = count;
  __syncthreads();
  for (int column = block_thread(); column < Product::columns; column += Product::threads) {
    if (first_column + column >= store.columns) continue;
    moment_total all;
    const double shift = static_cast<double>(memory[column]);
    all.start(&shift);
#pragma unroll 4
    for (int sharer = 0; sharer < Product::sharers; ++sharer) {
      if (counts[sharer] == 0.0F) continue;  // the other numbers are of rows that do not exist
      const float* const from = memory + sharer * shared::stride + column;
      all.add_distances(counts[sharer], from[0], from[shared::size], from[2 * shared::size]);
    }
    store.save(part, first_column + column, all);
  }
}

/// Saves the sums for a batch norm whose output's gradient is the product, rounded to T, as those of part
/// `part`. The first of the product's `rows` > 0 rows that exist is row first_row of the gradient. Otherwise
/// as save_moments.
template <class T, class Product>
__device__ inline void save_gradient_sums(const moment_store& store, const Product& product,
                                          const gradient_sum_input<T>& norm, index_t first_row, int rows,
                                          int first_column, int part, float* memory) {
  using shared = tile_moments<Product>;
  float* const own = memory + product.sharer() * shared::stride;
#pragma unroll
  for (int j = 0; j < Product::own_columns; ++j) {
    const int column = first_column + product.column(j);
    const bool inside = column < store.columns;
    const float mean = inside ? static_cast<float>(norm.mean[column]) : 0.0F;
    float sum = 0.0F, weighted = 0.0F;
#pragma unroll
    for (int i = 0; i < Product::own_rows; ++i) {
      if (!inside || product.row(i) >= rows) continue;
      const index_t at = (first_row + product.row(i)) * store.columns + column;
      if (norm.mask != nullptr && !mask_passes(norm.mask, at)) continue;
      const float g = static_cast<float>(static_cast<T>(product.value(i, j)));
      sum += g;
      weighted += g * (static_cast<float>(norm.x[at]) - mean);
    }
    own[shared::size + product.column(j)] = sum;
    own[2 * shared::size + product.column(j)] = weighted;
  }
  __syncthreads();
  for (int column = block_thread(); column < Product::columns; column += Product::threads) {
    if (first_column + column >= store.columns) continue;
    gradient_total all;
    all.start(nullptr);
#pragma unroll 4
    for (int sharer = 0; sharer < Product::sharers; ++sharer) {
      const float* const from = memory + sharer * shared::stride + column;
      all.add({static_cast<double>(from[shared::size]), static_cast<double>(from[2 * shared::size])});
    }
    store.save(part, first_column + column, all);
  }
}

/// The same address of shared memory, at an offset of 0 that the compiler does not know. Without it, nvcc
/// computes the address of dynamic shared memory again in every step of the main loop before.
template <class T>
__device__ inline T* after_loop(T* memory) {
#if defined(PUFFERFISH_EMULATED_DEVICE)
  return memory;
#else
  int zero = 0;
  asm volatile("" : "+r"(zero));
  return memory + zero;
#endif
}

/// finish_moments in a function of its own, because the registers of its code would be missing in the main
/// loop. Kernels of warp groups must not call functions.
template <class Total = moment_total>
PUFFERFISH_NOINLINE __device__ void finish_moments_apart(moment_store store, int part, int tile,
                                                         int first_column, int width, double* memory) {
  finish_moments<Total>(store, part, tile, first_column, width, memory);
}

PUFFERFISH_KERNELS_END
