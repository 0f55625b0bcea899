// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Sums over the rows of a matrix, one result per column, in one launch and in a fixed order: a block sums
/// one part of the rows of some columns, and the last block to end adds up the parts, in two levels so that
/// no block reads many of them. The sums are in double; before that, a thread adds at most `run_rows` values
/// in float.
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
/// load(values, stride, rows of the part), add(a loaded one), merge(other), which has had the same start, and
/// save(0, values, stride), which stores quantities that load() reads.
///
/// Layout of the parts: quantity q of part p and column c is at (q parts + p) columns + c. Part p has the
/// rows part_begin(rows, parts, p) .. part_begin(rows, parts, p + 1) - 1. The sum of a group of parts
/// replaces that of its first part.

#include <pufferfish/gpu/kernels/gemm/tile_layout.cuh>
#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/reduce/block_merge.cuh>
#include <pufferfish/gpu/kernels/reduce/column_parts.hpp>
#include <pufferfish/gpu/kernels/reduce/last_block.cuh>

PUFFERFISH_KERNELS_BEGIN

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

/// Loads Width elements of T and converts them: one element, less than 16 bytes from a multiple of their
/// size, or a multiple of 16 bytes from an aligned address.
template <int Width, class T>
__device__ inline row_values<T, Width> load_row(const T* from) {
  row_values<T, Width> result;
  if constexpr (Width == 1) {
    result[0] = static_cast<accumulate_t<T>>(*from);
  } else if constexpr (Width < vector_width<T>) {
    const auto all = *reinterpret_cast<const element_run<T, Width>*>(from);
    for (int k = 0; k < Width; ++k) result[k] = static_cast<accumulate_t<T>>(all.values[k]);
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

/// Rounds Width values to T and stores them in device memory: one element, less than 16 bytes at a multiple
/// of their size, or a multiple of 16 bytes at an aligned address.
template <int Width, class T>
__device__ inline void store_row(T* to, const lanes<accumulate_t<T>, Width>& values) {
  if constexpr (Width == 1) {
    *to = static_cast<T>(values[0]);
  } else if constexpr (Width < vector_width<T>) {
    element_run<T, Width> all;
    for (int k = 0; k < Width; ++k) all.values[k] = static_cast<T>(values[k]);
    store_global(to, all);
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

/// Where the sums of the parts of a matrix of rows x columns are stored.
struct stored_parts {
  double* values;
  index_t count;  ///< number of parts
  index_t rows, columns;

  /// The first quantity of a part and a column; the next one is `stride()` doubles further.
  __device__ double* at(index_t part, index_t column) const { return values + part * columns + column; }
  __device__ index_t stride() const { return count * columns; }
  /// First row of a part, also of one after the last.
  __device__ index_t begin(index_t part) const {
    return part_begin(rows, count, part < count ? part : count);
  }
};

/// Calls use(column, state) with the sum of the parts first, first + step, .. below end, for the
/// `tile_columns` columns from first_column on. The stored sums of a part are those of the `step` parts from
/// it on. The threads of a block read the parts in turn, and the order of the sum depends on shapes alone.
/// All threads of the block must call this function; use() is called in one thread for each column. `memory`:
/// as in merge_down.
template <class State, class Use>
__device__ inline void add_parts(const stored_parts& parts, index_t first, index_t end, index_t step,
                                 index_t first_column, unsigned tile_columns, double* memory, Use use) {
  const unsigned thread = static_cast<unsigned>(block_thread()), down = column_threads / tile_columns;
  const index_t column = first_column + thread % tile_columns;
  const bool inside = column < parts.columns;
  State sum;
  sum.start(inside ? parts.at(first, column) : nullptr);
  if (inside) {
    constexpr int ahead = 4;  // loads in flight
    const index_t stride = down * step;
    for (index_t part = first + thread / tile_columns * step; part < end; part += ahead * stride) {
      State others[ahead];
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        const index_t at = part + i * stride;
        if (at < end)
          others[i].load(parts.at(at, column), parts.stride(), parts.begin(at + step) - parts.begin(at));
      }
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        if (part + i * stride < end) sum.add(others[i]);
      }
    }
  }
  merge_down(sum, memory, tile_columns, down);
  if (thread < tile_columns && inside) use(column, sum);
}

/// Sums part `part` of the rows of the columns of tile `tile`. The last block of a group of parts then adds
/// up the group, and the last block of all groups adds up the groups and calls finish(column, state) for each
/// column. One block for each pair of a tile and a part; all its threads call this function. `counters`: see
/// column_counters. Block (across, 256 / across) with `across` a power of two up to 32: thread (x, y) has the
/// columns (tile across + x) task::width .. of the part, and of its rows every (256 / across)-th one from y
/// on.
template <class State, class Task, class Finish>
__device__ inline void sum_column_part(const Task& task, const stored_parts& parts, unsigned* counters,
                                       const Finish& finish, unsigned tile, index_t part) {
  constexpr std::size_t doubles = merge_doubles<State>, task_doubles = merge_doubles<typename Task::state>;
  __shared__ double memory[doubles > task_doubles ? doubles : task_doubles];
  const index_t begin = parts.begin(part), end = parts.begin(part + 1);
  const unsigned across = blockDim.x, tile_columns = across * static_cast<unsigned>(Task::width);
  const index_t first_column = static_cast<index_t>(tile) * tile_columns;
  const index_t column = first_column + static_cast<index_t>(threadIdx.x) * Task::width;
  typename Task::state sum;
  sum.clear();
  if (column < parts.columns) task.add(column, begin + threadIdx.y, end, blockDim.y, sum);
  merge_down(sum, memory, across, blockDim.y);
  if (threadIdx.y == 0 && column < parts.columns) {
    if constexpr (requires { &Task::finish; }) task.finish(column, begin, end, sum);
    for (int k = 0; k < Task::width; ++k) sum.save(k, parts.at(part, column + k), parts.stride());
  }

  const index_t group = part / grouped_parts, groups = ceil_div(parts.count, grouped_parts);
  const index_t first = group * grouped_parts;
  const index_t last = first + grouped_parts < parts.count ? first + grouped_parts : parts.count;
  unsigned* const own = counters + tile * (groups + 1);
  if (parts.count == 1) {
    __syncthreads();
  } else if (!is_last_block(own + group, static_cast<unsigned>(last - first))) {
    return;
  }
  if (groups == 1) {
    return add_parts<State>(parts, first, last, 1, first_column, tile_columns, memory, finish);
  }
  add_parts<State>(parts, first, last, 1, first_column, tile_columns, memory,
                   [&](index_t at, const State& s) { s.save(0, parts.at(first, at), parts.stride()); });
  if (!is_last_block(own + groups, static_cast<unsigned>(groups))) return;
  add_parts<State>(parts, 0, parts.count, grouped_parts, first_column, tile_columns, memory, finish);
}

/// Grid: (tiles of columns, parts), each block as in sum_column_part.
template <class State, class Task, class Finish>
static __global__ void __launch_bounds__(column_threads, Task::width > 4 ? 2 : 3)
    column_sums_kernel(grid_dependency earlier, Task task, stored_parts parts, unsigned* counters,
                       Finish finish) {
  earlier.wait();
  sum_column_part<State>(task, parts, counters, finish, blockIdx.x, blockIdx.y);
}

/// The blocks of sums of columns: `tiles` x parts blocks of `threads`.
struct column_grid {
  unsigned tiles;
  dim3 threads;
  stored_parts parts;
  column_grid(int width, index_t rows, index_t columns, const column_workspace& work)
      : parts{work.parts, row_parts(rows, columns), rows, columns} {
    const index_t units = ceil_div(columns, width);
    unsigned across = 1;
    while (across < 32 && across < units) across *= 2;
    tiles = static_cast<unsigned>(ceil_div(units, across));
    threads = dim3(across, column_threads / across);
  }
};

/// Sums all columns in one launch. Without rows, finish is called with cleared states. The number of columns
/// must be a multiple of task::width, and the data aligned as the task's loads require.
template <class State, class Task, class Finish>
void sum_columns(const launch_site& stream, const Task& task, index_t rows, index_t columns,
                 const column_workspace& work, const Finish& finish) {
  const column_grid blocks(Task::width, rows, columns, work);
  launch(stream, {dim3(blocks.tiles, static_cast<unsigned>(blocks.parts.count)), blocks.threads},
         column_sums_kernel<State, Task, Finish>, task, blocks.parts, work.counters, finish);
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
