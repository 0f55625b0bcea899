// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of batch normalisation over the rows of a dense matrix, rows x channels. Formulas:
/// ops/norm/batch_norm.hpp. All arrays are in device memory; masks: gpu/kernels/elementwise/relu_mask.hpp.
///
/// Order of use: norm_use_batch (training) or norm_use_running (inference), then norm_apply; in the backward
/// pass norm_gradient_sums, then norm_input_gradient. mean and inv_std of a norm_matrix are the two halves of
/// `statistics`.

#include <pufferfish/gpu/kernels/reduce/column_parts.hpp>
#include <pufferfish/gpu/kernels/reduce/reductions.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// A matrix of rows x channels and the numbers of its channels.
template <class T>
struct norm_matrix {
  const T* x;
  const accumulate_t<T>*mean, *inv_std, *weight;
  index_t rows, channels;
};

/// Epilogue of a normalisation, in the same pass; null pointers: none.
template <class T>
struct norm_tail {
  const T* addend;
  bool relu;
  std::uint32_t* mask;  ///< receives the mask of the ReLU
};

/// Arguments of ops::batch_norm_use_batch, and the arrays of its results.
struct norm_batch_use {
  double eps, momentum;
  float *statistics, *running_mean, *running_var, *batches;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// ops::batch_norm_use_batch of the rows of x. `scratch`: column_scratch(rows, channels, 2) doubles. There
/// must be two rows or more. One pass over x.
template <class T>
void norm_use_batch(cudaStream_t stream, const T* x, index_t rows, index_t channels, double* scratch,
                    const norm_batch_use& use);

/// ops::batch_norm_use_running.
template <class T>
void norm_use_running(cudaStream_t stream, const T* running_mean, const T* running_var, index_t channels,
                      double eps, T* statistics);

/// y = (x - mean) inv_std weight + bias, then the tail. y may be the addend. x, addend and y are read and
/// written 16 bytes at a time if all are aligned and the channels are whole vectors.
template <class T>
void norm_apply(cudaStream_t stream, const norm_matrix<T>& m, const accumulate_t<T>* bias,
                const norm_tail<T>& tail, T* y);

/// First pass: gradients of weight and bias, from sums in double, and 3 x channels `coefficients` of the
/// second pass. `coefficients`, `mask`: may be null. `scratch`: column_scratch(rows, channels, 2) doubles.
template <class T>
void norm_gradient_sums(cudaStream_t stream, const norm_matrix<T>& m, const T* dy, const std::uint32_t* mask,
                        double* scratch, const norm_parameter_gradients& gradients,
                        accumulate_t<T>* coefficients);
/// Second pass. dx may be dy or x. `coefficients` are those that norm_gradient_sums has written.
template <class T>
void norm_input_gradient(cudaStream_t stream, const norm_matrix<T>& m, const T* dy, const std::uint32_t* mask,
                         const accumulate_t<T>* coefficients, T* dx);

PUFFERFISH_KERNELS_END
