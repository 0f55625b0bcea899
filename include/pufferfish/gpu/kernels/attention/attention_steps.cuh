// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: what the kernels of attention do with tiles in registers between products: masks, the softmax,
/// gradients of scores, and stores. `Tile` is the type of a tile of scores or of the result, of either kind
/// of block: own_rows, own_columns, row(i), column(j) and at(i, j) as in tile_product.cuh.

#include <pufferfish/gpu/kernels/attention/attention_head.cuh>
#include <pufferfish/gpu/kernels/gemm/tile_layout.cuh>

PUFFERFISH_KERNELS_BEGIN

/// One number for each row of a tile in which a thread has elements.
template <class Tile>
using own_row_values = array_of<float, Tile::own_rows>;

/// log2(e): weights are computed by powers of two.
inline constexpr float log2_e = 1.44269504F;

/// 2^x with a relative error below 2^-22; results below 2^-126 become 0.
__device__ inline float fast_exp2(float x) {
#if defined(PUFFERFISH_EMULATED_DEVICE)
  return exp2f(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

/// Combines the values of the `Lanes` neighbouring lanes that share a row. All of them receive the result.
/// `combine` must be commutative.
template <int Lanes, class F>
__device__ inline float row_reduce(float value, F combine) {
  for (int distance = Lanes / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(all_lanes, value, distance));
  }
  return value;
}

/// Sets the elements of a tile to `value` where keep(row, column) is false. `keep` computes with registers.
template <class Tile, class F>
__device__ void keep_only(Tile& tile, float value, F keep) {
#pragma unroll
  for (int r = 0; r < Tile::own_rows; ++r) {
#pragma unroll
    for (int c = 0; c < Tile::own_columns; ++c) {
      if (!keep(tile.row(r), tile.column(c))) tile.at(r, c) = value;
    }
  }
}

/// The elements of a tile for which f(row, column) is true: bit r own_columns + c for element (r, c). For an
/// f that reads memory: unrolled, its addresses would need more registers than there are.
template <class Tile, class F>
__device__ std::uint32_t chosen_elements(const Tile& tile, F f) {
  constexpr int size = Tile::own_rows * Tile::own_columns;
  static_assert(size <= 32);
  std::uint32_t bits = 0;
#pragma unroll 2
  for (int i = 0; i < size; ++i) {
    bits |= f(tile.row(i / Tile::own_columns), tile.column(i % Tile::own_columns)) ? 1U << i : 0U;
  }
  return bits;
}
/// Sets the elements of a tile to `value` that are not among the chosen ones.
template <class Tile>
__device__ void keep_only(Tile& tile, float value, std::uint32_t chosen) {
#pragma unroll
  for (int r = 0; r < Tile::own_rows; ++r) {
#pragma unroll
    for (int c = 0; c < Tile::own_columns; ++c) {
      if ((chosen >> (r * Tile::own_columns + c) & 1U) == 0) tile.at(r, c) = value;
    }
  }
}

/// Sets the elements of a tile to `value` whose pair of query and key does not count. `Turned`: rows of the
/// tile belong to keys.
template <bool Turned, class Tile, class T>
__device__ void hide_pairs(const tile_mask<T>& mask, float value, Tile& tile) {
  if (mask.whole) return;
  keep_only(tile, value, [&](int row, int column) {
    return Turned ? mask.in_reach(column, row) : mask.in_reach(row, column);
  });
  if (mask.allowed == nullptr) return;
  keep_only(tile, value, chosen_elements(tile, [&](int row, int column) {
              return Turned ? mask(column, row) : mask(row, column);
            }));
}

/// Adds a tile of scores to the softmax of its rows. Scores, -infinity for pairs that do not count, are
/// replaced by the weights exp(scale (score - best)); earlier sums and results are rescaled to the new best.
/// `scale`: the factor of scores, times log2(e). `best`: largest score of each row so far. `sum`: this
/// thread's part of the sum of the weights.
template <class Block>
__device__ void take_scores(float scale, typename Block::scores& scores,
                            own_row_values<typename Block::scores>& best,
                            own_row_values<typename Block::scores>& sum, typename Block::result& result) {
#pragma unroll
  for (int r = 0; r < Block::scores::own_rows; ++r) {
    float most = -HUGE_VALF;
#pragma unroll
    for (int c = 0; c < Block::scores::own_columns; ++c) most = fmaxf(most, scores.at(r, c));
    most = fmaxf(best[r], row_reduce<Block::row_lanes>(most, [](float a, float b) { return fmaxf(a, b); }));
    const float factor = most == best[r] ? 1.0F : fast_exp2((best[r] - most) * scale);
    const float base = most == -HUGE_VALF ? 0.0F : most;
    best[r] = most;
    sum[r] *= factor;
#pragma unroll
    for (int c = 0; c < Block::result::own_columns; ++c) result.at(r, c) *= factor;
#pragma unroll
    for (int c = 0; c < Block::scores::own_columns; ++c) {
      const float weight = fast_exp2((scores.at(r, c) - base) * scale);
      sum[r] += weight;
      scores.at(r, c) = weight;
    }
  }
}

/// Writes a tile of the result, multiplied by `factor`, where its rows and columns exist. `first`:
/// row of the sequence in the matrix; `row`: first row of the tile in the sequence; `rows`: rows of the
/// sequence; `depth`: columns of a head; `column`: first column of the tile in the head.
template <class Tile, class T>
__device__ void store_result(Tile& tile, float factor, const row_array<T>& to, index_t first, int row,
                             int rows, int head, int depth, int column) {
  using run = element_run<T, Tile::width>;
#pragma unroll
  for (int r = 0; r < Tile::own_rows; ++r) {
    const int at = row + tile.row(r);
    if (at >= rows) continue;
    T* const begin = to.row(first + at) + static_cast<index_t>(head) * depth;
#pragma unroll
    for (int c = 0; c < Tile::own_columns; c += Tile::width) {
      const int place = column + tile.column(c);
      if (place + Tile::width <= depth &&
          reinterpret_cast<std::uintptr_t>(begin + place) % sizeof(run) == 0) {
        run all;
#pragma unroll
        for (int d = 0; d < Tile::width; ++d) all.values[d] = static_cast<T>(tile.at(r, c + d) * factor);
        store_global(begin + place, all);
        continue;
      }
#pragma unroll
      for (int d = 0; d < Tile::width; ++d) {
        if (place + d < depth) begin[place + d] = static_cast<T>(tile.at(r, c + d) * factor);
      }
    }
  }
}

PUFFERFISH_KERNELS_END
