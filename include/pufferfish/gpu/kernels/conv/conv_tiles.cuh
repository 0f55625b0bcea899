// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: copies tiles of matrices from device memory to shared memory, through a ring of slots.

#include <pufferfish/gpu/kernels/gemm/async_copy.cuh>
#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Copies Count elements to shared memory if `inside` is true, else writes zeros without reading `from`. The
/// copy is asynchronous, except for elements of less than 4 bytes. `Again`: see copy_async.
template <int Count, bool Again = false, class T>
__device__ inline void copy_elements(T* to, const T* from, bool inside) {
  constexpr int bytes = Count * static_cast<int>(sizeof(T));
  if constexpr (bytes == 4 || bytes == 8 || bytes == 16) {
    copy_async<bytes, Again>(to, from, inside);
  } else {
    static_assert(Count == 1);
    *to = inside ? *from : T{};
  }
}

/// Runs load(slot, step) for the steps first .. last - 1 and, Slots - 1 steps later, use(slot, step). The
/// slots are a ring in shared memory that is filled in the background. All threads of the block take part.
/// `load` starts asynchronous copies to the slot and must not wait for them; `use` may read the slot until it
/// returns. At the end all copies have arrived and a barrier has passed, so that the memory may be used for
/// something else. Slots must be at least 2.
///
///     pipeline<3>(
///         0, steps, [&](int slot, int step) { rows.copy(tiles + slot * size, step * depth); },
///         [&](int slot, int) { sums.multiply<depth, stride, stride>(tiles + slot * size, right); });
template <int Slots, class Load, class Use>
__device__ inline void pipeline(int first, int last, Load load, Use use) {
  int next = first;
#pragma unroll
  for (int slot = 0; slot < Slots - 1; ++slot, ++next) {
    if (next < last) load(slot, next);
    commit_copies();
  }
  int free_slot = Slots - 1, full_slot = 0;
  for (int step = first; step < last; ++step, ++next) {
    wait_for_copies<Slots - 2>();
    __syncthreads();  // this step's tiles have arrived, and all threads are done with the step before
    if (next < last) load(free_slot, next);
    commit_copies();
    use(full_slot, step);
    free_slot = full_slot;
    full_slot = full_slot + 1 == Slots ? 0 : full_slot + 1;
  }
  wait_for_copies<0>();
  __syncthreads();
}

/// Number of rows or columns from `first` on, at most `most`: min(size - first, most), which may be negative.
__device__ inline int remaining(index_t size, index_t first, int most) {
  const index_t rest = size - first;
  return rest < most ? static_cast<int>(rest) : most;
}

/// Calls copy(at) for at = thread, thread + Threads, ... below Count. The loop is not unrolled for copies of
/// single elements: only unaligned matrices need them, and unrolled code would take registers from the other
/// copies.
template <int Count, int Threads, bool Unrolled, class F>
__device__ inline void for_own(int thread, F copy) {
  if constexpr (Unrolled) {
#pragma unroll
    for (int i = 0; i < ceil_div(Count, Threads); ++i) {
      const int at = thread + i * Threads;
      if (Count % Threads == 0 || at < Count) copy(at);
    }
  } else {
#pragma unroll 1
    for (int at = thread; at < Count; at += Threads) copy(at);
  }
}

/// Copies a tile of a matrix to shared memory: `Rows` rows of `Length` elements, of which `rows` x `length`
/// exist; the others become zeros. Element (row, column) of the tile is stored at row Stride + column.
/// `matrix` is the tile's first element, and row_step the row stride of the matrix, in elements; the tile is
/// within 2^31 elements. `in_vectors`: addresses, row stride and lengths are multiples of 16 bytes. Threads:
/// number of threads that call this function, numbered by `thread`.
template <int Rows, int Length, int Stride, int Threads, class T>
__device__ inline void copy_tile(T* tile, const T* matrix, int row_step, int rows, int length,
                                 bool in_vectors, int thread) {
  const auto copy = [&](auto count) {
    constexpr int run = decltype(count)::value, runs = Length / run;
    for_own<Rows * runs, Threads, (run > 1)>(thread, [&](int at) {
      const int row = at / runs, column = at % runs * run;
      copy_elements<run>(tile + row * Stride + column, matrix + (row * row_step + column),
                         row < rows && column < length);
    });
  };
  if (in_vectors) {
    copy(std::integral_constant<int, vector_width<T>>());
  } else {
    copy(std::integral_constant<int, 1>());
  }
}

/// Copies tiles of `Rows` rows of a matrix to shared memory, `Length` elements each, of which `length` exist;
/// elements that do not exist become zeros. Layout and `in_vectors` are those of copy_tile. The row stride
/// row_step is in elements, and less than 2^31 bytes.
template <class T, int Rows, int Length, int Stride, int Threads>
class row_tiles {
 public:
  /// `matrix`: address of row 0 in the first of the columns to copy; `rows`: number of rows of the matrix;
  /// `length`: number of columns from there on.
  __device__ row_tiles(const T* matrix, int row_step, int rows, int length, bool in_vectors, int thread)
      : matrix_(matrix),
        row_step_(row_step),
        rows_(rows),
        length_(length),
        thread_(thread),
        in_vectors_(in_vectors) {}

  /// Copies the rows first .. first + Rows - 1; rows that do not exist become zeros.
  __device__ void copy(T* tile, int first) const {
    if (!in_vectors_) [[unlikely]] {
      copy_tile<Rows, Length, Stride, Threads>(tile, matrix_ + static_cast<index_t>(first) * row_step_,
                                               row_step_, rows_ - first, length_, false, thread_);
      return;
    }
    constexpr int width = vector_width<T>, runs = Length / width, rows_at_once = Threads / runs;
    static_assert(Threads % runs == 0);
    const int own = thread_ / runs, column = thread_ % runs * width;
    const int exist = column < length_ ? rows_ : 0, row_bytes = row_step_ * static_cast<int>(sizeof(T));
    T* const to = tile + own * Stride + column;
    const char* const from = reinterpret_cast<const char*>(matrix_ + column);
#pragma unroll
    for (int i = 0; i < ceil_div(Rows, rows_at_once); ++i) {
      if (Rows % rows_at_once != 0 && own + i * rows_at_once >= Rows) break;
      const int row = first + own + i * rows_at_once;
      copy_elements<width>(to + i * rows_at_once * Stride,
                           reinterpret_cast<const T*>(from + static_cast<index_t>(row) * row_bytes),
                           row < exist);
    }
  }

  /// Moves the copied columns by `by` columns.
  __device__ void move(int by) {
    matrix_ += by;
    length_ -= by;
  }

 private:
  const T* matrix_;
  int row_step_, rows_, length_, thread_;
  bool in_vectors_;
};

PUFFERFISH_KERNELS_END
