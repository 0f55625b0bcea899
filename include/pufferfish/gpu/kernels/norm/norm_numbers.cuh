// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the numbers of a channel in a batch normalization, and its formula. All kernels that normalize
/// use these functions, so that their results have the same bits.

#include <pufferfish/gpu/kernels/norm/batch_norm.hpp>
#include <pufferfish/gpu/kernels/reduce/columns.cuh>
#include <pufferfish/gpu/kernels/reduce/moment_parts.cuh>

PUFFERFISH_KERNELS_BEGIN

/// 1 / sqrt(variance + eps).
__device__ inline double inverse_deviation(double variance, double eps) { return 1.0 / sqrt(variance + eps); }

/// The running statistic after a batch with the given value: (1 - momentum) running + momentum value.
__device__ inline float moved_towards(float running, double value, double momentum) {
  return static_cast<float>((1.0 - momentum) * static_cast<double>(running) + momentum * value);
}

/// Stores the statistics of channel c and moves the running statistics. Channel 0 also counts the batch.
struct norm_batch_finish {
  norm_batch_use use;
  index_t channels;

  __device__ void operator()(index_t c, const moment_total& s) const {
    store(c, s.mean(), s.squared_deviations(), s.count);
  }
  /// `squares`: the sum of squared deviations of `count` values.
  __device__ void store(index_t c, double mean, double squares, double count) const {
    store(c, mean, squares, count, static_cast<float>(inverse_deviation(squares / count, use.eps)));
  }
  /// The same for a channel whose inverse deviation is known.
  __device__ void store(index_t c, double mean, double squares, double count, float inv_std) const {
    if (c == 0) use.batches[0] += 1.0F;
    use.statistics[c] = static_cast<float>(mean);
    use.statistics[channels + c] = inv_std;
    use.running_mean[c] = moved_towards(use.running_mean[c], mean, use.momentum);
    use.running_var[c] = moved_towards(use.running_var[c], squares / (count - 1.0), use.momentum);
  }
};

/// Mean and inverse deviation of the channels of `m`: those that `m` has, or computed from moments.
template <class T>
struct norm_statistics {
  using A = accumulate_t<T>;

  norm_matrix<T> m;
  norm_batch_moments batch;
  double share;  ///< 1 / number of rows

  /// Kernel argument. `batch` may have moments.
  static norm_statistics of(const norm_matrix<T>& m, const norm_batch_moments& batch) {
    return {m, batch, 1.0 / static_cast<double>(m.rows)};
  }

  __device__ A mean(index_t c) const {
    return batch.moments == nullptr ? m.mean[c] : static_cast<A>(batch.moments[c]);
  }
  /// Root and quotient are in float, which all threads compute at full speed.
  __device__ A inv_std(index_t c) const {
    if (batch.moments == nullptr) return m.inv_std[c];
    return A{1} / sqrtf(static_cast<A>(batch.moments[m.channels + c] * share + batch.use.eps));
  }
  /// Stores the statistics of channel c, if they were computed from moments.
  __device__ void finish(index_t c) const {
    if (batch.moments == nullptr) return;
    norm_batch_finish{batch.use, m.channels}.store(c, batch.moments[c], batch.moments[m.channels + c],
                                                   static_cast<double>(m.rows), inv_std(c));
  }
};

/// The normalized x, where scale = inverse deviation weight and shift = bias.
template <class A>
__device__ inline A normalized(A x, A mean, A scale, A shift) {
  return (x - mean) * scale + shift;
}

/// Replaces negative values by 0; a NaN stays. Bit k of the result says whether value k passed.
template <class A, int Width>
__device__ inline std::uint32_t rectify(lanes<A, Width>& values) {
  std::uint32_t bits = 0;
  for (int k = 0; k < Width; ++k) {
    bits |= (values[k] <= A{} ? 0U : 1U) << k;
    values[k] = values[k] < A{} ? A{} : values[k];
  }
  return bits;
}

PUFFERFISH_KERNELS_END
