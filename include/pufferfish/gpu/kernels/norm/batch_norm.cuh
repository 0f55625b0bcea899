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

// ---------------------------------------------------------------------------------------------------------
// Gradient

/// Elements of x and dy as they are in memory, and the bits of the mask.
template <class T, int Width>
struct raw_pair {
  raw_row<T, Width> x, dy;
  std::uint32_t bits;
};

/// Loads the elements i .. i + Width - 1 of both matrices, and their mask bits. mask nullptr: no mask.
template <int Width, class T>
__device__ inline raw_pair<T, Width> load_pair(const T* x, const T* dy, const std::uint32_t* mask,
                                               index_t i) {
  return {load_raw<Width>(x + i), load_raw<Width>(dy + i), mask == nullptr ? ~0U : mask_bits(mask, i)};
}

/// dy, with zeros where the mask has no bit.
template <class T, int Width>
__device__ inline row_values<T, Width> masked(const raw_pair<T, Width>& pair) {
  row_values<T, Width> g = widen(pair.dy);
  for (int k = 0; k < Width; ++k) {
    if (((pair.bits >> k) & 1U) == 0) g[k] = accumulate_t<T>{};
  }
  return g;
}

/// A task of sum_columns: sums of g and of g (x - mean) over rows, where g is dy with the mask applied.
template <class T, int Width>
struct norm_sum_task {
  static constexpr int width = Width;
  using state = column_sum_state<2, Width>;

  norm_matrix<T> m;
  const T* dy;
  const std::uint32_t* mask;

  __device__ void add(index_t column, index_t row, index_t end, index_t step, state& s) const {
    const row_values<T, Width> mean = load_channels<Width>(m.mean + column);
    add_runs<T>(
        row, end, step, s,
        [&](index_t at) { return load_pair<Width>(m.x, dy, mask, at * m.channels + column); },
        [&](const raw_pair<T, Width>& pair, auto& run) {
          const row_values<T, Width> x = widen(pair.x), g = masked(pair);
          for (int k = 0; k < Width; ++k) {
            run[0][k] += g[k];
            run[1][k] += g[k] * (x[k] - mean[k]);
          }
        });
  }
};

/// Stores the gradients of weight and bias, and the coefficients of the gradient of the input: dx = scale g +
/// (x - mean) slope + shift.
template <class T>
struct norm_sum_finish {
  norm_matrix<T> m;
  norm_parameter_gradients gradients;
  accumulate_t<T>* coefficients;

  /// `sum`: sum g; `weighted`: sum g (x - mean). dbias = sum g, dweight = inv_std sum g (x - mean).
  __device__ void store(index_t c, double sum, double weighted) const {
    store_sum(sum, gradients.add_bias, gradients.bias[c]);
    store_sum(weighted * static_cast<double>(m.inv_std[c]), gradients.add_weight, gradients.weight[c]);
  }

  struct channel_coefficients {
    accumulate_t<T> scale, slope, shift;
  };
  /// scale = weight inv_std, slope = -scale inv_std dweight / rows, shift = -scale dbias / rows.
  __device__ channel_coefficients coefficients_of(index_t c, double sum, double weighted) const {
    const double spread = static_cast<double>(m.inv_std[c]), count = static_cast<double>(m.rows);
    const double factor = static_cast<double>(m.weight[c]) * spread;
    return {static_cast<accumulate_t<T>>(factor),
            static_cast<accumulate_t<T>>(-factor * spread * (weighted * spread) / count),
            static_cast<accumulate_t<T>>(-factor * sum / count)};
  }

  __device__ void operator()(index_t c, const column_sum_state<2, 1>& s) const {
    const double sum = s.sums[0][0], weighted = s.sums[1][0];
    store(c, sum, weighted);
    if (coefficients == nullptr) return;
    const channel_coefficients of = coefficients_of(c, sum, weighted);
    coefficients[c] = of.scale;
    coefficients[m.channels + c] = of.slope;
    coefficients[2 * m.channels + c] = of.shift;
  }
};

template <class T>
void norm_gradient_sums(cudaStream_t stream, const norm_matrix<T>& m, const T* dy, const std::uint32_t* mask,
                        const column_workspace& work, const norm_parameter_gradients& gradients,
                        accumulate_t<T>* coefficients) {
  const launch_site site(stream, "norm_gradient_sums");
  with_width<T>(whole_vectors<T>(m.channels, m.x, dy), [&](auto width) {
    sum_columns<column_sum_state<2, 1>>(site, norm_sum_task<T, width>{m, dy, mask}, m.rows, m.channels, work,
                                        norm_sum_finish<T>{m, gradients, coefficients});
  });
}

/// A task of channel_pass: dx = scale g + (x - mean) slope + shift, with the three coefficients of each
/// channel. Unless it is null, addend_gradient = g.
template <class T, int Width>
struct norm_input_task {
  static constexpr int width = Width;
  using A = accumulate_t<T>;
  struct channel_values {
    lanes<A, Width> mean, scale, slope, shift;
  };

  norm_matrix<T> m;
  const T* dy;
  const std::uint32_t* mask;
  const accumulate_t<T>* coefficients;
  T* dx;
  T* addend_gradient;

  __device__ channel_values load(index_t c) const {
    return {load_channels<Width>(m.mean + c), load_channels<Width>(coefficients + c),
            load_channels<Width>(coefficients + m.channels + c),
            load_channels<Width>(coefficients + 2 * m.channels + c)};
  }

  __device__ raw_pair<T, Width> fetch(index_t i) const { return load_pair<Width>(m.x, dy, mask, i); }

  __device__ void run(index_t i, bool inside, const raw_pair<T, Width>& pair, const channel_values& v) const {
    if (!inside) return;
    const row_values<T, Width> x = widen(pair.x), g = masked(pair);
    if (addend_gradient != nullptr) store_row(addend_gradient + i, g);
    lanes<A, Width> values;
    for (int k = 0; k < Width; ++k) {
      values[k] = v.scale[k] * g[k] + ((x[k] - v.mean[k]) * v.slope[k] + v.shift[k]);
    }
    store_row(dx + i, values);
  }
};

template <class T>
void norm_input_gradient(cudaStream_t stream, const norm_matrix<T>& m, const T* dy, const std::uint32_t* mask,
                         const accumulate_t<T>* coefficients, T* dx, T* addend_gradient) {
  const launch_site site(stream, "norm_input_gradient");
  with_width<T>(whole_vectors<T>(m.channels, m.x, dy, dx, addend_gradient), [&](auto width) {
    channel_pass(site, norm_input_task<T, width>{m, dy, mask, coefficients, dx, addend_gradient}, m.rows,
                 m.channels);
  });
}

#define PUFFERFISH_INSTANTIATE(T)                                                                           \
  template void norm_use_batch<T>(cudaStream_t, const T*, index_t, index_t, const column_workspace&,        \
                                  const norm_batch_use&);                                                   \
  template void norm_apply<T>(cudaStream_t, const norm_matrix<T>&, const accumulate_t<T>*,                  \
                              const norm_tail<T>&, T*, const norm_batch_moments&);                          \
  template void norm_gradient_sums<T>(cudaStream_t, const norm_matrix<T>&, const T*, const std::uint32_t*,  \
                                      const column_workspace&, const norm_parameter_gradients&,             \
                                      accumulate_t<T>*);                                                    \
  template void norm_input_gradient<T>(cudaStream_t, const norm_matrix<T>&, const T*, const std::uint32_t*, \
                                       const accumulate_t<T>*, T*, T*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE
template void norm_use_running<float>(cudaStream_t, const float*, const float*, index_t, double, float*);

PUFFERFISH_KERNELS_END
