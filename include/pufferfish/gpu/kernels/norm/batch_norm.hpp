// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of batch normalization over the rows of a dense matrix, rows x channels. Formulas:
/// ops/norm/batch_norm.hpp. All arrays are in device memory; masks are described in
/// gpu/kernels/elementwise/relu_mask.hpp. Each launcher throws backend_error if its launch fails.
///
/// Order of use: norm_use_batch (training) or norm_use_running (inference), then norm_apply; in the backward
/// pass norm_gradient_sums, then norm_input_gradient. With few rows, one launch does both steps of a pass
/// (block_norm_forward, block_norm_backward). mean and inv_std of a norm_matrix are the two halves of
/// `statistics`.

#include <pufferfish/gpu/kernels/reduce/column_parts.hpp>
#include <pufferfish/gpu/kernels/reduce/reductions.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// A dense matrix of rows x channels, and the mean, inverse deviation and weight of each channel.
template <class T>
struct norm_matrix {
  const T* x;
  const accumulate_t<T>*mean, *inv_std, *weight;
  index_t rows, channels;
};

/// Epilogue of a normalization, in the same pass: adds `addend` (rows x channels), then applies a ReLU. Null
/// pointers: no addition, no mask.
template <class T>
struct norm_tail {
  const T* addend;
  bool relu;
  std::uint32_t* mask;  ///< receives the bits of the ReLU's mask
};

/// Options of ops::batch_norm_use_batch, and the arrays of its results.
struct norm_batch_use {
  double eps, momentum;
  float *statistics, *running_mean, *running_var, *batches;
};

/// Moments of a batch that are known already, and what to do with them. The default: none are.
struct norm_batch_moments {
  /// Mean of each channel, then the sum of squared deviations from it, as moment_workspace::moments.
  const double* moments = nullptr;
  norm_batch_use use = {};
};

/// A normalization with the arguments of norm_apply, for a kernel that computes it while it reads the result.
/// The default: none.
template <class T>
struct norm_request {
  norm_matrix<T> m = {};
  const accumulate_t<T>* bias = nullptr;
  norm_tail<T> tail = {};
  T* y = nullptr;
  norm_batch_moments batch = {};

  bool wanted() const { return y != nullptr; }
};

/// Sums over the rows that are known already, and what to do with them. The default: none are.
struct norm_known_sums {
  /// For each channel the sum of g, then that of g (x - mean), where g is dy with the mask applied.
  const double* sums = nullptr;
  norm_parameter_gradients gradients = {};
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Computes ops::batch_norm_use_batch for the rows of x, of which there must be at least two. `work`: for
/// two quantities. x is read once.
template <class T>
void norm_use_batch(cudaStream_t stream, const T* x, index_t rows, index_t channels,
                    const column_workspace& work, const norm_batch_use& use);

/// Computes ops::batch_norm_use_running: `statistics` receives the running means, then the inverse deviations
/// 1 / sqrt(running variance + eps), `channels` numbers each.
template <class T>
void norm_use_running(cudaStream_t stream, const T* running_mean, const T* running_var, index_t channels,
                      double eps, T* statistics);

/// y = (x - mean) inv_std weight + bias, then the epilogue. y may be the addend. x, addend and y are accessed
/// 16 bytes at a time if all of them are aligned and the channels are whole vectors.
///
/// With batch.moments, those of x, which has at least two rows: also computes ops::batch_norm_use_batch. The
/// statistics of `m` are not read; batch.use.statistics gets them.
template <class T>
void norm_apply(cudaStream_t stream, const norm_matrix<T>& m, const accumulate_t<T>* bias,
                const norm_tail<T>& tail, T* y, const norm_batch_moments& batch = {});

/// First pass of the backward pass: gradients of weight and bias, from sums in double, and 3 x channels
/// `coefficients` for norm_input_gradient. `coefficients` and `mask` may be null. `work`: for
/// two quantities.
template <class T>
void norm_gradient_sums(cudaStream_t stream, const norm_matrix<T>& m, const T* dy, const std::uint32_t* mask,
                        const column_workspace& work, const norm_parameter_gradients& gradients,
                        accumulate_t<T>* coefficients);
/// Second pass of the backward pass: dx from the `coefficients` that norm_gradient_sums has written. dx may
/// be dy or x. Unless it is null, addend_gradient, which may be dy, receives dy with the mask applied.
///
/// With known.sums, there is no first pass: `coefficients` are not read, and known.gradients are computed.
template <class T>
void norm_input_gradient(cudaStream_t stream, const norm_matrix<T>& m, const T* dy, const std::uint32_t* mask,
                         const accumulate_t<T>* coefficients, T* dx, T* addend_gradient,
                         const norm_known_sums& known = {});

/// Largest number of rows that block_norm_forward and block_norm_backward normalize.
template <class T>
inline constexpr index_t most_block_norm_rows = sizeof(T) == 2 ? 8192 : 4096;
/// Whether block_norm_forward and block_norm_backward can normalize a matrix: most_block_norm_rows or fewer,
/// of channels in multiples of 8, with addresses of x and the three other arrays, which may be null, that are
/// multiples of 16.
template <class T>
bool block_norm_fits(const norm_matrix<T>& m, const T* a, const T* b = nullptr, const T* c = nullptr);

/// norm_use_batch and norm_apply in one launch, for at least two and few rows: see block_norm_fits. The
/// statistics of `m` are not read; `use.statistics` gets them. y may be the addend. Of the mask only the
/// bytes of existing elements are written.
template <class T>
void block_norm_forward(cudaStream_t stream, const norm_matrix<T>& m, const norm_batch_use& use,
                        const accumulate_t<T>* bias, const norm_tail<T>& tail, T* y);
/// norm_gradient_sums and, unless dx is null, norm_input_gradient in one launch, for few rows. dx may be dy
/// or x. addend_gradient: see norm_input_gradient; null if dx is null.
template <class T>
void block_norm_backward(cudaStream_t stream, const norm_matrix<T>& m, const T* dy, const std::uint32_t* mask,
                         const norm_parameter_gradients& gradients, T* dx, T* addend_gradient);

PUFFERFISH_KERNELS_END
