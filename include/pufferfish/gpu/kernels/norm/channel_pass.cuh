// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: elementwise passes whose threads keep the numbers of their channels in registers.

#include <cstddef>
#include <cstdint>

#include <pufferfish/gpu/kernels/elementwise/relu_mask.hpp>
#include <pufferfish/gpu/kernels/reduce/columns.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Largest number of threads of a block. A thread then has at most 128 registers, and two blocks of 256
/// threads run on a multiprocessor.
inline constexpr int most_channel_threads = 512;

/// A task has task::width; load(channel), the numbers of `width` channels; fetch(element), what a unit of
/// `width` elements reads; and run(element, inside, fetched, numbers). If it also has finish(channel), that
/// is called once for each channel. `inside` is false for a thread without a unit that only joins its warp's
/// operations. A block has whole warps and `per_block` units, a multiple of its threads; `columns` units make
/// a row. Block b has the units b per_block .. of all `total` units, thread t of it those at t, t + threads,
/// .... If the number of threads is a multiple of `columns`, a thread has the same channels in every step: it
/// loads their numbers once, and four units at a time.
template <class Task>
static __global__ void __launch_bounds__(most_channel_threads)
    channel_pass_kernel(grid_dependency earlier, Task task, index_t total, index_t columns,
                        index_t per_block) {
  earlier.wait();
  if constexpr (requires { &Task::finish; }) {
    for (index_t c = grid_thread(); c < columns * Task::width; c += grid_threads()) task.finish(c);
  }
  const index_t begin = static_cast<index_t>(blockIdx.x) * per_block;
  const index_t end = begin + per_block < total ? begin + per_block : total;
  const index_t lane = threadIdx.x % warp_threads, threads = blockDim.x, step = threads % columns;
  index_t at = begin + threadIdx.x, column = at % columns;
  using fetched = decltype(task.fetch(at));
  auto values = task.load(column * Task::width);
  if (step == 0) {
    constexpr int ahead = 4;  // units whose loads are in flight
    for (; at - lane < end; at += ahead * threads) {
      fetched units[static_cast<std::size_t>(ahead)];
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        if (at + i * threads < end) units[i] = task.fetch((at + i * threads) * Task::width);
      }
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        const index_t unit = at + i * threads;
        if (unit - lane < end) task.run(unit * Task::width, unit < end, units[i], values);
      }
    }
    return;
  }
  for (; at - lane < end; at += threads) {
    fetched unit;
    if (at < end) unit = task.fetch(at * Task::width);
    task.run(at * Task::width, at < end, unit, values);
    column = column + step < columns ? column + step : column + step - columns;
    values = task.load(column * Task::width);
  }
}

/// Starts channel_pass_kernel for rows x channels elements; task::width divides the channels. A thread has 1
/// to 8 steps, more than one only if at least 1024 blocks remain.
template <class Task>
void channel_pass(const launch_site& stream, const Task& task, index_t rows, index_t channels) {
  const index_t columns = channels / Task::width, total = rows * columns;
  if (total == 0) return;
  // A number of threads for which every thread keeps its channels, if possible.
  index_t threads = columns;
  while (threads % warp_threads != 0 && threads <= most_channel_threads) threads *= 2;
  threads = threads > most_channel_threads ? 256 : threads * (threads < 256 ? 256 / threads : 1);
  // At least two blocks for each multiprocessor of a large device, so that few threads load the numbers of
  // their channels.
  const index_t rounds = total / (threads * 264);
  const index_t per_block = threads * (rounds < 1 ? 1 : rounds < 8 ? rounds : 8);
  launch(stream, {static_cast<unsigned>(ceil_div(total, per_block)), static_cast<unsigned>(threads)},
         channel_pass_kernel<Task>, task, total, columns, per_block);
}

/// The bits of the lanes that share a word of a mask, `Width` of each lane; all 32 lanes call it.
template <int Width>
__device__ inline std::uint32_t join_bits(std::uint32_t bits, int lane) {
  constexpr int lanes = mask_word_bits / Width;
  bits <<= lane % lanes * Width;
  for (int distance = lanes / 2; distance > 0; distance /= 2)
    bits |= __shfl_xor_sync(all_lanes, bits, distance);
  return bits;
}

PUFFERFISH_KERNELS_END
