// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of <pufferfish/gpu/kernels/linalg/eigen.hpp>. The order of all additions follows from the matrix's
/// order alone; the only atomic operation counts rotations.

#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/linalg/eigen.hpp>
#include <pufferfish/gpu/kernels/linalg/eigen_functors.hpp>

PUFFERFISH_KERNELS_BEGIN

/// Threads of a block.
inline constexpr int jacobi_threads = 256;
/// Stride of rows in shared memory: odd, so that a column's elements are in different banks, like a row's.
inline constexpr int jacobi_step = jacobi_side + 1;
inline constexpr int jacobi_tile = jacobi_side * jacobi_step;

/// Row of the matrix that is row `local` of a pair of blocks.
__device__ inline index_t row_of_pair(pairing pair, int local) {
  const int block = local < jacobi_block ? pair.first : pair.second;
  return static_cast<index_t>(block) * jacobi_block + local % jacobi_block;
}

/// One element of the vectors a thread and step; block 0 also adds up the diagonal.
template <class T>
static __global__ void jacobi_begin_kernel(jacobi_work<T> work) {
  const index_t n = work.order;
  for (index_t i = grid_thread(); i < n * n; i += grid_threads())
    work.vectors[i] = i / n == i % n ? T(1) : T(0);
  if (blockIdx.x > 0) return;
  T sum = 0;
  for (index_t i = threadIdx.x; i < n; i += blockDim.x) sum += work.matrix[i * n + i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *work.trace = sum;
}

/// Calls f(i, j) for 0 <= j <= i < count, distributed over the block: row i shares a line of count + 1
/// elements with row count - 1 - i, so that no thread idles.
template <class F>
__device__ inline void for_each_lower(int count, F f) {
  const int width = count + 1, lines = (count + 1) / 2;
  for (int at = block_thread(); at < lines * width; at += block_threads()) {
    const int line = at / width, k = at % width, mirror = count - 1 - line;
    if (k <= mirror) {
      f(mirror, k);
    } else if (line < mirror) {
      f(line, k - mirror - 1);
    }
  }
}

/// Applies rotations i < count to rows and columns p_i, q_i of a (both triangles) and to rows of r.
template <class T>
__device__ inline void rotate_tile(T* a, T* r, const plane_rotation<T>* rotations, const pairing* pairs,
                                   int count, int size) {
  for_each_lower(count, [&](int i, int j) {
    const plane_rotation<T> u = rotations[i], v = rotations[j];
    const pairing rows = pairs[i], columns = pairs[j];
    if (i == j) {
      if (u.s == T(0)) return;
      a[rows.first * jacobi_step + rows.first] = u.first;
      a[rows.second * jacobi_step + rows.second] = u.second;
      a[rows.first * jacobi_step + rows.second] = a[rows.second * jacobi_step + rows.first] = 0;
      return;
    }
    if (u.s == T(0) && v.s == T(0)) return;
    T* x = a + rows.first * jacobi_step;
    T* y = a + rows.second * jacobi_step;
    const T xp = x[columns.first], xq = x[columns.second], yp = y[columns.first], yq = y[columns.second];
    const T cp = u.c * xp - u.s * yp, cq = u.c * xq - u.s * yq;
    const T sp = u.s * xp + u.c * yp, sq = u.s * xq + u.c * yq;
    const T new_xp = v.c * cp - v.s * cq, new_xq = v.s * cp + v.c * cq;
    const T new_yp = v.c * sp - v.s * sq, new_yq = v.s * sp + v.c * sq;
    T* p = a + columns.first * jacobi_step;
    T* q = a + columns.second * jacobi_step;
    x[columns.first] = p[rows.first] = new_xp;
    x[columns.second] = q[rows.first] = new_xq;
    y[columns.first] = p[rows.second] = new_yp;
    y[columns.second] = q[rows.second] = new_yq;
  });
  for (int at = block_thread(); at < count * size; at += block_threads()) {
    const int i = at / size, k = at % size;
    const plane_rotation<T> u = rotations[i];
    if (u.s == T(0)) continue;
    T& x = r[pairs[i].first * jacobi_step + k];
    T& y = r[pairs[i].second * jacobi_step + k];
    const T before = x;
    x = u.c * before - u.s * y;
    y = u.s * before + u.c * y;
  }
}

template <class T>
static __global__ void __launch_bounds__(jacobi_threads)
    /// Block bx: pair bx of the round. Shared memory: a (64 x 64, the pair's part of the matrix), r (64 x 64,
    /// the product of its rotations), both with rows jacobi_step apart. In each of size - 1 turns of a sweep,
    /// threads below size / 2 choose one rotation each; all of these rotations are disjoint and are applied
    /// together. Rows from `order` on are zeros.
    jacobi_rotate_kernel(jacobi_work<T> work, int round, int sweeps) {
  T* a = dynamic_shared<T>();
  T* r = a + jacobi_tile;
  __shared__ plane_rotation<T> rotations[jacobi_block];
  __shared__ pairing pairs[jacobi_block];
  const auto pair = static_cast<int>(blockIdx.x);
  const pairing blocks = pairing_of(work.blocks, round, pair);
  const index_t n = work.order;
  // A single pair has the matrix's order, made even. Others are padded with zeros, which never rotate.
  const int size = work.blocks > 2 ? jacobi_side : static_cast<int>(n + n % 2);
  const int count = size / 2, thread = block_thread();
  for (int e = thread; e < jacobi_side * jacobi_side; e += block_threads()) {
    const int i = e / jacobi_side, j = e % jacobi_side;
    const index_t row = row_of_pair(blocks, i), column = row_of_pair(blocks, j);
    a[i * jacobi_step + j] = row < n && column < n ? work.matrix[row * n + column] : T(0);
    r[i * jacobi_step + j] = i == j ? T(1) : T(0);
  }
  __syncthreads();
  const T floor = work.floor * *work.trace;
  int done = 0;
  for (int sweep = 0; sweep < sweeps; ++sweep) {
    const int before = done;
    for (int turn = 0; turn < size - 1; ++turn) {
      bool active = false;
      if (thread < count) {
        const pairing pq = pairing_of(size, turn, thread);
        const T pp = a[pq.first * jacobi_step + pq.first], qq = a[pq.second * jacobi_step + pq.second];
        const T off = a[pq.first * jacobi_step + pq.second];
        active = !is_negligible(pp, off, qq, work.tolerance, floor);
        pairs[thread] = pq;
        rotations[thread] = active ? diagonalizing_rotation(pp, off, qq) : plane_rotation<T>{1, 0, pp, qq};
      }
      const int active_pairs = __syncthreads_count(active);
      if (active_pairs == 0) continue;
      done += active_pairs;
      rotate_tile(a, r, rotations, pairs, count, size);
      __syncthreads();
    }
    if (done == before) break;
  }
  if (thread == 0) {
    work.moved[pair] = done > 0 ? 1 : 0;
    if (done > 0) atomicAdd(work.rotated, done);
  }
  if (done == 0) return;
  T* product = work.rotations + static_cast<index_t>(pair) * jacobi_side * jacobi_side;
  for (int e = thread; e < jacobi_side * jacobi_side; e += block_threads()) {
    const int i = e / jacobi_side, j = e % jacobi_side;
    const index_t row = row_of_pair(blocks, i), column = row_of_pair(blocks, j);
    if (row < n && column < n) work.matrix[row * n + column] = a[i * jacobi_step + j];
    product[e] = r[i * jacobi_step + j];
  }
}

/// x := r x (Left) or x r^T, all of 64 x 64, by 256 threads with 4 x 4 elements each. Ends with a barrier. x,
/// r: tiles in shared memory; r receives the 64 x 64 `rotations` from device memory. Thread (ty, tx) =
/// (t / 16, t % 16) has rows ty + 16 i and columns tx + 16 j, i, j < 4. Needs 256 threads.
template <bool Left, class T>
__device__ inline void multiply_tile(T* x, T* r, const T* rotations) {
  const int thread = block_thread(), ty = thread / 16, tx = thread % 16;
  for (int e = thread; e < jacobi_side * jacobi_side; e += block_threads()) {
    r[e / jacobi_side * jacobi_step + e % jacobi_side] = rotations[e];
  }
  __syncthreads();
  T sums[4][4] = {};
  for (int k = 0; k < jacobi_side; ++k) {
    T left[4], right[4];
    for (int i = 0; i < 4; ++i) {
      left[i] = (Left ? r : x)[(ty + 16 * i) * jacobi_step + k];
      right[i] = Left ? x[k * jacobi_step + tx + 16 * i] : r[(tx + 16 * i) * jacobi_step + k];
    }
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) sums[i][j] += left[i] * right[j];
    }
  }
  __syncthreads();
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) x[(ty + 16 * i) * jacobi_step + tx + 16 * j] = sums[i][j];
  }
  __syncthreads();
}

/// One tile of 64 x 64: of the matrix, below the diagonal of pairs of blocks (and its mirror image), or of
/// the vectors, 64 columns of them. Blocks 0 .. pairs (pairs - 1) / 2 - 1 have the tiles (above, beside) of
/// the matrix with beside < above; the others have tile (pair, chunk of 64 columns) of the vectors. A tile
/// becomes r_above x r_beside^T, or r_above x for vectors; it is skipped if its pairs had no rotations.
template <class T>
static __global__ void __launch_bounds__(jacobi_threads) jacobi_apply_kernel(jacobi_work<T> work, int round) {
  T* x = dynamic_shared<T>();
  T* r = x + jacobi_tile;
  const int pairs = work.blocks / 2, below = pairs * (pairs - 1) / 2;
  const auto tile = static_cast<int>(blockIdx.x);
  const bool of_matrix = tile < below;
  int above = 0, beside = 0;
  if (of_matrix) {
    for (above = 1, beside = tile; beside >= above; ++above) beside -= above;
  } else {
    const auto chunks = static_cast<int>(ceil_div(work.order, jacobi_side));
    above = (tile - below) / chunks;
    beside = (tile - below) % chunks;
  }
  const bool left = work.moved[above] != 0, right = of_matrix && work.moved[beside] != 0;
  if (!left && !right) return;
  const index_t n = work.order;
  const pairing rows = pairing_of(work.blocks, round, above);
  const pairing columns =
      of_matrix ? pairing_of(work.blocks, round, beside) : pairing{2 * beside, 2 * beside + 1};
  T* whole = of_matrix ? work.matrix : work.vectors;
  for (int e = block_thread(); e < jacobi_side * jacobi_side; e += block_threads()) {
    const int i = e / jacobi_side, j = e % jacobi_side;
    const index_t row = row_of_pair(rows, i), column = row_of_pair(columns, j);
    x[i * jacobi_step + j] = row < n && column < n ? whole[row * n + column] : T(0);
  }
  const auto rotations_of = [&](int pair) {
    return work.rotations + static_cast<index_t>(pair) * jacobi_side * jacobi_side;
  };
  if (left) multiply_tile<true>(x, r, rotations_of(above));
  if (right) multiply_tile<false>(x, r, rotations_of(beside));
  for (int e = block_thread(); e < jacobi_side * jacobi_side; e += block_threads()) {
    const int i = e / jacobi_side, j = e % jacobi_side;
    const index_t row = row_of_pair(rows, i), column = row_of_pair(columns, j);
    if (row < n && column < n) whole[row * n + column] = x[i * jacobi_step + j];
    if (!of_matrix) continue;
    const index_t mirror_row = row_of_pair(columns, i), mirror_column = row_of_pair(rows, j);
    if (mirror_row < n && mirror_column < n) whole[mirror_row * n + mirror_column] = x[j * jacobi_step + i];
  }
}

/// One element a thread and step.
template <class T>
static __global__ void take_diagonal_kernel(const T* matrix, T* values, index_t order) {
  for (index_t i = grid_thread(); i < order; i += grid_threads()) values[i] = matrix[i * order + i];
}

template <class T>
void jacobi_begin(cudaStream_t stream, const jacobi_work<T>& work) {
  launch(stream, {blocks_for(work.order * work.order, jacobi_threads, 4096), jacobi_threads},
         jacobi_begin_kernel<T>, work);
}

template <class T>
void jacobi_rotate(cudaStream_t stream, const jacobi_work<T>& work, int round, int sweeps) {
  launch(stream, {static_cast<unsigned>(work.blocks / 2), jacobi_threads, 2 * jacobi_tile * sizeof(T)},
         jacobi_rotate_kernel<T>, work, round, sweeps);
}

template <class T>
void jacobi_apply(cudaStream_t stream, const jacobi_work<T>& work, int round) {
  const index_t pairs = work.blocks / 2;
  const index_t tiles = pairs * (pairs - 1) / 2 + pairs * ceil_div(work.order, jacobi_side);
  launch(stream, {static_cast<unsigned>(tiles), jacobi_threads, 2 * jacobi_tile * sizeof(T)},
         jacobi_apply_kernel<T>, work, round);
}

template <class T>
void take_diagonal(cudaStream_t stream, const T* matrix, T* values, index_t order) {
  launch(stream, {blocks_for(order, 256), 256}, take_diagonal_kernel<T>, matrix, values, order);
}

template void jacobi_begin<float>(cudaStream_t, const jacobi_work<float>&);
template void jacobi_begin<double>(cudaStream_t, const jacobi_work<double>&);
template void jacobi_rotate<float>(cudaStream_t, const jacobi_work<float>&, int, int);
template void jacobi_rotate<double>(cudaStream_t, const jacobi_work<double>&, int, int);
template void jacobi_apply<float>(cudaStream_t, const jacobi_work<float>&, int);
template void jacobi_apply<double>(cudaStream_t, const jacobi_work<double>&, int);
template void take_diagonal<float>(cudaStream_t, const float*, float*, index_t);
template void take_diagonal<double>(cudaStream_t, const double*, double*, index_t);

PUFFERFISH_KERNELS_END
