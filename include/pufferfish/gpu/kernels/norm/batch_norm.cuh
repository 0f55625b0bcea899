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
#include <pufferfish/gpu/kernels/reduce/columns.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Whether rows and addresses allow 16-byte accesses.
template <class T, class... P>
bool norm_by_vectors(index_t channels, const P*... pointers) {
  return channels % vector_width<T> == 0 && aligned16(pointers...);
}

// ---------------------------------------------------------------------------------------------------------
// Statistics

/// Number, mean and sum of squared deviations of values in `Width` columns; merged without cancellation
/// (Chan, Golub, LeVeque, 1979).
template <int Width>
struct moment_state {
  double count;
  lanes<double, Width> mean, squares;

  __device__ void clear() {
    count = 0.0;
    mean = squares = {};
  }
  __device__ void merge(const moment_state& other) {
    if (other.count == 0.0) return;
    const double total = count + other.count, share = other.count / total;
    for (int k = 0; k < Width; ++k) {
      const double distance = other.mean[k] - mean[k];
      mean[k] += distance * share;
      squares[k] += other.squares[k] + distance * distance * (count * share);
    }
    count = total;
  }
  __device__ void save(int k, double* values, index_t stride) const {
    values[0] = mean[k];
    values[stride] = squares[k];
  }
  __device__ void load(const double* values, index_t stride, index_t rows) {
    count = static_cast<double>(rows);
    mean[0] = values[0];
    squares[0] = values[stride];
  }
};

/// Moments of the columns of x: of runs of rows in float, relative to the run's first row, then merged.
template <class T, int Width>
struct moment_task {
  static constexpr int width = Width;
  using state = moment_state<Width>;

  const T* x;
  index_t channels;

  /// Each run of up to run_rows rows has moments relative to its first row, so that large means do not cancel
  /// digits.
  __device__ void add(index_t column, index_t row, index_t end, index_t step, state& s) const {
    using A = accumulate_t<T>;
    const auto load = [&](index_t at) { return load_raw<Width>(x + at * channels + column); };
    while (row < end) {
      const row_values<T, Width> shift = widen(load(row));
      row_values<T, Width> sums{}, squares{};
      const int count = for_run(row, end, step, load, [&](const raw_row<T, Width>& raw) {
        const row_values<T, Width> values = widen(raw);
        for (int k = 0; k < Width; ++k) {
          const A distance = values[k] - shift[k];
          sums[k] += distance;
          squares[k] += distance * distance;
        }
      });
      state run;
      run.count = count;
      for (int k = 0; k < Width; ++k) {
        const double mean = static_cast<double>(sums[k]) / run.count;
        run.mean[k] = static_cast<double>(shift[k]) + mean;
        run.squares[k] = static_cast<double>(squares[k]) - mean * static_cast<double>(sums[k]);
      }
      s.merge(run);
    }
  }
};

__device__ inline double inverse_deviation(double variance, double eps) { return 1.0 / sqrt(variance + eps); }

__device__ inline float moved_towards(float running, double value, double momentum) {
  return static_cast<float>((1.0 - momentum) * static_cast<double>(running) + momentum * value);
}

/// Stores the statistics of channel c and moves the running ones; channel 0 also counts the batch.
struct norm_batch_finish {
  norm_batch_use use;
  index_t channels;

  __device__ void operator()(index_t c, const moment_state<1>& s) const {
    const double mean = s.mean[0], squares = s.squares[0] < 0.0 ? 0.0 : s.squares[0];
    if (c == 0) use.batches[0] += 1.0F;
    use.statistics[c] = static_cast<float>(mean);
    use.statistics[channels + c] = static_cast<float>(inverse_deviation(squares / s.count, use.eps));
    use.running_mean[c] = moved_towards(use.running_mean[c], mean, use.momentum);
    use.running_var[c] = moved_towards(use.running_var[c], squares / (s.count - 1.0), use.momentum);
  }
};

template <class T>
void norm_use_batch(cudaStream_t stream, const T* x, index_t rows, index_t channels, double* scratch,
                    const norm_batch_use& use) {
  const norm_batch_finish finish{use, channels};
  if (norm_by_vectors<T>(channels, x)) {
    const moment_task<T, vector_width<T>> task{x, channels};
    return sum_columns<moment_state<1>>(stream, task, rows, channels, scratch, finish);
  }
  const moment_task<T, 1> task{x, channels};
  sum_columns<moment_state<1>>(stream, task, rows, channels, scratch, finish);
}

/// One thread per channel, 64 a block.
template <class T>
static __global__ void norm_use_running_kernel(const T* running_mean, const T* running_var, index_t channels,
                                               double eps, T* statistics) {
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
// Elementwise passes with numbers per channel

/// A task has task::width; load(channel), the numbers of `width` channels; fetch(element), what a unit of
/// `width` elements reads; and run(element, inside, fetched, numbers). `inside` is false for a thread without
/// a unit that only joins its warp's operations. A block has whole warps and `per_block` units, a multiple of
/// its threads; `columns` units make a row. Block b has the units b per_block .. of all `total` units, thread
/// t of it those at t, t + threads, .... If the number of threads is a multiple of `columns`, a thread has
/// the same channels in every step: it loads their numbers once, and four units at a time.
template <class Task>
static __global__ void channel_pass_kernel(Task task, index_t total, index_t columns, index_t per_block) {
  const index_t begin = static_cast<index_t>(blockIdx.x) * per_block;
  const index_t end = begin + per_block < total ? begin + per_block : total;
  const index_t lane = threadIdx.x % warp_threads, threads = blockDim.x, step = threads % columns;
  index_t at = begin + threadIdx.x, column = at % columns;
  using fetched = decltype(task.fetch(at));
  auto values = task.load(column * Task::width);
  if (step == 0) {
    constexpr int ahead = 4;  // units whose loads are in flight
    for (; at - lane < end; at += ahead * threads) {
      fetched units[static_cast<std::size_t>(ahead)];
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        if (at + i * threads < end) units[i] = task.fetch((at + i * threads) * Task::width);
      }
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        const index_t unit = at + i * threads;
        if (unit - lane < end) task.run(unit * Task::width, unit < end, units[i], values);
      }
    }
    return;
  }
  for (; at - lane < end; at += threads) {
    fetched unit;
    if (at < end) unit = task.fetch(at * Task::width);
    task.run(at * Task::width, at < end, unit, values);
    column = column + step < columns ? column + step : column + step - columns;
    values = task.load(column * Task::width);
  }
}

/// Starts channel_pass_kernel for rows x channels elements; task::width divides the channels. A thread has 1
/// to 8 steps, more than one only if at least 1024 blocks remain.
template <class Task>
void channel_pass(const launch_site& stream, const Task& task, index_t rows, index_t channels) {
  const index_t columns = channels / Task::width, total = rows * columns;
  if (total == 0) return;
  // A number of threads for which every thread keeps its channels, if possible.
  index_t threads = columns;
  while (threads % warp_threads != 0 && threads <= 512) threads *= 2;
  threads = threads > 512 ? 256 : threads * (threads < 256 ? 256 / threads : 1);
  // At least two blocks for each multiprocessor of a large device, so that few threads load the numbers of
  // their channels.
  const index_t rounds = total / (threads * 264);
  const index_t per_block = threads * (rounds < 1 ? 1 : rounds < 8 ? rounds : 8);
  launch(stream, {static_cast<unsigned>(ceil_div(total, per_block)), static_cast<unsigned>(threads)},
         channel_pass_kernel<Task>, task, total, columns, per_block);
}

/// The bits of the lanes that share a word of a mask, `Width` of each lane; all 32 lanes call it.
template <int Width>
__device__ inline std::uint32_t join_bits(std::uint32_t bits, int lane) {
  constexpr int lanes = mask_word_bits / Width;
  bits <<= lane % lanes * Width;
  for (int distance = lanes / 2; distance > 0; distance /= 2)
    bits |= __shfl_xor_sync(all_lanes, bits, distance);
  return bits;
}

/// y = (x - mean) scale + shift, scale = inv_std weight, shift = bias, then the tail. Element i of the matrix
/// has its mask bit in word i / 32; the lanes of a word join their bits by shuffles, and the first of them
/// stores the word.
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

  __device__ channel_values load(index_t c) const {
    channel_values v{load_channels<Width>(m.mean + c), load_channels<Width>(m.inv_std + c),
                     load_channels<Width>(bias + c)};
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
      if (tail.relu) {
        for (int k = 0; k < Width; ++k) {
          bits |= (values[k] <= A{} ? 0U : 1U) << k;
          values[k] = values[k] < A{} ? A{} : values[k];
        }
      }
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
                const norm_tail<T>& tail, T* y) {
  if (norm_by_vectors<T>(m.channels, m.x, tail.addend, y)) {
    return channel_pass(stream, norm_apply_task<T, vector_width<T>>{m, bias, tail, y}, m.rows, m.channels);
  }
  channel_pass(stream, norm_apply_task<T, 1>{m, bias, tail, y}, m.rows, m.channels);
}

// ---------------------------------------------------------------------------------------------------------
// Gradient

/// Elements of x and dy as they are in memory, and the bits of the mask.
template <class T, int Width>
struct raw_pair {
  raw_row<T, Width> x, dy;
  std::uint32_t bits;
};

/// Elements i .. i + Width - 1 of both matrices. mask: nullptr for none.
template <int Width, class T>
__device__ inline raw_pair<T, Width> load_pair(const T* x, const T* dy, const std::uint32_t* mask,
                                               index_t i) {
  return {load_raw<Width>(x + i), load_raw<Width>(dy + i), mask == nullptr ? ~0U : mask_bits(mask, i)};
}

/// The gradient with the mask applied.
template <class T, int Width>
__device__ inline row_values<T, Width> masked(const raw_pair<T, Width>& pair) {
  row_values<T, Width> g = widen(pair.dy);
  for (int k = 0; k < Width; ++k) {
    if (((pair.bits >> k) & 1U) == 0) g[k] = accumulate_t<T>{};
  }
  return g;
}

/// Sums of g and of g (x - mean).
template <class T, int Width>
struct norm_sum_task {
  static constexpr int width = Width;
  using state = column_sum_state<2, Width>;

  norm_matrix<T> m;
  const T* dy;
  const std::uint32_t* mask;

  /// Sums of a run are in float, those of all runs in double.
  __device__ void add(index_t column, index_t row, index_t end, index_t step, state& s) const {
    using A = accumulate_t<T>;
    const lanes<A, Width> mean = load_channels<Width>(m.mean + column);
    while (row < end) {
      row_values<T, Width> sums{}, products{};
      for_run(
          row, end, step,
          [&](index_t at) { return load_pair<Width>(m.x, dy, mask, at * m.channels + column); },
          [&](const raw_pair<T, Width>& pair) {
            const row_values<T, Width> x = widen(pair.x), g = masked(pair);
            for (int k = 0; k < Width; ++k) {
              sums[k] += g[k];
              products[k] += g[k] * (x[k] - mean[k]);
            }
          });
      for (int k = 0; k < Width; ++k) {
        s.sums[0][k] += static_cast<double>(sums[k]);
        s.sums[1][k] += static_cast<double>(products[k]);
      }
    }
  }
};

/// Stores both gradients, and the coefficients of the input's: dx = scale g + (x - mean) slope + shift.
template <class T>
struct norm_sum_finish {
  norm_matrix<T> m;
  norm_parameter_gradients gradients;
  accumulate_t<T>* coefficients;

  /// dbias = sum g, dweight = inv_std sum g (x - mean); scale = weight inv_std, slope = -scale inv_std
  /// dweight / rows, shift = -scale dbias / rows.
  __device__ void operator()(index_t c, const column_sum_state<2, 1>& s) const {
    const double spread = static_cast<double>(m.inv_std[c]), count = static_cast<double>(m.rows);
    const double dbias = s.sums[0][0], dweight = s.sums[1][0] * spread;
    store_sum(dbias, gradients.add_bias, gradients.bias[c]);
    store_sum(dweight, gradients.add_weight, gradients.weight[c]);
    if (coefficients == nullptr) return;
    const double factor = static_cast<double>(m.weight[c]) * spread;
    coefficients[c] = static_cast<accumulate_t<T>>(factor);
    coefficients[m.channels + c] = static_cast<accumulate_t<T>>(-factor * spread * dweight / count);
    coefficients[2 * m.channels + c] = static_cast<accumulate_t<T>>(-factor * dbias / count);
  }
};

template <class T>
void norm_gradient_sums(cudaStream_t stream, const norm_matrix<T>& m, const T* dy, const std::uint32_t* mask,
                        double* scratch, const norm_parameter_gradients& gradients,
                        accumulate_t<T>* coefficients) {
  using sums = column_sum_state<2, 1>;
  const norm_sum_finish<T> finish{m, gradients, coefficients};
  if (norm_by_vectors<T>(m.channels, m.x, dy)) {
    const norm_sum_task<T, vector_width<T>> task{m, dy, mask};
    return sum_columns<sums>(stream, task, m.rows, m.channels, scratch, finish);
  }
  const norm_sum_task<T, 1> task{m, dy, mask};
  sum_columns<sums>(stream, task, m.rows, m.channels, scratch, finish);
}

/// dx = scale g + (x - mean) slope + shift, with the three coefficients of each channel.
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

  __device__ channel_values load(index_t c) const {
    return {load_channels<Width>(m.mean + c), load_channels<Width>(coefficients + c),
            load_channels<Width>(coefficients + m.channels + c),
            load_channels<Width>(coefficients + 2 * m.channels + c)};
  }

  __device__ raw_pair<T, Width> fetch(index_t i) const { return load_pair<Width>(m.x, dy, mask, i); }

  __device__ void run(index_t i, bool inside, const raw_pair<T, Width>& pair, const channel_values& v) const {
    if (!inside) return;
    const row_values<T, Width> x = widen(pair.x), g = masked(pair);
    lanes<A, Width> values;
    for (int k = 0; k < Width; ++k) {
      values[k] = v.scale[k] * g[k] + ((x[k] - v.mean[k]) * v.slope[k] + v.shift[k]);
    }
    store_row(dx + i, values);
  }
};

template <class T>
void norm_input_gradient(cudaStream_t stream, const norm_matrix<T>& m, const T* dy, const std::uint32_t* mask,
                         const accumulate_t<T>* coefficients, T* dx) {
  if (norm_by_vectors<T>(m.channels, m.x, dy, dx)) {
    const norm_input_task<T, vector_width<T>> task{m, dy, mask, coefficients, dx};
    return channel_pass(stream, task, m.rows, m.channels);
  }
  const norm_input_task<T, 1> task{m, dy, mask, coefficients, dx};
  channel_pass(stream, task, m.rows, m.channels);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                            \
  template void norm_use_batch<T>(cudaStream_t, const T*, index_t, index_t, double*, const norm_batch_use&); \
  template void norm_apply<T>(cudaStream_t, const norm_matrix<T>&, const accumulate_t<T>*,                   \
                              const norm_tail<T>&, T*);                                                      \
  template void norm_gradient_sums<T>(cudaStream_t, const norm_matrix<T>&, const T*, const std::uint32_t*,   \
                                      double*, const norm_parameter_gradients&, accumulate_t<T>*);           \
  template void norm_input_gradient<T>(cudaStream_t, const norm_matrix<T>&, const T*, const std::uint32_t*,  \
                                       const accumulate_t<T>*, T*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE
template void norm_use_running<float>(cudaStream_t, const float*, const float*, index_t, double, float*);

PUFFERFISH_KERNELS_END
