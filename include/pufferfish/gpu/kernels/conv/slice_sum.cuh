// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: adds the partial results of products whose sums were cut into slices, in a fixed order.

#include <pufferfish/gpu/kernels/conv/result_target.cuh>
#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// result_i = the sum of partials[slice * size + i] over the slices, plus the target's bias or old value. A
/// block computes items = 256 / Groups elements; each of its groups of threads adds every Groups-th slice, in
/// double. Grid: size / items blocks of 256 threads; thread t has item t % items and the slices t / items, t
/// / items + Groups, ...
template <class T, int Groups>
static __global__ void __launch_bounds__(256)
    sum_slices(grid_dependency earlier, result_target<T> result, int slices, index_t size) {
  earlier.wait();
  constexpr int items = 256 / Groups;
  __shared__ array_of<array_of<double, items>, Groups> sums;
  const int group = block_thread() / items, item = block_thread() % items;
  const index_t at = static_cast<index_t>(blockIdx.x) * items + item;
  double sum = 0.0;
  if (at < size) {
#pragma unroll 4
    for (int slice = group; slice < slices; slice += Groups) {
      sum += static_cast<double>(result.partials[slice * size + at]);
    }
  }
  if constexpr (Groups > 1) {
    sums[group][item] = sum;
    __syncthreads();
    if (group > 0) return;
#pragma unroll
    for (int other = 1; other < Groups; ++other) sum += sums[other][item];
  }
  if (at >= size) return;
  if (result.bias != nullptr)
    sum += static_cast<double>(static_cast<float>(result.bias[at % result.columns]));
  if (result.add) sum += static_cast<double>(static_cast<float>(result.out[at]));
  result.out[at] = static_cast<T>(static_cast<float>(sum));
}

/// Starts sum_slices for `size` elements, with 8 groups of threads if there are 16 slices or more, else with
/// one. result.partials: slices x size floats.
template <class T>
inline void add_slices(const launch_site& site, int slices, index_t size, const result_target<T>& result) {
  constexpr int groups = 8;
  if (slices >= 2 * groups) {
    launch(site, {static_cast<unsigned>(ceil_div(size, 256 / groups)), 256}, sum_slices<T, groups>, result,
           slices, size);
  } else {
    launch(site, {static_cast<unsigned>(ceil_div(size, 256)), 256}, sum_slices<T, 1>, result, slices, size);
  }
}

PUFFERFISH_KERNELS_END
