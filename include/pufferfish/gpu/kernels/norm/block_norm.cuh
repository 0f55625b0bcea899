// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Batch normalization of few rows in one launch. A thread block has eight channels of all rows, and each of
/// its threads has some of the rows. Statistics and normalization therefore need neither a pass over partial
/// results nor a second launch, and small batch norms spend most of their time on launches.

#include <cstddef>
#include <cstdint>

#include <pufferfish/gpu/kernels/norm/batch_norm.cuh>
#include <pufferfish/gpu/kernels/norm/batch_norm_gradient.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Number of channels of a thread block, whose bits in a mask are one byte, and the largest number of threads
/// of a block.
inline constexpr int block_norm_channels = 8, block_norm_threads = 512;
/// Largest number of rows of a thread: eight channels of these rows fill 64 registers.
template <class T>
inline constexpr int block_norm_rows = sizeof(T) == 2 ? 16 : 8;

/// Shared memory of a thread block.
struct block_norm_memory {
  double parts[8][warp_threads];  ///< [k][w]: sum of number k over the threads of warp w
  double first[8];                ///< results of the first of two calls of sum_over_block
  float numbers[3][8];            ///< three coefficients of each channel, read by all threads
};

/// Sums each of eight numbers over the threads of a block, in double and in a fixed order, and calls
/// finish(k, sum) for k = 0 .. 7, each in one thread. All threads of the block must call this function, and
/// the block must consist of whole warps. It ends with a barrier, after which all threads can read what
/// finish() has written to shared memory.
template <class F>
__device__ inline void sum_over_block(const lanes<float, 8>& own, block_norm_memory& memory, F finish) {
  const int thread = block_thread(), lane = thread % warp_threads, warp = thread / warp_threads;
  const int warps = block_threads() / warp_threads;
  lanes<double, 8> values;
#pragma unroll
  for (int k = 0; k < 8; ++k) values[k] = static_cast<double>(own[k]);
    // In each of three steps, a lane sends half of its numbers to another lane, and adds the numbers that it
    // receives to the other half. Lane l then has a partial sum of number l / 4.
#pragma unroll
  for (int kept = 4; kept > 0; kept /= 2) {
    const bool upper = (lane & (4 * kept)) != 0;
#pragma unroll
    for (int i = 0; i < kept; ++i) {
      const double sent = upper ? values[i] : values[i + kept];
      values[i] = (upper ? values[i + kept] : values[i]) + __shfl_xor_sync(all_lanes, sent, 4 * kept);
    }
  }
  values[0] += __shfl_xor_sync(all_lanes, values[0], 2);
  values[0] += __shfl_xor_sync(all_lanes, values[0], 1);
  if (lane % 4 == 0) memory.parts[lane / 4][warp] = values[0];
  __syncthreads();
  for (int number = warp; number < 8; number += warps) {
    const double sum = warp_sum(lane < warps ? memory.parts[number][lane] : 0.0);
    if (lane == 0) finish(number, sum);
  }
  __syncthreads();
}

/// The rows of the calling thread t: t, t + threads, t + 2 threads, ..., in the eight channels of its block
/// from `channel` on.
struct block_rows {
  index_t rows, channels, channel;

  /// For a matrix of row_count x channel_count elements.
  __device__ block_rows(index_t row_count, index_t channel_count)
      : rows(row_count),
        channels(channel_count),
        channel(static_cast<index_t>(blockIdx.x) * block_norm_channels) {}
  /// Index of the thread's i-th row.
  __device__ index_t row(int i) const { return threadIdx.x + static_cast<index_t>(i) * blockDim.x; }
  /// Whether the matrix has the thread's i-th row.
  __device__ bool exists(int i) const { return row(i) < rows; }
  /// Index of the first of the eight elements of the thread's i-th row.
  __device__ index_t place(int i) const { return row(i) * channels + channel; }
};

/// Computes the statistics of a batch, and normalizes it (formulas: batch_norm.hpp). Grid: block b has the
/// channels 8 b .. 8 b + 7. Its thread t has the rows t, t + threads, ..., at most `Rows` of them, which stay
/// in registers. A thread sums differences from the first row for the mean, then squared differences from the
/// mean for the variance, so that a large mean causes no cancellation.
template <class T, int Rows>
static __global__ void __launch_bounds__(block_norm_threads)
    block_norm_forward_kernel(grid_dependency earlier, norm_matrix<T> m, norm_batch_use use,
                              const accumulate_t<T>* bias, norm_tail<T> tail, T* y) {
  earlier.wait();
  constexpr int width = block_norm_channels;
  using A = accumulate_t<T>;
  __shared__ block_norm_memory memory;
  const block_rows own(m.rows, m.channels);
  raw_row<T, width> rows[static_cast<std::size_t>(Rows)] = {};
#pragma unroll
  for (int i = 0; i < Rows; ++i) {
    if (own.exists(i)) rows[i] = load_raw<width>(m.x + own.place(i));
  }
  const row_values<T, width> start = load_row<width>(m.x + own.channel);
  const double count = static_cast<double>(m.rows);
  lanes<A, width> sums{};
#pragma unroll
  for (int i = 0; i < Rows; ++i) {
    if (!own.exists(i)) continue;
    const row_values<T, width> x = widen(rows[i]);
#pragma unroll
    for (int k = 0; k < width; ++k) sums[k] += x[k] - start[k];
  }
  sum_over_block(sums, memory, [&](int k, double sum) {
    const double mean = static_cast<double>(m.x[own.channel + k]) + sum / count;
    memory.first[k] = mean;
    memory.numbers[0][k] = static_cast<A>(mean);
  });

  const lanes<A, width> mean = load_channels<width>(memory.numbers[0]);
  lanes<A, width> squares{};
#pragma unroll
  for (int i = 0; i < Rows; ++i) {
    if (!own.exists(i)) continue;
    const row_values<T, width> x = widen(rows[i]);
#pragma unroll
    for (int k = 0; k < width; ++k) squares[k] += (x[k] - mean[k]) * (x[k] - mean[k]);
  }
  sum_over_block(squares, memory, [&](int k, double sum) {
    const double off = memory.first[k] - static_cast<double>(memory.numbers[0][k]);
    const double rest = sum - count * off * off;  // squared deviations from the mean in double
    const index_t c = own.channel + k;
    norm_batch_finish{use, m.channels}.store(c, memory.first[k], rest < 0.0 ? 0.0 : rest, count);
    memory.numbers[1][k] = use.statistics[m.channels + c] * m.weight[c];
    memory.numbers[2][k] = bias[c];
  });

  const lanes<A, width> scale = load_channels<width>(memory.numbers[1]);
  const lanes<A, width> shift = load_channels<width>(memory.numbers[2]);
#pragma unroll
  for (int i = 0; i < Rows; ++i) {
    if (!own.exists(i)) continue;
    const index_t at = own.place(i);
    const row_values<T, width> x = widen(rows[i]);
    lanes<A, width> values;
#pragma unroll
    for (int k = 0; k < width; ++k) values[k] = (x[k] - mean[k]) * scale[k] + shift[k];
    if (tail.addend != nullptr) {
      const row_values<T, width> other = load_row<width>(tail.addend + at);
#pragma unroll
      for (int k = 0; k < width; ++k) values[k] += other[k];
    }
    if (tail.relu) {
      const std::uint32_t bits = rectify(values);
      if (tail.mask != nullptr) {
        reinterpret_cast<std::uint8_t*>(tail.mask)[at / 8] = static_cast<std::uint8_t>(bits);
      }
    }
    store_row(y + at, values);
  }
}

/// Computes the gradients of weight and bias and, unless dx is null, of x (formulas: norm_sum_finish and
/// norm_input_task in batch_norm_gradient.cuh). Grid: as block_norm_forward_kernel. If `Rows` is at most half
/// of block_norm_rows, x and dy stay in registers between the sums and the gradient of x; otherwise they are
/// read twice.
template <class T, int Rows>
static __global__ void __launch_bounds__(block_norm_threads)
    block_norm_backward_kernel(grid_dependency earlier, norm_matrix<T> m, const T* dy,
                               const std::uint32_t* mask, norm_parameter_gradients gradients, T* dx,
                               T* addend_gradient) {
  earlier.wait();
  constexpr int width = block_norm_channels;
  constexpr bool keeps = Rows <= block_norm_rows<T> / 2;
  using A = accumulate_t<T>;
  __shared__ block_norm_memory memory;
  const block_rows own(m.rows, m.channels);
  const auto load = [&](int i) { return load_pair<width>(m.x, dy, mask, own.place(i)); };
  raw_pair<T, width> kept[static_cast<std::size_t>(keeps ? Rows : 1)] = {};
  if constexpr (keeps) {
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      if (own.exists(i)) kept[i] = load(i);
    }
  }
  const lanes<A, width> mean = load_channels<width>(m.mean + own.channel);
  lanes<A, width> biases{}, weights{};
#pragma unroll
  for (int i = 0; i < Rows; ++i) {
    if (!own.exists(i)) continue;
    const raw_pair<T, width> pair = keeps ? kept[keeps ? i : 0] : load(i);
    const row_values<T, width> x = widen(pair.x), g = masked(pair);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      biases[k] += g[k];
      weights[k] += g[k] * (x[k] - mean[k]);
    }
  }
  sum_over_block(biases, memory, [&](int k, double sum) { memory.first[k] = sum; });
  sum_over_block(weights, memory, [&](int k, double sum) {
    const norm_sum_finish<T> finish{m, gradients, nullptr};
    const auto of = finish.coefficients_of(own.channel + k, memory.first[k], sum);
    finish.store(own.channel + k, memory.first[k], sum);
    memory.numbers[0][k] = of.scale;
    memory.numbers[1][k] = of.slope;
    memory.numbers[2][k] = of.shift;
  });
  if (dx == nullptr) return;
  const lanes<A, width> scale = load_channels<width>(memory.numbers[0]);
  const lanes<A, width> slope = load_channels<width>(memory.numbers[1]);
  const lanes<A, width> shift = load_channels<width>(memory.numbers[2]);
#pragma unroll
  for (int i = 0; i < Rows; ++i) {
    if (!own.exists(i)) continue;
    const raw_pair<T, width> pair = keeps ? kept[keeps ? i : 0] : load(i);
    const row_values<T, width> x = widen(pair.x), g = masked(pair);
    lanes<A, width> values;
#pragma unroll
    for (int k = 0; k < width; ++k) {
      values[k] = scale[k] * g[k] + ((x[k] - mean[k]) * slope[k] + shift[k]);
    }
    if (addend_gradient != nullptr) store_row(addend_gradient + own.place(i), g);
    store_row(dx + own.place(i), values);
  }
}

/// Calls f(each, threads) for a matrix of `rows` rows. `each`: the number of rows of a thread, 1, 4 or
/// block_norm_rows<T>, as an integral constant. `threads`: the number of threads of a block, whole warps.
template <class T, class F>
inline void with_block_rows(index_t rows, F f) {
  const auto call = [&](auto each) {
    const index_t threads = ceil_div(ceil_div(rows, each), warp_threads) * warp_threads;
    f(each, static_cast<unsigned>(threads));
  };
  if (rows <= block_norm_threads) return call(std::integral_constant<int, 1>());
  if (rows <= 4 * block_norm_threads) return call(std::integral_constant<int, 4>());
  call(std::integral_constant<int, block_norm_rows<T>>());
}

template <class T>
bool block_norm_fits(const norm_matrix<T>& m, const T* a, const T* b, const T* c) {
  static_assert(most_block_norm_rows<T> == block_norm_threads * block_norm_rows<T>);
  return m.rows > 0 && m.rows <= most_block_norm_rows<T> && m.channels % block_norm_channels == 0 &&
         whole_vectors<T>(m.channels, m.x, a, b, c);
}

template <class T>
void block_norm_forward(cudaStream_t stream, const norm_matrix<T>& m, const norm_batch_use& use,
                        const accumulate_t<T>* bias, const norm_tail<T>& tail, T* y) {
  const launch_site site(stream);
  with_block_rows<T>(m.rows, [&](auto rows, unsigned threads) {
    launch(site, {static_cast<unsigned>(m.channels / block_norm_channels), threads},
           block_norm_forward_kernel<T, rows>, m, use, bias, tail, y);
  });
}

template <class T>
void block_norm_backward(cudaStream_t stream, const norm_matrix<T>& m, const T* dy, const std::uint32_t* mask,
                         const norm_parameter_gradients& gradients, T* dx, T* addend_gradient) {
  const launch_site site(stream);
  with_block_rows<T>(m.rows, [&](auto rows, unsigned threads) {
    launch(site, {static_cast<unsigned>(m.channels / block_norm_channels), threads},
           block_norm_backward_kernel<T, rows>, m, dy, mask, gradients, dx, addend_gradient);
  });
}

#define PUFFERFISH_INSTANTIATE(T)                                                                           \
  template bool block_norm_fits<T>(const norm_matrix<T>&, const T*, const T*, const T*);                    \
  template void block_norm_forward<T>(cudaStream_t, const norm_matrix<T>&, const norm_batch_use&,           \
                                      const accumulate_t<T>*, const norm_tail<T>&, T*);                     \
  template void block_norm_backward<T>(cudaStream_t, const norm_matrix<T>&, const T*, const std::uint32_t*, \
                                       const norm_parameter_gradients&, T*, T*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
