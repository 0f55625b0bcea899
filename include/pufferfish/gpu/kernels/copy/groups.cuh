// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernel of groups.hpp. Memory bandwidth limits its speed.

#include <pufferfish/gpu/kernels/copy/groups.hpp>
#include <pufferfish/gpu/kernels/copy/rows.cuh>
#include <pufferfish/gpu/kernels/gemm/tile_layout.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Block bx copies row bx / groups of group bx % groups, then the row gridDim.x further on, and so on. Its
/// threads have neighbouring runs of Width columns; columns after the last whole run are copied one by one.
template <class T, int Width>
static __global__ void copy_groups_kernel(grid_dependency earlier, index_t groups, index_t rows,
                                          index_t columns, row_array<const T> from, index_t from_step,
                                          row_array<T> to, index_t to_step, const T* bias) {
  earlier.wait();
  using run = element_run<T, Width>;
  const auto at = [&](index_t row, index_t group) {
    const T* const source = from.row(row) + group * from_step;
    T* const target = to.row(row) + group * to_step;
    const T* const added = bias == nullptr ? nullptr : bias + group * columns;
    const auto sum = [&](T value, index_t j) {
      if (added == nullptr) return value;
      return static_cast<T>(static_cast<float>(value) + static_cast<float>(added[j]));
    };
    const index_t whole = columns / Width, rest = columns - whole * Width;
    for (index_t i = static_cast<index_t>(threadIdx.x); i < whole + rest;
         i += static_cast<index_t>(blockDim.x)) {
      if (i >= whole) {
        const index_t j = i - whole + whole * Width;
        target[j] = sum(source[j], j);
        continue;
      }
      run values = *reinterpret_cast<const run*>(source + i * Width);
      for (int k = 0; k < Width; ++k) values.values[k] = sum(values.values[k], i * Width + k);
      *reinterpret_cast<run*>(target + i * Width) = values;
    }
  };
  for (index_t line = static_cast<index_t>(blockIdx.x); line < rows * groups;
       line += static_cast<index_t>(gridDim.x)) {
    at(line / groups, line % groups);
  }
}

template <class T>
void copy_groups(cudaStream_t stream, index_t groups, index_t rows, index_t columns, row_array<const T> from,
                 index_t from_step, row_array<T> to, index_t to_step, const T* bias) {
  const launch_site site(stream, "copy_groups");
  if (columns == 0) return;
  const auto bits = reinterpret_cast<std::uintptr_t>(from.data) | reinterpret_cast<std::uintptr_t>(to.data) |
                    static_cast<std::uintptr_t>(from.stride | to.stride | from_step | to_step) * sizeof(T);
  const auto start = [&](auto width) {
    launch(site, {blocks_for(rows * groups, 1), row_threads(columns, width)}, copy_groups_kernel<T, width>,
           groups, rows, columns, from, from_step, to, to_step, bias);
  };
  constexpr int all = vector_width<T>;
  if (bits % 16 == 0) return start(std::integral_constant<int, all>());
  if (bits % 8 == 0) return start(std::integral_constant<int, all / 2>());
  if constexpr (all == 8) {
    if (bits % 4 == 0) return start(std::integral_constant<int, all / 4>());
  }
  start(std::integral_constant<int, 1>());
}

#define PUFFERFISH_INSTANTIATE(T)                                                                    \
  template void copy_groups<T>(cudaStream_t, index_t, index_t, index_t, row_array<const T>, index_t, \
                               row_array<T>, index_t, const T*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
