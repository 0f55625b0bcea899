// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of <pufferfish/gpu/kernels/recurrent/lstm.hpp>. The forward and the backward pass each read and
/// write memory once.
///
/// Gate k of element (b, j) of the state is at column k hidden + j of row b. Accesses have 16 or 8 bytes if
/// `hidden` and all rows are multiples of them (1500 elements of 16 bits: 8 bytes), else one element.

#include <pufferfish/gpu/kernels/copy/rows.cuh>
#include <pufferfish/gpu/kernels/recurrent/lstm.hpp>
#include <pufferfish/gpu/kernels/recurrent/lstm_functors.hpp>

PUFFERFISH_KERNELS_BEGIN

/// The four gates of `Width` neighbouring elements.
template <int Width, class T>
struct gate_values {
  row_values<T, Width> values[4];

  /// Loads the gates of the elements from `row` on.
  __device__ gate_values(const T* row, index_t hidden) {
    for (int gate = 0; gate < 4; ++gate) values[gate] = load_row<Width>(row + gate * hidden);
  }
  __device__ void store(T* row, index_t hidden) const {
    for (int gate = 0; gate < 4; ++gate) store_row<Width>(row + gate * hidden, values[gate]);
  }
  /// The four gates of element i.
  __device__ lstm_gates_of<accumulate_t<T>> at(int i) const {
    return {values[0][i], values[1][i], values[2][i], values[3][i]};
  }
  /// Sets the four gates of element i.
  __device__ void set(int i, const lstm_gates_of<accumulate_t<T>>& gates) {
    values[0][i] = gates.i;
    values[1][i] = gates.f;
    values[2][i] = gates.g;
    values[3][i] = gates.o;
  }
};

/// Width values of row b from column j on; zeros for a null matrix.
template <int Width, class T>
__device__ inline row_values<T, Width> load_or_zero(const row_array<const T>& from, index_t b, index_t j) {
  return from.data != nullptr ? load_row<Width>(from.row(b) + j) : row_values<T, Width>{};
}

/// Calls f(row, column) for the first of each `Width` columns of each row, one thread each. A batch has few
/// rows, so one block per row would leave threads idle.
template <int Width, class F>
__device__ inline void for_each_place(index_t rows, index_t columns, F f) {
  const index_t across = columns / Width;
  for (index_t i = grid_thread(); i < rows * across; i += grid_threads()) f(i / across, i % across * Width);
}
/// A grid of 64 threads a block, with `width` columns of one row per thread and step.
inline grid place_grid(index_t rows, index_t columns, int width) {
  constexpr unsigned threads = 64;
  return {dim3(blocks_for(rows * (columns / width), threads)), dim3(threads)};
}

/// Grid: place_grid. A thread has Width neighbouring columns of one row, in all four gates.
template <class T, int Width>
static __global__ void lstm_forward_kernel(grid_dependency earlier, index_t batch, index_t hidden,
                                           row_array<T> gates, row_array<const T> before, row_array<T> cell,
                                           row_array<T> output) {
  earlier.wait();
  for_each_place<Width>(batch, hidden, [&](index_t b, index_t j) {
    gate_values<Width, T> z(gates.row(b) + j, hidden);
    const row_values<T, Width> old = load_or_zero<Width>(before, b, j);
    row_values<T, Width> cells, outputs;
    for (int i = 0; i < Width; ++i) {
      const lstm_step<accumulate_t<T>> step = lstm_step_forward(z.at(i), old[i]);
      z.set(i, step.gates);
      cells[i] = step.cell;
      outputs[i] = step.output;
    }
    z.store(gates.row(b) + j, hidden);
    store_row<Width>(cell.row(b) + j, cells);
    store_row<Width>(output.row(b) + j, outputs);
  });
}

/// Grid: place_grid, as in the forward pass. Each thread reads its elements before it writes them.
template <class T, int Width>
static __global__ void lstm_backward_kernel(grid_dependency earlier, index_t batch, index_t hidden,
                                            row_array<T> gates, row_array<const T> before,
                                            row_array<const T> cell, row_array<const T> dy,
                                            row_array<const T> dh_after, row_array<const T> dc_after,
                                            row_array<T> dc_before) {
  earlier.wait();
  for_each_place<Width>(batch, hidden, [&](index_t b, index_t j) {
    gate_values<Width, T> a(gates.row(b) + j, hidden);
    const row_values<T, Width> old = load_or_zero<Width>(before, b, j),
                               cells = load_or_zero<Width>(cell, b, j), dh = load_or_zero<Width>(dy, b, j),
                               more = load_or_zero<Width>(dh_after, b, j);
    row_values<T, Width> dc = load_or_zero<Width>(dc_after, b, j);
    for (int i = 0; i < Width; ++i) {
      const lstm_step_gradient<accumulate_t<T>> gradient =
          lstm_step_backward(a.at(i), old[i], cells[i], dh[i] + more[i], dc[i]);
      a.set(i, gradient.gates);
      dc[i] = gradient.before;
    }
    a.store(gates.row(b) + j, hidden);
    store_row<Width>(dc_before.row(b) + j, dc);
  });
}

/// Calls f with the number of columns of an access, for rows of `hidden` columns: 16 or 8 bytes if the rows
/// of all matrices begin and end at multiples of them, else 1.
template <class T, class F, class... Rows>
void with_row_width(index_t hidden, F f, const Rows&... rows) {
  const auto bits_of = [](const auto& matrix) {
    const auto bytes = static_cast<std::uintptr_t>(matrix.stride) * sizeof(T);
    return matrix.data == nullptr ? std::uintptr_t{0} : reinterpret_cast<std::uintptr_t>(matrix.data) | bytes;
  };
  const std::uintptr_t bits = ((static_cast<std::uintptr_t>(hidden) * sizeof(T)) | ... | bits_of(rows));
  if (bits % 16 == 0) return f(std::integral_constant<int, vector_width<T>>());
  if (bits % 8 == 0) return f(std::integral_constant<int, vector_width<T> / 2>());
  f(std::integral_constant<int, 1>());
}

template <class T>
void lstm_forward(cudaStream_t stream, index_t batch, index_t hidden, row_array<T> gates,
                  row_array<const T> before, row_array<T> cell, row_array<T> output) {
  const launch_site site(stream, "lstm_forward");
  const auto start = [&](auto width) {
    launch(site, place_grid(batch, hidden, width), lstm_forward_kernel<T, width>, batch, hidden, gates,
           before, cell, output);
  };
  with_row_width<T>(hidden, start, gates, before, cell, output);
}

template <class T>
void lstm_backward(cudaStream_t stream, index_t batch, index_t hidden, row_array<T> gates,
                   row_array<const T> before, row_array<const T> cell, row_array<const T> dy,
                   row_array<const T> dh_after, row_array<const T> dc_after, row_array<T> dc_before) {
  const launch_site site(stream, "lstm_backward");
  const auto start = [&](auto width) {
    launch(site, place_grid(batch, hidden, width), lstm_backward_kernel<T, width>, batch, hidden, gates,
           before, cell, dy, dh_after, dc_after, dc_before);
  };
  with_row_width<T>(hidden, start, gates, before, cell, dy, dh_after, dc_after, dc_before);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                  \
  template void lstm_forward<T>(cudaStream_t, index_t, index_t, row_array<T>, row_array<const T>,  \
                                row_array<T>, row_array<T>);                                       \
  template void lstm_backward<T>(cudaStream_t, index_t, index_t, row_array<T>, row_array<const T>, \
                                 row_array<const T>, row_array<const T>, row_array<const T>,       \
                                 row_array<const T>, row_array<T>);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
