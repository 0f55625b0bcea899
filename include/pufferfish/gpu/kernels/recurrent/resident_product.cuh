// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Products of few rows with a matrix that stays in a block's shared memory, as in the time steps of an LSTM.
///
/// The depth of a product is cut into chunks of 32 elements, and a chunk into two steps of mma(). The order
/// of the elements of a chunk is free if both operands have the same one: of four lanes, lane t has the
/// eight elements from 8 t on, two words for each step. A lane thus reads 16 bytes of a row at once.

#include <pufferfish/gpu/kernels/gemm/mma.cuh>
#include <pufferfish/gpu/kernels/gemm/tile_layout.cuh>
#include <pufferfish/gpu/kernels/recurrent/lstm_steps.hpp>

PUFFERFISH_KERNELS_BEGIN

/// The product of 16 RowTiles rows in device memory and a matrix of 8 Tiles columns, by a block. The warps
/// share the chunks, and each has sums of the whole result; two warps add to one place in shared memory.
template <class T, int RowTiles, int Tiles>
struct resident_product {
  static constexpr int warps = resident_warps, threads = warps * warp_threads;
  static constexpr int rows = 16 * RowTiles, columns = 8 * Tiles;
  static constexpr int slots = resident_slots, sum_stride = columns + resident_gap;
  static constexpr int run = vector_width<T>;
  // Chunks whose rows are loaded at once: as many as registers allow.
  static constexpr int ahead = RowTiles == 2 ? 4 : 2;
  static_assert(sizeof(T) == 2 && warps == 2 * slots);

  /// Stores the matrix in the order in which multiply() reads it. run_of(k, column) returns the elements k ..
  /// k + 7 of a column, with zeros outside of the matrix.
  template <class F>
  static __device__ void store_matrix(T* matrix, int chunks, F run_of) {
#pragma unroll 4
    for (int i = block_thread(); i < chunks * Tiles * warp_threads; i += threads) {
      const int lane = i % warp_threads, tile = i / warp_threads % Tiles, chunk = i / warp_threads / Tiles;
      store_vector(matrix + i * run, run_of(chunk * resident_chunk + lane % 4 * run, tile * 8 + lane / 4));
    }
  }

  /// sums = left matrix. left: `rows` rows of whole chunks in device memory, aligned to 16 bytes, which other
  /// blocks may have written before a barrier of the grid. sums: slots * rows * sum_stride floats; value()
  /// reads the result. Begins and ends with all threads of the block; ends with a barrier.
  static __device__ void multiply(const T* matrix, const T* left, int left_stride, int chunks, float* sums) {
    const int warp = block_thread() / warp_threads, lane = block_thread() % warp_threads;
    const T* const own = left + lane / 4 * left_stride + lane % 4 * run;
    // Blocks begin with different chunks, so that they do not all read the same part of the L2 cache at once.
    const int start = static_cast<int>(blockIdx.x) * chunks / static_cast<int>(gridDim.x);
    const auto chunk_at = [&](int place) {
      return place + start < chunks ? place + start : place + start - chunks;
    };
    array_of<array_of<float[4], Tiles>, RowTiles> result = {};
    for (int first = warp; first < chunks; first += ahead * warps) {
      array_of<array_of<uint4[2], RowTiles>, ahead> words;
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        if (first + i * warps >= chunks) break;
        const T* const from = own + chunk_at(first + i * warps) * resident_chunk;
#pragma unroll
        for (int m = 0; m < 2 * RowTiles; ++m) {
          words[i][m / 2][m % 2] = __ldcg(reinterpret_cast<const uint4*>(from + m * 8 * left_stride));
        }
      }
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        if (first + i * warps >= chunks) break;
        const T* const tiles = matrix + (chunk_at(first + i * warps) * Tiles * warp_threads + lane) * run;
#pragma unroll
        for (int n = 0; n < Tiles; ++n) {
          const uint4 right = *reinterpret_cast<const uint4*>(tiles + n * warp_threads * run);
          const std::uint32_t low[2] = {right.x, right.y}, high[2] = {right.z, right.w};
#pragma unroll
          for (int m = 0; m < RowTiles; ++m) {
            const uint4 &a = words[i][m][0], &b = words[i][m][1];
            const std::uint32_t left_low[4] = {a.x, b.x, a.y, b.y}, left_high[4] = {a.z, b.z, a.w, b.w};
            mma<T>(result[m][n], left_low, low);
            mma<T>(result[m][n], left_high, high);
          }
        }
      }
    }
    float* const place = sums + warp % slots * (rows * sum_stride);
    const auto for_each = [&](auto f) {
#pragma unroll
      for (int m = 0; m < RowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < Tiles; ++n) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int row = m * 16 + k / 2 * 8 + lane / 4, column = n * 8 + lane % 4 * 2 + k % 2;
            f(place[row * sum_stride + column], result[m][n][k]);
          }
        }
      }
    };
    if (warp >= slots) for_each([](float& to, float value) { to = value; });
    __syncthreads();
    if (warp < slots) for_each([](float& to, float value) { to += value; });
    __syncthreads();
  }

  /// An element of the result of multiply(), summed in the order of the slots.
  static __device__ float value(const float* sums, int row, int column) {
    float sum = 0.0F;
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) sum += sums[(slot * rows + row) * sum_stride + column];
    return sum;
  }
};

PUFFERFISH_KERNELS_END
