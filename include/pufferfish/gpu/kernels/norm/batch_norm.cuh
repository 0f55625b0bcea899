// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of batch_norm.hpp: statistics and gradient sums by gpu/kernels/reduce/columns.cuh, everything else
/// in passes whose threads keep the numbers of their channels in registers.
///
/// Element (row, channel) is at row channels + channel. Accesses have 16 bytes if the channels are whole
/// vectors and all addresses are multiples of 16, else one element.

#include <pufferfish/gpu/kernels/elementwise/relu_mask.hpp>
#include <pufferfish/gpu/kernels/norm/batch_norm.hpp>
#include <pufferfish/gpu/kernels/norm/channel_pass.cuh>
#include <pufferfish/gpu/kernels/norm/moments.cuh>
#include <pufferfish/gpu/kernels/reduce/columns.cuh>

PUFFERFISH_KERNELS_BEGIN

// ---------------------------------------------------------------------------------------------------------
// Statistics

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

template <class T>
void norm_use_batch(cudaStream_t stream, const T* x, index_t rows, index_t channels,
                    const column_workspace& work, const norm_batch_use& use) {
  const launch_site site(stream, "norm_use_batch");
  with_width<T>(whole_vectors<T>(channels, x), [&](auto width) {
    sum_columns<moment_total>(site, moment_task<T, width>{x, channels}, rows, channels, work,
                              norm_batch_finish{use, channels});
  });
}

/// Grid: one thread per channel, 64 a block.
template <class T>
static __global__ void norm_use_running_kernel(grid_dependency earlier, const T* running_mean,
                                               const T* running_var, index_t channels, double eps,
                                               T* statistics) {
  earlier.wait();
  for (index_t c = grid_thread(); c < channels; c += grid_threads()) {
    statistics[c] = running_mean[c];
    statistics[channels + c] = static_cast<T>(inverse_deviation(static_cast<double>(running_var[c]), eps));
  }
}

template <class T>
void norm_use_running(cudaStream_t stream, const T* running_mean, const T* running_var, index_t channels,
                      double eps, T* statistics) {
  launch(stream, {blocks_for(channels, 64), 64}, norm_use_running_kernel<T>, running_mean, running_var,
         channels, eps, statistics);
}

// ---------------------------------------------------------------------------------------------------------
// Forward

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

/// A task of channel_pass: y = (x - mean) scale + shift with scale = inv_std weight and shift = bias, then
/// the epilogue. Without statistics, each thread computes those of its channels from the moments. Element i
/// of the matrix has its mask bit in word i / 32. The lanes of a word join their bits by shuffles, and the
/// first of these lanes stores the word.
template <class T, int Width>
struct norm_apply_task {
  static constexpr int width = Width;
  using A = accumulate_t<T>;
  struct channel_values {
    lanes<A, Width> mean, scale, shift;
  };

  norm_matrix<T> m;
  const accumulate_t<T>* bias;
  norm_tail<T> tail;
  T* y;
  norm_batch_moments batch;
  double share;  ///< 1 / number of rows

  /// Stores the statistics of channel c, if they were computed from moments.
  __device__ void finish(index_t c) const {
    if (batch.moments == nullptr) return;
    norm_batch_finish{batch.use, m.channels}.store(c, batch.moments[c], batch.moments[m.channels + c],
                                                   static_cast<double>(m.rows), inv_std(c));
  }

  __device__ channel_values load(index_t c) const {
    channel_values v;
    if (batch.moments == nullptr) {
      v.mean = load_channels<Width>(m.mean + c);
      v.scale = load_channels<Width>(m.inv_std + c);
    } else {
      for (int k = 0; k < Width; ++k) {
        v.mean[k] = static_cast<A>(batch.moments[c + k]);
        v.scale[k] = inv_std(c + k);
      }
    }
    v.shift = load_channels<Width>(bias + c);
    const lanes<A, Width> weight = load_channels<Width>(m.weight + c);
    for (int k = 0; k < Width; ++k) v.scale[k] *= weight[k];
    return v;
  }

  struct fetched {
    raw_row<T, Width> x, addend;
  };
  __device__ fetched fetch(index_t i) const {
    fetched unit;
    unit.x = load_raw<Width>(m.x + i);
    if (tail.addend != nullptr) unit.addend = load_raw<Width>(tail.addend + i);
    return unit;
  }

  /// Elements i .. i + Width - 1. All lanes of a warp call it if there is a mask, also those without an
  /// element.
  __device__ void run(index_t i, bool inside, const fetched& unit, const channel_values& v) const {
    std::uint32_t bits = 0;
    if (inside) {
      const row_values<T, Width> x = widen(unit.x);
      lanes<A, Width> values;
      for (int k = 0; k < Width; ++k) values[k] = (x[k] - v.mean[k]) * v.scale[k] + v.shift[k];
      if (tail.addend != nullptr) {
        const row_values<T, Width> other = widen(unit.addend);
        for (int k = 0; k < Width; ++k) values[k] += other[k];
      }
      if (tail.relu) bits = rectify(values);
      store_row(y + i, values);
    }
    if (tail.mask == nullptr) return;
    const int lane = static_cast<int>(threadIdx.x % warp_threads);
    bits = join_bits<Width>(bits, lane);
    if (inside && lane % (mask_word_bits / Width) == 0) tail.mask[i / mask_word_bits] = bits;
  }

 private:
  // Inverse deviation of channel c from the moments. Root and quotient are in float, which all threads
  // compute at full speed.
  __device__ A inv_std(index_t c) const {
    return A{1} / sqrtf(static_cast<A>(batch.moments[m.channels + c] * share + batch.use.eps));
  }
};

template <class T>
void norm_apply(cudaStream_t stream, const norm_matrix<T>& m, const accumulate_t<T>* bias,
                const norm_tail<T>& tail, T* y, const norm_batch_moments& batch) {
  const launch_site site(stream, "norm_apply");
  const double share = 1.0 / static_cast<double>(m.rows);
  with_width<T>(whole_vectors<T>(m.channels, m.x, tail.addend, y), [&](auto width) {
    channel_pass(site, norm_apply_task<T, width>{m, bias, tail, y, batch, share}, m.rows, m.channels);
  });
}

#define PUFFERFISH_INSTANTIATE(T)                                                                    \
  template void norm_use_batch<T>(cudaStream_t, const T*, index_t, index_t, const column_workspace&, \
                                  const norm_batch_use&);                                            \
  template void norm_apply<T>(cudaStream_t, const norm_matrix<T>&, const accumulate_t<T>*,           \
                              const norm_tail<T>&, T*, const norm_batch_moments&);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE
template void norm_use_running<float>(cudaStream_t, const float*, const float*, index_t, double, float*);

PUFFERFISH_KERNELS_END
