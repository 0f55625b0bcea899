// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: merges the states of the threads of a block, such as their sums of some columns, in a fixed
/// order.

#include <cstddef>
#include <type_traits>

#include <pufferfish/gpu/kernels/threads.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Number of threads of a block that merges states.
inline constexpr unsigned column_threads = 256;

/// A state with an odd number of doubles, so that neighbouring threads use different banks of shared memory.
template <class State>
struct gapped : State {
  double gap;
};
/// A state as it is stored in shared memory, an odd number of doubles long.
template <class State>
using apart = std::conditional_t<(sizeof(State) / sizeof(double)) % 2 == 0, gapped<State>, State>;

/// Number of doubles of shared memory in which a block of column_threads threads merges states.
template <class State>
inline constexpr std::size_t merge_doubles = column_threads * sizeof(apart<State>) / sizeof(double);

/// Merges the states of the threads (x, 0), (x, 1), .. (x, down - 1) of a block of column_threads threads,
/// where thread (x, y) is number y across + x. Thread (x, 0) has the result. `down` must be a power of 2, and
/// all threads of the block must call this function. Halves are merged until one state is left, so the order
/// depends on `down` alone. `memory`: merge_doubles<State> doubles of shared memory; a barrier must separate
/// two calls.
template <class State>
__device__ inline void merge_down(State& state, double* memory, unsigned across, unsigned down) {
  auto* const all = reinterpret_cast<apart<State>*>(memory);
  const unsigned own = static_cast<unsigned>(block_thread());
  static_cast<State&>(all[own]) = state;
  for (unsigned half = down / 2; half > 0; half /= 2) {
    __syncthreads();
    if (own < half * across) all[own].merge(all[own + half * across]);
  }
  state = all[own];
}

PUFFERFISH_KERNELS_END
