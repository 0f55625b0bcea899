// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of lstm_steps.hpp. A time step is a product with the matrix in shared memory, the elementwise part
/// for the block's columns, whose results go to a buffer in device memory that all blocks read in the next
/// step, and a barrier of the grid. Two buffers take turns, so that one barrier a step is enough.

#include <pufferfish/gpu/kernels/grid_barrier.cuh>
#include <pufferfish/gpu/kernels/recurrent/lstm_functors.hpp>
#include <pufferfish/gpu/kernels/recurrent/resident_product.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Elements of the state that a thread computes in every step: element i of `rows` sequences x Columns
/// columns for i = thread, thread + threads, ..
template <class Product, int Columns>
struct state_elements {
  static constexpr int count = (Product::rows * Columns + Product::threads - 1) / Product::threads;
  index_t batch, hidden, first;  ///< `first`: the block's first column of the state

  /// Calls f(n, sequence, column of the block) for each element n that exists.
  template <class F>
  __device__ void for_each(F f) const {
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const int i = block_thread() + n * Product::threads, row = i / Columns, column = i % Columns;
      if (row < batch && first + column < hidden) f(n, row, column);
    }
  }
};

/// Writes `rows` rows of `depth` elements to both buffers: the first `columns` elements of `from` for the
/// first `count` rows of the first buffer, zeros elsewhere. By all threads of the grid.
template <class T>
__device__ inline void start_exchange(T* exchange, index_t rows, index_t depth, row_array<const T> from,
                                      index_t count, index_t columns) {
  for (index_t i = grid_thread(); i < 2 * rows * depth; i += grid_threads()) {
    const index_t row = i / depth, column = i % depth;
    const bool given = from.data != nullptr && row < count && column < columns;
    exchange[i] = given ? from.row(row)[column] : T(0.0F);
  }
}

/// Block bx has the columns bx Columns .. of the state.
template <class T, int RowTiles, int Columns>
static __global__ void __launch_bounds__(resident_warps* warp_threads, 1)
    lstm_forward_steps_kernel(grid_dependency earlier, lstm_steps_forward<T> work, T* exchange,
                              unsigned* counters) {
  earlier.wait();
  using product = resident_product<T, RowTiles, Columns / 2>;
  using elements = state_elements<product, Columns>;
  const index_t batch = work.batch, hidden = work.hidden, first = static_cast<index_t>(blockIdx.x) * Columns;
  const int chunks = static_cast<int>(ceil_div(hidden, resident_chunk)), depth = chunks * resident_chunk;
  T* const matrix = dynamic_shared<T>();
  auto* const sums = reinterpret_cast<float*>(matrix + chunks * (resident_chunk * product::columns));
  grid_barrier barrier(counters);
  product::store_matrix(matrix, chunks, [&](int k, int column) {
    const int gate = column / Columns, j = column % Columns;
    vector<T> run;
#pragma unroll
    for (int i = 0; i < product::run; ++i) {
      const bool inside = k + i < hidden && first + j < hidden;
      run[i] = inside ? work.weight.row(k + i)[gate * hidden + first + j] : T(0.0F);
    }
    return run;
  });
  start_exchange<T>(exchange, product::rows, depth, work.h_before, batch, hidden);

  const elements own{batch, hidden, first};
  array_of<float, elements::count> cells = {};
  array_of<T[4], elements::count> z;
  own.for_each([&](int n, int b, int j) {
    if (work.c_before.data != nullptr) cells[n] = static_cast<float>(work.c_before.row(b)[first + j]);
  });
  const auto load = [&](index_t t) {
    own.for_each([&](int n, int b, int j) {
      const T* const row = work.gates.row(t * batch + b) + first + j;
      for (int gate = 0; gate < 4; ++gate) z[n][gate] = row[gate * hidden];
    });
  };
  load(0);
  for (index_t t = 0; t < work.steps; ++t) {
    const bool multiplied = t > 0 || work.h_before.data != nullptr;
    barrier.wait();
    if (multiplied)
      product::multiply(matrix, exchange + t % 2 * (product::rows * depth), depth, chunks, sums);
    T* const next = exchange + (t + 1) % 2 * (product::rows * depth);
    own.for_each([&](int n, int b, int j) {
      const auto preactivation = [&](int gate) {
        return static_cast<float>(z[n][gate]) +
               (multiplied ? product::value(sums, b, gate * Columns + j) : 0.0F);
      };
      const lstm_step<float> step = lstm_step_forward<float>(
          {preactivation(0), preactivation(1), preactivation(2), preactivation(3)}, cells[n]);
      const index_t row = t * batch + b, column = first + j;
      T* const gates = work.gates.row(row) + column;
      gates[0] = static_cast<T>(step.gates.i);
      gates[hidden] = static_cast<T>(step.gates.f);
      gates[2 * hidden] = static_cast<T>(step.gates.g);
      gates[3 * hidden] = static_cast<T>(step.gates.o);
      const T cell = static_cast<T>(step.cell), output = static_cast<T>(step.output);
      work.cells.row(work.one_cell ? b : row)[column] = cell;
      work.output.row(row)[column] = output;
      next[b * depth + column] = output;
      cells[n] = static_cast<float>(cell);  // what a backward pass reads
    });
    if (t + 1 < work.steps) load(t + 1);
  }
  barrier.finish();
}

/// Block bx has the columns bx Columns .. of the state.
template <class T, int RowTiles, int Columns>
static __global__ void __launch_bounds__(resident_warps* warp_threads, 1)
    lstm_backward_steps_kernel(grid_dependency earlier, lstm_steps_backward<T> work, T* exchange,
                               unsigned* counters) {
  earlier.wait();
  using product = resident_product<T, RowTiles, (Columns + 7) / 8>;
  using elements = state_elements<product, Columns>;
  const index_t batch = work.batch, hidden = work.hidden, first = static_cast<index_t>(blockIdx.x) * Columns;
  const int chunks = static_cast<int>(ceil_div(4 * hidden, resident_chunk)), depth = chunks * resident_chunk;
  T* const matrix = dynamic_shared<T>();
  auto* const sums = reinterpret_cast<float*>(matrix + chunks * (resident_chunk * product::columns));
  grid_barrier barrier(counters);
  const bool vectors = aligned16(work.weight.data) && work.weight.stride % product::run == 0;
  product::store_matrix(matrix, chunks, [&](int k, int column) {
    const bool inside = column < Columns && first + column < hidden;
    const T* const from = work.weight.row(inside ? first + column : 0) + k;
    if (inside && vectors && k + product::run <= 4 * hidden) return load_vector(from);
    vector<T> run;
#pragma unroll
    for (int i = 0; i < product::run; ++i) run[i] = inside && k + i < 4 * hidden ? from[i] : T(0.0F);
    return run;
  });
  start_exchange<T>(exchange, product::rows, depth, {}, 0, 0);

  const elements own{batch, hidden, first};
  struct loaded {
    T gates[4], old, dy;
  };
  array_of<loaded, elements::count> now;
  array_of<float, elements::count> dh = {}, dc = {}, cells = {};
  const auto load = [&](index_t t) {
    own.for_each([&](int n, int b, int j) {
      const index_t row = t * batch + b, column = first + j;
      const T* const gates = work.gates.row(row) + column;
      for (int gate = 0; gate < 4; ++gate) now[n].gates[gate] = gates[gate * hidden];
      const row_array<const T> old = t == 0 ? work.c_before : work.cells;
      now[n].old = old.data == nullptr ? T(0.0F) : old.row(t == 0 ? b : row - batch)[column];
      now[n].dy = work.dy.row(row)[column];
    });
  };
  own.for_each([&](int n, int b, int j) {
    const index_t column = first + j;
    if (work.dh_after.data != nullptr) dh[n] = static_cast<float>(work.dh_after.row(b)[column]);
    if (work.dc_after.data != nullptr) dc[n] = static_cast<float>(work.dc_after.row(b)[column]);
    cells[n] = static_cast<float>(work.cells.row((work.steps - 1) * batch + b)[column]);
  });
  load(work.steps - 1);
  barrier.wait();
  for (index_t t = work.steps - 1; t >= 0; --t) {
    T* const buffer = exchange + t % 2 * (product::rows * depth);
    own.for_each([&](int n, int b, int j) {
      const loaded& from = now[n];
      const float old = static_cast<float>(from.old);
      const auto gate = [&](int k) { return static_cast<float>(from.gates[k]); };
      const lstm_step_gradient<float> gradient = lstm_step_backward<float>(
          {gate(0), gate(1), gate(2), gate(3)}, old, cells[n], static_cast<float>(from.dy) + dh[n], dc[n]);
      dc[n] = gradient.before;
      cells[n] = old;
      const T values[4] = {static_cast<T>(gradient.gates.i), static_cast<T>(gradient.gates.f),
                           static_cast<T>(gradient.gates.g), static_cast<T>(gradient.gates.o)};
      T* const gates = work.gates.row(t * batch + b) + first + j;
      for (int k = 0; k < 4; ++k) {
        gates[k * hidden] = values[k];
        buffer[b * depth + k * hidden + first + j] = values[k];
      }
    });
    if (t == 0 && work.dh_before.data == nullptr) break;
    if (t > 0) load(t - 1);
    barrier.wait();
    product::multiply(matrix, buffer, depth, chunks, sums);
    own.for_each([&](int n, int b, int j) { dh[n] = product::value(sums, b, j); });
  }
  if (work.dh_before.data != nullptr) {
    own.for_each([&](int n, int b, int j) {
      work.dh_before.row(b)[first + j] = static_cast<T>(dh[n]);
      work.dc_before.row(b)[first + j] = static_cast<T>(dc[n]);
    });
  }
  barrier.finish();
}

/// Calls start(row tiles, columns) with the numbers of the plan as integral constants.
template <class F>
void with_lstm_plan(const lstm_steps_plan& plan, F start) {
  const auto with_rows = [&](auto columns) {
    if (plan.row_tiles == 2) return start(std::integral_constant<int, 2>(), columns);
    start(std::integral_constant<int, 4>(), columns);
  };
  if (plan.columns == 4) return with_rows(std::integral_constant<int, 4>());
  if (plan.columns == 8) return with_rows(std::integral_constant<int, 8>());
  with_rows(std::integral_constant<int, 12>());
}
inline grid lstm_grid(const lstm_steps_plan& plan) {
  return {static_cast<unsigned>(plan.blocks), resident_warps * warp_threads,
          static_cast<std::size_t>(plan.shared_bytes)};
}

template <class T>
void lstm_forward_steps(cudaStream_t stream, const lstm_steps_plan& plan, const lstm_steps_forward<T>& work,
                        T* exchange, unsigned* counters) {
  if constexpr (sizeof(T) == 2) {
    const launch_site site(stream, "lstm_forward_steps");
    with_lstm_plan(plan, [&](auto rows, auto columns) {
      launch_together(site, lstm_grid(plan), lstm_forward_steps_kernel<T, rows, columns>, work, exchange,
                      counters);
    });
  }
}
template <class T>
void lstm_backward_steps(cudaStream_t stream, const lstm_steps_plan& plan, const lstm_steps_backward<T>& work,
                         T* exchange, unsigned* counters) {
  if constexpr (sizeof(T) == 2) {
    const launch_site site(stream, "lstm_backward_steps");
    with_lstm_plan(plan, [&](auto rows, auto columns) {
      launch_together(site, lstm_grid(plan), lstm_backward_steps_kernel<T, rows, columns>, work, exchange,
                      counters);
    });
  }
}

#define PUFFERFISH_INSTANTIATE(T)                                                                           \
  template void lstm_forward_steps<T>(cudaStream_t, const lstm_steps_plan&, const lstm_steps_forward<T>&,   \
                                      T*, unsigned*);                                                       \
  template void lstm_backward_steps<T>(cudaStream_t, const lstm_steps_plan&, const lstm_steps_backward<T>&, \
                                       T*, unsigned*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
