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
#include <pufferfish/gpu/kernels/norm/norm_numbers.cuh>
#include <pufferfish/gpu/kernels/reduce/columns.cuh>

PUFFERFISH_KERNELS_BEGIN

// ---------------------------------------------------------------------------------------------------------
// Statistics

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

  norm_statistics<T> statistics;
  const accumulate_t<T>* bias;
  norm_tail<T> tail;
  T* y;

  /// Stores the statistics of channel c, if they were computed from moments.
  __device__ void finish(index_t c) const { statistics.finish(c); }

  __device__ channel_values load(index_t c) const {
    channel_values v;
    if (statistics.batch.moments == nullptr) {
      v.mean = load_channels<Width>(statistics.m.mean + c);
      v.scale = load_channels<Width>(statistics.m.inv_std + c);
    } else {
      for (int k = 0; k < Width; ++k) {
        v.mean[k] = statistics.mean(c + k);
        v.scale[k] = statistics.inv_std(c + k);
      }
    }
    v.shift = load_channels<Width>(bias + c);
    const lanes<A, Width> weight = load_channels<Width>(statistics.m.weight + c);
    for (int k = 0; k < Width; ++k) v.scale[k] *= weight[k];
    return v;
  }

  struct fetched {
    raw_row<T, Width> x, addend;
  };
  __device__ fetched fetch(index_t i) const {
    fetched unit;
    unit.x = load_raw<Width>(statistics.m.x + i);
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
      for (int k = 0; k < Width; ++k) values[k] = normalized(x[k], v.mean[k], v.scale[k], v.shift[k]);
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
};

template <class T>
void norm_apply(cudaStream_t stream, const norm_matrix<T>& m, const accumulate_t<T>* bias,
                const norm_tail<T>& tail, T* y, const norm_batch_moments& batch) {
  const launch_site site(stream, "norm_apply");
  with_width<T>(whole_vectors<T>(m.channels, m.x, tail.addend, y), [&](auto width) {
    channel_pass(site, norm_apply_task<T, width>{norm_statistics<T>::of(m, batch), bias, tail, y}, m.rows,
                 m.channels);
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
