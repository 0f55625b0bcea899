// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of the gradients of batch normalization. Formulas and accesses: batch_norm.cuh.

#include <pufferfish/gpu/kernels/elementwise/relu_mask.hpp>
#include <pufferfish/gpu/kernels/norm/batch_norm.hpp>
#include <pufferfish/gpu/kernels/norm/channel_pass.cuh>
#include <pufferfish/gpu/kernels/reduce/columns.cuh>

PUFFERFISH_KERNELS_BEGIN

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
/// channel. Without coefficients, each thread computes those of its channels from the known sums. Unless it
/// is null, addend_gradient = g.
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
  norm_known_sums known;
  double share;  ///< 1 / number of rows

  /// Stores the gradients of the weight and bias of channel c, if the sums are known.
  __device__ void finish(index_t c) const {
    if (known.sums == nullptr) return;
    norm_sum_finish<T>{m, known.gradients, nullptr}.store(c, known.sums[c], known.sums[m.channels + c]);
  }

  __device__ channel_values load(index_t c) const {
    if (known.sums == nullptr) {
      return {load_channels<Width>(m.mean + c), load_channels<Width>(coefficients + c),
              load_channels<Width>(coefficients + m.channels + c),
              load_channels<Width>(coefficients + 2 * m.channels + c)};
    }
    channel_values v;
    v.mean = load_channels<Width>(m.mean + c);
    const lanes<A, Width> inv_std = load_channels<Width>(m.inv_std + c);
    const lanes<A, Width> weight = load_channels<Width>(m.weight + c);
    // The formulas of norm_sum_finish, in the type of computation, which all threads compute at full speed.
    for (int k = 0; k < Width; ++k) {
      v.scale[k] = weight[k] * inv_std[k];
      v.slope[k] =
          -v.scale[k] * inv_std[k] * inv_std[k] * static_cast<A>(known.sums[m.channels + c + k] * share);
      v.shift[k] = -v.scale[k] * static_cast<A>(known.sums[c + k] * share);
    }
    return v;
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
                         const accumulate_t<T>* coefficients, T* dx, T* addend_gradient,
                         const norm_known_sums& known) {
  const launch_site site(stream, "norm_input_gradient");
  const double share = 1.0 / static_cast<double>(m.rows);
  with_width<T>(whole_vectors<T>(m.channels, m.x, dy, dx, addend_gradient), [&](auto width) {
    channel_pass(site,
                 norm_input_task<T, width>{m, dy, mask, coefficients, dx, addend_gradient, known, share},
                 m.rows, m.channels);
  });
}

#define PUFFERFISH_INSTANTIATE(T)                                                                           \
  template void norm_gradient_sums<T>(cudaStream_t, const norm_matrix<T>&, const T*, const std::uint32_t*,  \
                                      const column_workspace&, const norm_parameter_gradients&,             \
                                      accumulate_t<T>*);                                                    \
  template void norm_input_gradient<T>(cudaStream_t, const norm_matrix<T>&, const T*, const std::uint32_t*, \
                                       const accumulate_t<T>*, T*, T*, const norm_known_sums&);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
