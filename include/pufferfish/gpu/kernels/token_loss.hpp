// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of the losses over tokens: softmax and cross entropy of rows of logits, with their gradients.

#include <pufferfish/gpu/kernels/column_parts.hpp>
#include <pufferfish/gpu/kernels/rows.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Rows of logits z = scale * logits + bias, and what they are held against. All arrays are stored on the
/// device.
template <class T>
struct token_logits {
  index_t rows, classes;
  row_array<const T> logits;
  float scale;
  const T* bias;  ///< nullptr: none
  const std::int32_t* targets;
  std::int32_t padding;  ///< targets that do not count; -1: none
  double right, wrong;   ///< the smoothed target: of its own class, of every other
};

/// What a gradient is divided by: a number, or one in device memory, which a captured graph reads anew.
struct loss_divisor {
  double value;
  const double* place;      ///< nullptr: `value`
  const float* loss_scale;  ///< a factor of the gradient, on the device; nullptr: 1

  /// What a gradient is divided by.
  PUFFERFISH_HOST_DEVICE double get() const {
    const double divisor = place == nullptr ? value : *place;
    return loss_scale == nullptr ? divisor : divisor / static_cast<double>(*loss_scale);
  }
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// losses_m = -sum_k t_k log p_k with p = softmax(z), 0 where the target is the padding, NaN where it is no
/// class; with dlogits, (p - t) / divisor there (it may be the logits; scale 1 and no bias then). `maxima`
/// and `shares`, unless nullptr, get the largest z and 1 / sum exp(z - largest) of each row.
template <class T>
void token_losses(cudaStream_t stream, const token_logits<T>& z, const loss_divisor& divisor,
                  row_array<T> dlogits, double* losses, float* maxima, float* shares);

/// sums[0] = the losses added up, in a fixed order; sums[1] = how many targets count.
void sum_token_losses(cudaStream_t stream, const double* losses, const std::int32_t* targets,
                      std::int32_t padding, index_t rows, double* sums);

/// From what token_losses found: scale (p - t) / divisor takes the place of `logits`, and dbias_k (+)= sum of
/// (p - t) / divisor over rows, unless it is nullptr. `scratch`: column_scratch(rows, classes, 1) doubles.
template <class T>
void token_gradients(cudaStream_t stream, const token_logits<T>& z, const loss_divisor& divisor,
                     const float* maxima, const float* shares, T* logits, accumulate_t<T>* dbias,
                     bool add_bias, double* scratch);

/// result_m = log sum_k exp(z_mk).
template <class T>
void log_sum_exp(cudaStream_t stream, row_array<const T> logits, index_t rows, index_t classes,
                 double* result);

PUFFERFISH_KERNELS_END
