// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of loss.hpp: one block per row, then one block that adds up the rows.
///
/// Sums over classes and over rows are in double and in an order that depends on the shape alone. `scratch`
/// has the losses of all rows, then their hits.

#include <cmath>

#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/loss/loss.hpp>

PUFFERFISH_KERNELS_BEGIN

/// The larger of two numbers. A NaN is ignored unless both are NaN.
struct larger_number {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ double operator()(double a, double b) const { return fmax(a, b); }
};

/// Block b has row b, with 32 to 512 threads; thread t has the classes t, t + threads, ... losses[b] = the
/// row's loss. losses[rows + b] = 1 if the label has the largest logit, the first one among equals, else 0.
template <class T>
static __global__ void softmax_rows_kernel(grid_dependency earlier, const T* logits,
                                           const std::int32_t* labels, index_t rows, index_t classes,
                                           softmax_target target, T* dlogits, double* losses) {
  earlier.wait();
  using A = accumulate_t<T>;
  const index_t row = blockIdx.x, first = threadIdx.x, step = blockDim.x;
  const T* z = logits + row * classes;
  const auto at = [&](index_t k) { return static_cast<A>(z[k]); };
  const index_t label = labels[row];
  const bool valid = label >= 0 && label < classes;
  const A own = valid ? at(label) : A(NAN);

  A largest = A(-INFINITY);
  for (index_t k = first; k < classes; k += step) largest = larger_number()(largest, at(k));
  largest = block_reduce(largest, A(-INFINITY), larger_number());

  double powers = 0.0, shifted_sum = 0.0, beaten = 0.0;
  for (index_t k = first; k < classes; k += step) {
    const A shifted = at(k) - largest;
    powers += static_cast<double>(exp(shifted));
    shifted_sum += static_cast<double>(shifted);
    if (k < label ? !(at(k) < own) : !(at(k) <= own)) beaten += 1.0;
  }
  powers = block_sum(powers);
  shifted_sum = block_sum(shifted_sum);
  beaten = block_sum(beaten);

  if (first == 0) {
    const double shifted = static_cast<double>(own - largest);
    // A weight of zero must not be multiplied by an infinite logit, because the product would be NaN.
    const double rest = target.wrong == 0.0 ? 0.0 : target.wrong * (shifted_sum - shifted);
    losses[row] = log(powers) - target.right * shifted - rest;
    losses[rows + row] = valid && beaten == 0.0 ? 1.0 : 0.0;
  }
  if (dlogits == nullptr) return;
  __syncthreads();  // the label's logit must be read before the gradient may overwrite it
  const A share = valid ? static_cast<A>(1.0 / powers) : A(NAN);
  const A right = static_cast<A>(target.right), wrong = static_cast<A>(target.wrong);
  A scale = static_cast<A>(target.scale);
  if (target.loss_scale != nullptr) scale *= static_cast<A>(*target.loss_scale);
  for (index_t k = first; k < classes; k += step) {
    const A probability = exp(at(k) - largest) * share;
    dlogits[row * classes + k] = static_cast<T>((probability - (k == label ? right : wrong)) * scale);
  }
}

/// Grid: one block of 256 threads.
static __global__ void softmax_results_kernel(grid_dependency earlier, const double* losses, index_t rows,
                                              double* results) {
  earlier.wait();
  double loss = 0.0, correct = 0.0;
  for (index_t row = threadIdx.x; row < rows; row += blockDim.x) {
    loss += losses[row];
    correct += losses[rows + row];
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
                           double* results) {
  const unsigned threads = classes <= 256 ? 32 : classes <= 2048 ? 128 : 512;
  launch(stream, {static_cast<unsigned>(rows), threads}, softmax_rows_kernel<T>, logits, labels, rows,
         classes, target, dlogits, scratch);
  launch(stream, {1, 256}, softmax_results_kernel, scratch, rows, results);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                       \
  template void softmax_cross_entropy<T>(cudaStream_t, const T*, const std::int32_t*, index_t, index_t, \
                                         const softmax_target&, T*, double*, double*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
