// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: merges the moments (moment_total) or the gradient sums (gradient_total) of parts of a matrix, in
/// the kernel that computes the matrix. Each thread block saves those of its part. The last block of a group
/// of parts merges the group, and the last block of all groups merges the groups.

#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/reduce/last_block.cuh>
#include <pufferfish/gpu/kernels/reduce/moment_parts.hpp>

PUFFERFISH_KERNELS_BEGIN

/// Number, mean and sum of squared deviations of the values of a column, merged from the parts of its rows.
/// Sums are of distances from the mean of the first part, so that a large mean does not cancel digits, and
/// merging needs no division.
struct moment_total {
  double count, shift, distances, squares;

  /// Starts without values. first_part: quantities of the first part, or nullptr without parts.
  __device__ void start(const double* first_part) {
    shift = first_part == nullptr ? 0.0 : *first_part;
    count = distances = squares = 0.0;
  }
  /// Loads the mean and the squared deviations of a part of `rows` rows.
  __device__ void load(const double* values, index_t stride, index_t rows) {
    count = static_cast<double>(rows);
    distances = values[0];
    squares = values[stride];
  }
  /// Adds a part that load() has read.
  __device__ void add(const moment_total& part) {
    const double distance = part.distances - shift;
    count += part.count;
    distances += part.count * distance;
    squares += part.squares + part.count * distance * distance;
  }
  /// Adds `values` values with these sums of distances from `near`, and of their squares.
  __device__ void add_distances(float values, float near, float sum, float sum_of_squares) {
    const double apart = static_cast<double>(near) - shift, of = static_cast<double>(values);
    count += of;
    distances += static_cast<double>(sum) + of * apart;
    squares += static_cast<double>(sum_of_squares) + apart * (2.0 * static_cast<double>(sum) + of * apart);
  }
  /// Adds the values of a total that has had the same start.
  __device__ void merge(const moment_total& other) {
    count += other.count;
    distances += other.distances;
    squares += other.squares;
  }
  /// Stores what load() reads, of at least one value.
  __device__ void save(int, double* values, index_t stride) const {
    values[0] = mean();
    values[stride] = squared_deviations();
  }
  /// Stores four floats for unpack(), of at least one value. One float would round a large mean too coarsely.
  __device__ void pack(float* to, index_t stride) const {
    const float rounded = static_cast<float>(mean());
    to[0] = static_cast<float>(count);
    to[stride] = rounded;
    to[2 * stride] = static_cast<float>(mean() - static_cast<double>(rounded));
    to[3 * stride] = static_cast<float>(squared_deviations());
  }
  /// What pack() has stored, as an argument of add().
  __device__ static moment_total unpack(const float* from, index_t stride) {
    return {static_cast<double>(from[0]), 0.0,
            static_cast<double>(from[stride]) + static_cast<double>(from[2 * stride]),
            static_cast<double>(from[3 * stride])};
  }
  /// Mean of all values; 0 without values.
  __device__ double mean() const { return count == 0.0 ? 0.0 : shift + distances / count; }
  /// Sum of the squared deviations of all values from their mean.
  __device__ double squared_deviations() const {
    const double rest = squares - distances * distances / count;
    return rest < 0.0 ? 0.0 : rest;
  }
};

/// Two sums over a part of the rows of a column: of g and of g (x - mean) (gradient_sum_input).
struct gradient_total {
  double distances, weighted;

  /// As the functions of moment_total.
  __device__ void start(const double*) { distances = weighted = 0.0; }
  __device__ void add(const gradient_total& part) {
    distances += part.distances;
    weighted += part.weighted;
  }
  __device__ void merge(const gradient_total& other) { add(other); }
  __device__ void save(int, double* values, index_t stride) const {
    values[0] = distances;
    values[stride] = weighted;
  }
  __device__ void pack(float* to, index_t stride) const {
    const float sum = static_cast<float>(distances), other = static_cast<float>(weighted);
    to[0] = sum;
    to[stride] = static_cast<float>(distances - static_cast<double>(sum));
    to[2 * stride] = other;
    to[3 * stride] = static_cast<float>(weighted - static_cast<double>(other));
  }
  __device__ static gradient_total unpack(const float* from, index_t stride) {
    return {static_cast<double>(from[0]) + static_cast<double>(from[stride]),
            static_cast<double>(from[2 * stride]) + static_cast<double>(from[3 * stride])};
  }
};

/// Where the thread blocks of a kernel save the moments, or the gradient sums, of their parts.
struct moment_store {
  moment_workspace work;
  int columns;
  int parts;  ///< number of parts
  int group;  ///< number of parts in a group

  /// Kernel argument for a matrix of `columns` columns, of which the kernel computes `parts` parts.
  static moment_store of(const moment_workspace& work, index_t parts, int columns) {
    return {work, columns, static_cast<int>(parts), static_cast<int>(moment_group(parts))};
  }
  PUFFERFISH_HOST_DEVICE bool wanted() const { return work.moments != nullptr; }

  /// Saves the total of a part, of at least one row, in one column.
  template <class Total>
  __device__ void save(int part, int column, const Total& s) const {
    s.pack(at(part, column), stride());
  }
  /// Loads what save() has saved, as an argument of Total::add.
  template <class Total>
  __device__ Total load(int part, int column) const {
    return Total::unpack(at(part, column), stride());
  }

 private:
  __device__ index_t stride() const { return static_cast<index_t>(parts) * columns; }
  __device__ float* at(int part, int column) const {
    return work.parts + static_cast<index_t>(part) * columns + column;
  }
};

/// Number of doubles of shared memory in which a block of `threads` threads merges totals of either kind.
constexpr int moment_doubles(int threads) {
  return threads * static_cast<int>(sizeof(moment_total) / sizeof(double));
}

/// Merges the parts first, first + step, .. below `end`, and calls use(column, total) in one thread for
/// each of the `width` columns from first_column on that exist. All threads of the block, a multiple of 64,
/// must call this function. `memory`: moment_doubles() doubles of shared memory; a barrier must have passed
/// since its last use.
template <class Total, class Use>
__device__ inline void merge_parts(const moment_store& store, int first, int end, int step, int first_column,
                                   int width, double* memory, Use use) {
  constexpr int across = 64;
  const int thread = block_thread(), down = block_threads() / across, share = thread / across;
  auto* const all = reinterpret_cast<Total*>(memory);
  for (int from = 0; from < width; from += across) {
    const int place = from + thread % across, column = first_column + place;
    const bool inside = place < width && column < store.columns;
    Total sum;
    const double shift = inside ? store.template load<Total>(first, column).distances : 0.0;
    sum.start(&shift);
    if (inside) {
#pragma unroll 4
      for (int part = first + share * step; part < end; part += down * step)
        sum.add(store.template load<Total>(part, column));
    }
    all[thread] = sum;
    __syncthreads();
    if (share == 0 && inside) {
      for (int other = 1; other < down; ++other) sum.merge(all[thread + other * across]);
      use(column, sum);
    }
    __syncthreads();
  }
}

/// Must be called by all threads of a block after the block has saved the total of part `part`, in the
/// `width` columns from first_column on. The last block that calls the function merges the totals of all
/// parts into the result. `tile`: number of the tile of columns, counted from 0. `memory`: as in merge_parts;
/// a barrier passes before its first use.
template <class Total = moment_total>
__device__ inline void finish_moments(const moment_store& store, int part, int tile, int first_column,
                                      int width, double* memory) {
  const int groups = ceil_div(store.parts, store.group), group = part / store.group;
  const int first = group * store.group;
  const int last = first + store.group < store.parts ? first + store.group : store.parts;
  unsigned* const counters = store.work.counters + tile * (groups + 1);
  const auto result = [&](int column, const Total& s) {
    s.save(0, store.work.moments + column, store.columns);
  };
  if (!is_last_block(counters + group, static_cast<unsigned>(last - first))) return;
  if (groups == 1) return merge_parts<Total>(store, first, last, 1, first_column, width, memory, result);
  merge_parts<Total>(store, first, last, 1, first_column, width, memory,
                     [&](int column, const Total& s) { store.save(first, column, s); });
  if (!is_last_block(counters + groups, static_cast<unsigned>(groups))) return;
  merge_parts<Total>(store, 0, store.parts, store.group, first_column, width, memory, result);
}

PUFFERFISH_KERNELS_END
