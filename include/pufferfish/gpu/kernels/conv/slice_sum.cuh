// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: adds the partial results of products whose sums were cut into slices, in a fixed order.

#include <pufferfish/gpu/kernels/conv/result_target.cuh>
#include <pufferfish/gpu/kernels/conv/slice_sum.hpp>
#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// The sum of `slices` partial results of `size` elements each: result_i = the sum of partials[slice * size +
/// i] over the slices, plus the target's bias or old value. turned_rows: see slice_sum.
template <class T>
struct slice_job {
  result_target<T> result;
  int slices;
  index_t size;
  int turned_rows;

  /// Where element i of the partial results is stored.
  __device__ index_t place(index_t i) const {
    if (turned_rows == 0) return i;
    const index_t columns = result.columns, line = i / columns, tap = line / turned_rows;
    const index_t taps = size / (columns * turned_rows);
    return ((taps - 1 - tap) * columns + i % columns) * turned_rows + line % turned_rows;
  }
};

/// Computes two jobs; `first_blocks` blocks compute the first one. A block computes items = 256 / Groups
/// elements; each of its groups of threads adds every Groups-th slice, in double. Grid: size / items blocks
/// of 256 threads for each job; thread t has item t % items and the slices t / items, t / items + Groups, ...
template <class T, int Groups>
static __global__ void __launch_bounds__(256)
    sum_slices(grid_dependency earlier, slice_job<T> first, slice_job<T> second, unsigned first_blocks) {
  earlier.wait();
  constexpr int items = 256 / Groups;
  __shared__ array_of<array_of<double, items>, Groups> sums;
  const bool is_first = blockIdx.x < first_blocks;
  const slice_job<T> job = is_first ? first : second;
  const int group = block_thread() / items, item = block_thread() % items;
  const index_t at = static_cast<index_t>(blockIdx.x - (is_first ? 0 : first_blocks)) * items + item;
  double sum = 0.0;
  if (at < job.size) {
#pragma unroll 4
    for (int slice = group; slice < job.slices; slice += Groups) {
      sum += static_cast<double>(job.result.partials[slice * job.size + at]);
    }
  }
  if constexpr (Groups > 1) {
    sums[group][item] = sum;
    __syncthreads();
    if (group > 0) return;
#pragma unroll
    for (int other = 1; other < Groups; ++other) sum += sums[other][item];
  }
  if (at >= job.size) return;
  const result_target<T>& result = job.result;
  if (result.bias != nullptr)
    sum += static_cast<double>(static_cast<float>(result.bias[at % result.columns]));
  T& out = result.out[job.place(at)];
  if (result.add) sum += static_cast<double>(static_cast<float>(out));
  out = static_cast<T>(static_cast<float>(sum));
}

/// Starts sum_slices, with 8 groups of threads if a job has 16 slices or more, else with one. A job without
/// elements is left out.
template <class T>
inline void add_slices(const launch_site& site, const slice_job<T>& first, const slice_job<T>& second) {
  constexpr int groups = 8;
  const auto start = [&](auto kernel, int items) {
    const auto blocks = static_cast<unsigned>(ceil_div(first.size, items));
    launch(site, {blocks + static_cast<unsigned>(ceil_div(second.size, items)), 256}, kernel, first, second,
           blocks);
  };
  if (first.slices >= 2 * groups || second.slices >= 2 * groups) {
    start(sum_slices<T, groups>, 256 / groups);
  } else {
    start(sum_slices<T, 1>, 256);
  }
}
/// Starts sum_slices for one job of `size` elements. result.partials: slices x size floats.
template <class T>
inline void add_slices(const launch_site& site, int slices, index_t size, const result_target<T>& result) {
  add_slices<T>(site, {result, slices, size, 0}, {result, 0, 0, 0});
}

void add_weight_slices(cudaStream_t stream, const slice_sums& sums) {
  const auto job = [&](int i) -> slice_job<float> {
    if (i >= sums.count) return {};
    const slice_sum& s = sums.sums[i];
    return {target_of<float>(s.out, nullptr, s.partials, s.add, s.columns), s.slices, s.size, s.turned_rows};
  };
  add_slices<float>(stream, job(0), job(1));
}

/// Completes a gradient of weights: now or, if `later` is not null, together with others.
inline void add_slices_or_push(const launch_site& site, const slice_sum& sum, slice_sums* later) {
  if (later != nullptr) return later->push(sum);
  add_slices<float>(site, sum.slices, sum.size,
                    target_of<float>(sum.out, nullptr, sum.partials, sum.add, sum.columns));
}

PUFFERFISH_KERNELS_END
