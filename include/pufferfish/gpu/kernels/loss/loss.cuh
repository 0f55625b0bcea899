// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of loss.hpp. The last block to end adds up the rows.
///
/// Sums over classes and over rows are in double and in an order that depends on the shape alone. `scratch`
/// has the losses of all rows, then their hits.

#include <cmath>

#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/loss/loss.hpp>
#include <pufferfish/gpu/kernels/reduce/last_block.cuh>

PUFFERFISH_KERNELS_BEGIN

/// The larger of two numbers. A NaN is ignored unless both are NaN.
struct larger_number {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ double operator()(double a, double b) const { return fmax(a, b); }
};

/// The threads that compute a row: a warp, of several in a block, or a whole block.
template <bool Warp>
struct row_team {
  /// Number of rows of a block; the row of the calling thread among them; its number among the row's threads.
  __device__ static index_t rows() { return Warp ? blockDim.x / warp_threads : 1; }
  __device__ static index_t row() { return Warp ? threadIdx.x / warp_threads : 0; }
  __device__ static index_t thread() { return Warp ? threadIdx.x % warp_threads : threadIdx.x; }
  /// Number of threads of a row.
  __device__ static index_t threads() { return Warp ? warp_threads : blockDim.x; }

  template <class A, class F>
  __device__ static A reduce(A value, [[maybe_unused]] A neutral, F combine) {
    if constexpr (Warp) return warp_reduce(value, combine);
    if constexpr (!Warp) return block_reduce(value, neutral, combine);
  }
  __device__ static double sum(double value) { return reduce(value, 0.0, plus()); }
  __device__ static void synchronize() {
    if constexpr (Warp) __syncwarp();
    if constexpr (!Warp) __syncthreads();
  }
};

/// Computes a row: losses[row] = its loss. losses[rows + row] = 1 if the label has the largest logit, the
/// first one among equals, else 0. All threads of the row's team call this function.
template <class T, class Team>
__device__ inline void softmax_row(const T* logits, const std::int32_t* labels, index_t rows, index_t classes,
                                   index_t row, const softmax_target& target, T* dlogits, double* losses) {
  using A = accumulate_t<T>;
  const index_t first = Team::thread(), step = Team::threads();
  const T* z = logits + row * classes;
  const auto at = [&](index_t k) { return static_cast<A>(z[k]); };
  const index_t label = labels[row];
  const bool valid = label >= 0 && label < classes;
  const A own = valid ? at(label) : A(NAN);

  A largest = A(-INFINITY);
  for (index_t k = first; k < classes; k += step) largest = larger_number()(largest, at(k));
  largest = Team::reduce(largest, A(-INFINITY), larger_number());

  double powers = 0.0, shifted_sum = 0.0, beaten = 0.0;
  for (index_t k = first; k < classes; k += step) {
    const A shifted = at(k) - largest;
    powers += static_cast<double>(exp(shifted));
    shifted_sum += static_cast<double>(shifted);
    if (k < label ? !(at(k) < own) : !(at(k) <= own)) beaten += 1.0;
  }
  powers = Team::sum(powers);
  shifted_sum = Team::sum(shifted_sum);
  beaten = Team::sum(beaten);

  if (first == 0) {
    const double shifted = static_cast<double>(own - largest);
    // A weight of zero must not be multiplied by an infinite logit, because the product would be NaN.
    const double rest = target.wrong == 0.0 ? 0.0 : target.wrong * (shifted_sum - shifted);
    losses[row] = log(powers) - target.right * shifted - rest;
    losses[rows + row] = valid && beaten == 0.0 ? 1.0 : 0.0;
  }
  if (dlogits == nullptr) return;
  Team::synchronize();  // the label's logit must be read before the gradient may overwrite it
  const A share = valid ? static_cast<A>(1.0 / powers) : A(NAN);
  const A right = static_cast<A>(target.right), wrong = static_cast<A>(target.wrong);
  A scale = static_cast<A>(target.scale);
  if (target.loss_scale != nullptr) scale *= static_cast<A>(*target.loss_scale);
  for (index_t k = first; k < classes; k += step) {
    const A probability = exp(at(k) - largest) * share;
    dlogits[row * classes + k] = static_cast<T>((probability - (k == label ? right : wrong)) * scale);
  }
}

/// Block b has the rows b R .. b R + R - 1: R = 8 rows of a warp each, or one row of 128 or 512 threads.
/// Thread t of a row has the classes t, t + threads, .... The last block adds up losses and hits of all rows.
template <class T, bool Warp>
static __global__ void softmax_kernel(grid_dependency earlier, const T* logits, const std::int32_t* labels,
                                      index_t rows, index_t classes, softmax_target target, T* dlogits,
                                      double* losses, unsigned* counter, double* results) {
  earlier.wait();
  using team = row_team<Warp>;
  const index_t row = static_cast<index_t>(blockIdx.x) * team::rows() + team::row();
  if (row < rows) softmax_row<T, team>(logits, labels, rows, classes, row, target, dlogits, losses);
  if (!is_last_block(counter, gridDim.x)) return;
  double loss = 0.0, correct = 0.0;
  for (index_t i = threadIdx.x; i < rows; i += blockDim.x) {
    loss += losses[i];
    correct += losses[rows + i];
  }
  loss = block_sum(loss);
  correct = block_sum(correct);
  if (threadIdx.x > 0) return;
  results[0] = loss;
  results[1] = correct;
}

template <class T>
void softmax_cross_entropy(cudaStream_t stream, const T* logits, const std::int32_t* labels, index_t rows,
                           index_t classes, const softmax_target& target, T* dlogits, double* scratch,
                           unsigned* counter, double* results) {
  const launch_site site(stream);
  const auto start = [&](auto kernel, index_t rows_of_block, unsigned threads) {
    // Without rows, one block writes the sums.
    const index_t blocks = rows == 0 ? 1 : ceil_div(rows, rows_of_block);
    launch(site, {static_cast<unsigned>(blocks), threads}, kernel, logits, labels, rows, classes, target,
           dlogits, scratch, counter, results);
  };
  if (classes <= 256) return start(softmax_kernel<T, true>, 8, 8 * warp_threads);
  start(softmax_kernel<T, false>, 1, classes <= 2048 ? 128 : 512);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                       \
  template void softmax_cross_entropy<T>(cudaStream_t, const T*, const std::int32_t*, index_t, index_t, \
                                         const softmax_target&, T*, double*, unsigned*, double*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
