// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Sums over the rows of a matrix, one result per column, in two steps of fixed order: a block sums one part
/// of the rows of some columns, then one kernel adds up the parts. The sums are in double; before that, a
/// thread adds at most `run_rows` values in float.
///
/// A `task` defines the numbers that are summed:
///   task::width                            columns a thread reads at once
///   task::state                            the sums of a thread, without constructors: clear(), merge(other)
///   task.add(column, row, end, step, s)    adds rows row, row + step, .. below end of its columns to s; the
///                                          part begins at row - threadIdx.y
///   task.finish(column, begin, end, s)     if there is such a member: changes the sums of a part, which has
///                                          the rows begin .. end - 1, into the quantities that are saved
///   state::save(k, values, stride)         the quantities of one column, `stride` doubles apart
/// A `State` merges the quantities of one column from all parts: start(of part 0, or nullptr without parts),
/// load(values, stride, rows of the part), add(a loaded one), merge(other), which has had the same start.
///
/// Layout of `scratch`: quantity q of part p and column c is at (q parts + p) columns + c. Part p has the
/// rows part_begin(rows, parts, p) .. part_begin(rows, parts, p + 1) - 1.

#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/reduce/column_parts.hpp>

PUFFERFISH_KERNELS_BEGIN

inline constexpr unsigned column_threads = 256;
inline constexpr int run_rows = 16;

/// Values of Width neighbouring columns in the type of computation, indexed by the position among these
/// columns.
template <class A, int Width>
struct lanes {
  A values[static_cast<std::size_t>(Width)];
  __device__ A& operator[](int k) { return values[k]; }
  __device__ const A& operator[](int k) const { return values[k]; }
};
/// The values of Width neighbouring elements of type T.
template <class T, int Width>
using row_values = lanes<accumulate_t<T>, Width>;

/// Loads Width elements of T and converts them: one element, or a multiple of 16 bytes from an aligned
/// address.
template <int Width, class T>
__device__ inline row_values<T, Width> load_row(const T* from) {
  row_values<T, Width> result;
  if constexpr (Width == 1) {
    result[0] = static_cast<accumulate_t<T>>(*from);
  } else {
    static_assert(Width % vector_width<T> == 0);
    for (int first = 0; first < Width; first += vector_width<T>) {
      const vector<T> all = load_vector(from + first);
      for (int k = 0; k < vector_width<T>; ++k) result[first + k] = static_cast<accumulate_t<T>>(all[k]);
    }
  }
  return result;
}

/// 16 bytes or one element of a row as they are in memory: half the registers of row_values while a load is
/// in flight.
template <class T, int Width>
struct raw_row {
  static constexpr int vectors = Width == 1 ? 1 : Width / vector_width<T>;
  static_assert(Width == 1 || Width % vector_width<T> == 0);
  using part = std::conditional_t<Width == 1, T, vector<T>>;
  part parts[static_cast<std::size_t>(vectors)];
};
/// Loads Width elements of T without converting them.
template <int Width, class T>
__device__ inline raw_row<T, Width> load_raw(const T* from) {
  raw_row<T, Width> result;
  if constexpr (Width == 1) {
    result.parts[0] = *from;
  } else {
    for (int i = 0; i < result.vectors; ++i) result.parts[i] = load_vector(from + i * vector_width<T>);
  }
  return result;
}
/// Converts loaded elements to the type of computation.
template <class T, int Width>
__device__ inline row_values<T, Width> widen(const raw_row<T, Width>& raw) {
  row_values<T, Width> result;
  if constexpr (Width == 1) {
    result[0] = static_cast<accumulate_t<T>>(raw.parts[0]);
  } else {
    for (int k = 0; k < Width; ++k) {
      result[k] = static_cast<accumulate_t<T>>(raw.parts[k / vector_width<T>][k % vector_width<T>]);
    }
  }
  return result;
}

/// Loads the numbers of `Width` neighbouring channels, by 16 bytes where the address allows it.
template <int Width, class A>
__device__ inline lanes<A, Width> load_channels(const A* from) {
  lanes<A, Width> result;
  if constexpr (Width % vector_width<A> == 0) {
    if (aligned16(from)) {
#pragma unroll
      for (int first = 0; first < Width; first += vector_width<A>) {
        const vector<A> all = load_vector(from + first);
        for (int k = 0; k < vector_width<A>; ++k) result[first + k] = all[k];
      }
      return result;
    }
  }
  for (int k = 0; k < Width; ++k) result[k] = from[k];
  return result;
}

/// Calls use(load(row)) for rows row, row + step, .. below end, at most run_rows of them, with two to eight
/// loads in flight. Advances `row`; returns the number of rows.
template <class Load, class Use>
__device__ inline int for_run(index_t& row, index_t end, index_t step, Load load, Use use) {
  constexpr int ahead = sizeof(load(row)) > 40 ? 2 : sizeof(load(row)) > 16 ? 4 : 8;
  int count = 0;
  for (; count < run_rows && row + (ahead - 1) * step < end; count += ahead, row += ahead * step) {
    decltype(load(row)) values[static_cast<std::size_t>(ahead)];
#pragma unroll
    for (int i = 0; i < ahead; ++i) values[i] = load(row + i * step);
#pragma unroll
    for (int i = 0; i < ahead; ++i) use(values[i]);
  }
  for (; count < run_rows && row < end; ++count, row += step) use(load(row));
  return count;
}

/// Rounds Width values to T and stores them: one element, or a multiple of 16 bytes to an aligned address in
/// device memory.
template <int Width, class T>
__device__ inline void store_row(T* to, const lanes<accumulate_t<T>, Width>& values) {
  if constexpr (Width == 1) {
    *to = static_cast<T>(values[0]);
  } else {
    static_assert(Width % vector_width<T> == 0);
    for (int first = 0; first < Width; first += vector_width<T>) {
      vector<T> all;
      for (int k = 0; k < vector_width<T>; ++k) all[k] = static_cast<T>(values[first + k]);
      store_global(to + first, all);
    }
  }
}

/// Sums of `Quantities` numbers in each of `Width` columns.
template <int Quantities, int Width>
struct column_sum_state {
  lanes<double, Width> sums[static_cast<std::size_t>(Quantities)];

  __device__ void clear() {
    for (int q = 0; q < Quantities; ++q) sums[q] = {};
  }
  __device__ void merge(const column_sum_state& other) {
    for (int q = 0; q < Quantities; ++q) {
      for (int k = 0; k < Width; ++k) sums[q][k] += other.sums[q][k];
    }
  }
  __device__ void save(int k, double* values, index_t stride) const {
    for (int q = 0; q < Quantities; ++q) values[q * stride] = sums[q][k];
  }
  __device__ void start(const double*) { clear(); }
  __device__ void add(const column_sum_state& part) { merge(part); }
  /// Loads the sums of a part of `rows` rows, for states of one column.
  __device__ void load(const double* values, index_t stride, index_t) {
    for (int q = 0; q < Quantities; ++q) sums[q][0] = values[q * stride];
  }
};

/// Adds to `s` what use(load(row), run) adds to the `Quantities` sums of a run of up to run_rows rows, for
/// the rows row, row + step, .. below end. Sums of a run are in the type of computation of T, those of all
/// runs in double.
template <class T, int Quantities, int Width, class Load, class Use>
__device__ inline void add_runs(index_t row, index_t end, index_t step,
                                column_sum_state<Quantities, Width>& s, Load load, Use use) {
  while (row < end) {
    row_values<T, Width> run[static_cast<std::size_t>(Quantities)] = {};
    for_run(row, end, step, load, [&](const auto& values) { use(values, run); });
    for (int q = 0; q < Quantities; ++q) {
      for (int k = 0; k < Width; ++k) s.sums[q][k] += static_cast<double>(run[q][k]);
    }
  }
}

/// A state with an odd number of doubles, so that neighbouring threads use different banks of shared memory.
template <class State>
struct gapped : State {
  double gap;
};
/// A state as it is stored in shared memory, an odd number of doubles long.
template <class State>
using apart = std::conditional_t<(sizeof(State) / sizeof(double)) % 2 == 0, gapped<State>, State>;

/// Merges the states of the threads of a block that have the same threadIdx.x. The thread with threadIdx.y =
/// 0 has the result. blockDim.y must be a power of 2, and all threads of the block must call this function.
/// Halves are merged until one state is left, so the order depends on blockDim alone. Threads: number of
/// threads of the block.
template <unsigned Threads, class State>
__device__ inline void merge_down(State& state) {
  __shared__ apart<State> all[Threads];
  const unsigned own = threadIdx.y * blockDim.x + threadIdx.x;
  static_cast<State&>(all[own]) = state;
  for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) all[own].merge(all[own + half * blockDim.x]);
  }
  state = all[own];
}

/// First step of sum_columns. Grid: (tiles of columns, parts); block: (columns in units of task::width,
/// rows).
template <class Task>
static __global__ void __launch_bounds__(column_threads, Task::width > 4 ? 2 : 3)
    /// Block (across, 256 / across) with `across` a power of two up to 32: thread (x, y) of block (bx, p) has
    /// the columns (bx across + x) task::width .. of part p, and of its rows every (256 / across)-th one from
    /// y on.
    column_parts_kernel(grid_dependency earlier, Task task, index_t rows, index_t columns, double* parts) {
  earlier.wait();
  const index_t part = blockIdx.y, count = gridDim.y;
  const index_t column =
      (static_cast<index_t>(blockIdx.x) * static_cast<index_t>(blockDim.x) + threadIdx.x) * Task::width;
  typename Task::state sum;
  sum.clear();
  if (column < columns) {
    task.add(column, part_begin(rows, count, part) + threadIdx.y, part_begin(rows, count, part + 1),
             blockDim.y, sum);
  }
  merge_down<column_threads>(sum);
  if (threadIdx.y > 0 || column >= columns) return;
  if constexpr (requires { &Task::finish; }) {
    task.finish(column, part_begin(rows, count, part), part_begin(rows, count, part + 1), sum);
  }
  for (int k = 0; k < Task::width; ++k) sum.save(k, parts + part * columns + column + k, count * columns);
}

inline constexpr unsigned total_columns = 16;
inline constexpr unsigned total_rows = 32;

/// Second step of sum_columns: calls finish(column, state of one column). Grid: columns / 16; block: (16,
/// 32). Thread (x, y) merges the parts y, y + 32, ... of column 16 blockIdx.x + x.
template <class State, class Finish>
static __global__ void column_totals_kernel(grid_dependency earlier, const double* parts, index_t count,
                                            index_t rows, index_t columns, Finish finish) {
  earlier.wait();
  const index_t column = static_cast<index_t>(blockIdx.x) * total_columns + threadIdx.x;
  State sum;
  sum.start(count > 0 && column < columns ? parts + column : nullptr);
  if (column < columns) {
    constexpr unsigned ahead = 4;  // loads in flight
    for (index_t first = threadIdx.y; first < count; first += ahead * total_rows) {
      State others[ahead];
#pragma unroll
      for (unsigned i = 0; i < ahead; ++i) {
        const index_t part = first + i * total_rows;
        if (part >= count) continue;
        others[i].load(parts + part * columns + column, count * columns,
                       part_begin(rows, count, part + 1) - part_begin(rows, count, part));
      }
#pragma unroll
      for (unsigned i = 0; i < ahead; ++i) {
        if (first + i * total_rows < count) sum.add(others[i]);
      }
    }
  }
  merge_down<total_columns * total_rows>(sum);
  if (threadIdx.y == 0 && column < columns) finish(column, sum);
}

/// Runs both steps for all columns. `scratch`: column_scratch doubles. Without rows, finish is called with
/// cleared states. The number of columns must be a multiple of task::width, and the data aligned as the
/// task's loads require.
template <class State, class Task, class Finish>
void sum_columns(const launch_site& stream, const Task& task, index_t rows, index_t columns, double* scratch,
                 const Finish& finish) {
  const index_t parts = row_parts(rows, columns), units = ceil_div(columns, Task::width);
  unsigned across = 1;
  while (across < 32 && across < units) across *= 2;
  const unsigned down = column_threads / across;
  launch(stream,
         {dim3(static_cast<unsigned>(ceil_div(units, across)), static_cast<unsigned>(parts)),
          dim3(across, down)},
         column_parts_kernel<Task>, task, rows, columns, scratch);
  launch(stream, {static_cast<unsigned>(ceil_div(columns, total_columns)), dim3(total_columns, total_rows)},
         column_totals_kernel<State, Finish>, scratch, parts, rows, columns, finish);
}

// ---------------------------------------------------------------------------------------------------------
// Plain sums

/// gradient = sum, or gradient += sum with `add`, rounded once.
template <class T>
__device__ inline void store_sum(double sum, bool add, T& gradient) {
  gradient = static_cast<T>(add ? static_cast<double>(gradient) + sum : sum);
}

/// A task of sum_columns: the sums of the columns of x. Width > 1 requires an address and a row stride of
/// whole vectors.
template <class T, int Width>
struct column_sum_task {
  static constexpr int width = Width;
  using state = column_sum_state<1, Width>;

  const T* x;
  index_t row_stride;

  __device__ void add(index_t column, index_t row, index_t end, index_t step, state& s) const {
    add_runs<T>(
        row, end, step, s, [&](index_t at) { return load_raw<Width>(x + at * row_stride + column); },
        [](const raw_row<T, Width>& raw, auto& run) {
          const row_values<T, Width> values = widen(raw);
          for (int k = 0; k < Width; ++k) run[0][k] += values[k];
        });
  }
};

PUFFERFISH_KERNELS_END
