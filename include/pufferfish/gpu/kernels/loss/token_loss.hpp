// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of the losses over tokens: softmax and cross entropy of rows of logits, with their gradients.
///
/// Order of use: token_losses, then sum_token_losses; for an output layer that keeps its logits, token_losses
/// with `maxima` and `shares`, and in the backward pass token_gradients.

#include <pufferfish/gpu/kernels/copy/rows.hpp>
#include <pufferfish/gpu/kernels/reduce/column_parts.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Rows of logits z = scale * logits + bias, with their targets and the smoothed
/// target. All arrays are stored on the device.
template <class T>
struct token_logits {
  index_t rows, classes;
  row_array<const T> logits;
  float scale;
  const T* bias;  ///< nullptr: none
  const std::int32_t* targets;
  std::int32_t padding;  ///< target that does not count; -1: none
  double right, wrong;   ///< the smoothed target: value of the row's class, value of every other class
};

/// The divisor of a gradient: a number, or one in device memory, which a captured graph reads in each replay.
struct loss_divisor {
  double value;
  const double* place;      ///< nullptr: `value`
  const float* loss_scale;  ///< a factor of the gradient, on the device; nullptr: 1

  /// The divisor, combined with the loss scale.
  PUFFERFISH_HOST_DEVICE double get() const {
    const double divisor = place == nullptr ? value : *place;
    return loss_scale == nullptr ? divisor : divisor / static_cast<double>(*loss_scale);
  }
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// losses_m = -sum_k t_k log p_k with p = softmax(z), 0 if the target is the padding, NaN if it is no class.
/// dlogits, if given, becomes (p - t) / divisor (it may be the logits; then scale is 1 without bias).
/// `maxima` and `shares`, unless nullptr, receive the largest z and 1 / sum exp(z - largest) of each row.
/// losses: rows doubles. maxima and shares: rows floats each, both or neither.
template <class T>
void token_losses(cudaStream_t stream, const token_logits<T>& z, const loss_divisor& divisor,
                  row_array<T> dlogits, double* losses, float* maxima, float* shares);

/// sums[0] = the sum of the losses, in a fixed order; sums[1] = number of targets that count.
void sum_token_losses(cudaStream_t stream, const double* losses, const std::int32_t* targets,
                      std::int32_t padding, index_t rows, double* sums);

/// From the results of token_losses: `logits` becomes scale (p - t) / divisor, and dbias_k (+)= sum of (p -
/// t) / divisor over rows, unless it is nullptr. `scratch`: column_scratch(rows, classes, 1) doubles.
template <class T>
void token_gradients(cudaStream_t stream, const token_logits<T>& z, const loss_divisor& divisor,
                     const float* maxima, const float* shares, T* logits, accumulate_t<T>* dbias,
                     bool add_bias, double* scratch);

/// result_m = log sum_k exp(z_mk). Dense rows. The terms are computed in float, their sum in float for each
/// thread, then in double.
template <class T>
void log_sum_exp(cudaStream_t stream, row_array<const T> logits, index_t rows, index_t classes,
                 double* result);

PUFFERFISH_KERNELS_END
