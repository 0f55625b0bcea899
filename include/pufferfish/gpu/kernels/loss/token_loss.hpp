// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of the losses over tokens: softmax and cross entropy of rows of logits, with their gradients.
/// Each throws backend_error if its launch fails.
///
/// Order of use: token_losses, then sum_token_losses. An output layer that keeps its logits calls
/// token_losses with `maxima` and `shares`, and token_gradients in the backward pass.

#include <pufferfish/gpu/kernels/copy/rows.hpp>
#include <pufferfish/gpu/kernels/reduce/column_parts.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Rows of logits z = scale * logits + bias, with their targets and the smoothed target. All arrays are in
/// device memory.
template <class T>
struct token_logits {
  index_t rows, classes;
  row_array<const T> logits;
  float scale;
  const T* bias;                ///< one number per class; nullptr: 0
  const std::int32_t* targets;  ///< class of each row
  std::int32_t padding;         ///< rows with this target have no loss; -1: none
  double right, wrong;          ///< smoothed target: value of the row's class, value of every other class
};

/// The divisor of a gradient: a number, or a number in device memory, which a captured graph reads in each
/// replay.
struct loss_divisor {
  double value;
  const double* place;      ///< address of the divisor in device memory; nullptr: use `value`
  const float* loss_scale;  ///< factor of the gradient, in device memory; nullptr: 1

  /// The divisor divided by the loss scale.
  PUFFERFISH_HOST_DEVICE double get() const {
    const double divisor = place == nullptr ? value : *place;
    return loss_scale == nullptr ? divisor : divisor / static_cast<double>(*loss_scale);
  }
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// losses_m = -sum_k t_k log p_k with p = softmax(z_m); 0 if the target is the padding, NaN if it is no
/// class. dlogits, if not null, receives (p - t) / divisor. dlogits may be the logits if scale is 1 and there
/// is no bias. `maxima` and `shares` receive the largest z and 1 / sum exp(z - largest) of each row; both or
/// neither may be nullptr. losses: rows doubles; maxima, shares: rows floats each.
template <class T>
void token_losses(cudaStream_t stream, const token_logits<T>& z, const loss_divisor& divisor,
                  row_array<T> dlogits, double* losses, float* maxima, float* shares);

/// sums[0] = the sum of the losses, in a fixed order; sums[1] = number of targets other than the padding.
void sum_token_losses(cudaStream_t stream, const double* losses, const std::int32_t* targets,
                      std::int32_t padding, index_t rows, double* sums);

/// Computes gradients from the results of token_losses. Replaces `logits` by scale (p - t) / divisor. Unless
/// it is nullptr, dbias_k = sum over rows of (p - t) / divisor, or += with add_bias. `work`: for
/// one quantity.
template <class T>
void token_gradients(cudaStream_t stream, const token_logits<T>& z, const loss_divisor& divisor,
                     const float* maxima, const float* shares, T* logits, accumulate_t<T>* dbias,
                     bool add_bias, const column_workspace& work);

/// result_m = log sum_k exp(logits_mk). The terms are computed in float; a thread's terms are added in float,
/// the threads' sums in double.
template <class T>
void log_sum_exp(cudaStream_t stream, row_array<const T> logits, index_t rows, index_t classes,
                 double* result);

PUFFERFISH_KERNELS_END
