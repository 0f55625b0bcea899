// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: moments of the channels of a result that warp groups compute, block of pixels by block of
/// pixels.

#include <pufferfish/gpu/kernels/conv/halo_plan.hpp>
#include <pufferfish/gpu/kernels/gemm/warpgroup.cuh>
#include <pufferfish/gpu/kernels/reduce/moment_parts.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Adds values[0 .. Count - 1] over the lanes of a warp that have the same index modulo 4, in a fixed order.
/// Count: a power of two. In each step, a lane sends half of its numbers to the lane at the distance
/// `Distance` and adds the numbers that it receives to the other half. Afterwards a lane has in values[0 ..
/// max(Count / 8, 1) - 1] the sums of the numbers from the returned index on.
template <int Count, int Distance = 16>
__device__ inline int add_over_rows(float* values, int lane) {
  constexpr int kept = Count > 1 ? Count / 2 : 1;
  const bool upper = Count > 1 && (lane & Distance) != 0;
#pragma unroll
  for (int i = 0; i < kept; ++i) {
    const float sent = Count > 1 && !upper ? values[i + Count / 2] : values[i];
    if (upper) values[i] = values[i + Count / 2];
    values[i] += __shfl_xor_sync(all_lanes, sent, Distance);
  }
  const int first = upper ? kept : 0;
  if constexpr (Distance > 4) return first + add_over_rows<kept, Distance / 2>(values, lane);
  return first;
}

/// Moments of the results of a thread block, which is one part, in `columns` channels. Each warp has sums of
/// its own in shared memory: of the distances from the first value that the warp has in a channel, and of
/// their squares. So a large mean does not cancel digits. A warp adds 16 values at a time.
class halo_moments {
 public:
  /// `memory`: plans::halo_moment_bytes(columns) bytes of shared memory, aligned to 16 bytes. `warp`: number
  /// of the calling thread's warp in the block.
  __device__ halo_moments(unsigned char* memory, int columns, int warp)
      : memory_(reinterpret_cast<float*>(memory)), columns_(columns), warp_(warp) {}

  /// Adds the sums of a block of pixels, rounded to T, in the channels first .. first + Columns - 1. All
  /// threads of a warp group must call this function. Before the first call for a block of pixels,
  /// new_block() must have been called.
  template <class T, int Columns>
  __device__ void add(const group_sums<T, Columns>& sums, int first) const {
    if (rows_ == 0) return;
    constexpr int own = Columns / 4;
    const int lane = block_thread() % warp_threads, q = lane % 4;
    const auto value = [&](int at, int second) {
      return static_cast<float>(static_cast<T>(sums.values[at / 2 * 4 + 2 * second + at % 2]));
    };
    // Number `at` of a thread is in this channel.
    const auto channel = [&](int at) { return first + at / 2 * 8 + 2 * q + at % 2; };
    float* const shifts = of_warp(0);
    if (is_first_) {
#pragma unroll
      for (int at = 0; at < own; ++at) {
        if (lane / 4 == 0) shifts[channel(at)] = value(at, 0);
      }
      __syncwarp();
    }
    array_of<float, own> distances, squares;
#pragma unroll
    for (int at = 0; at < own; ++at) {
      const float shift = shifts[channel(at)];
      const float a = inside_[0] ? value(at, 0) - shift : 0.0F, b = inside_[1] ? value(at, 1) - shift : 0.0F;
      distances[at] = a + b;
      squares[at] = a * a + b * b;
    }
    const int from = add_over_rows<own>(distances, lane);
    add_over_rows<own>(squares, lane);
    if (own < 8 && lane / 4 % 2 != 0) return;  // two lanes have the same sum
#pragma unroll
    for (int i = 0; i < (own < 8 ? 1 : own / 8); ++i) {
      float &sum = of_warp(1)[channel(from + i)], &square = of_warp(2)[channel(from + i)];
      sum = is_first_ ? distances[i] : sum + distances[i];
      square = is_first_ ? squares[i] : square + squares[i];
    }
  }

  /// Begins a block of pixels. first, second: whether the results in the calling thread's two rows of the
  /// sums (group_row) exist. If any result of a warp exists, the one in its first row does.
  __device__ void new_block(bool first, bool second) {
    inside_[0] = first;
    inside_[1] = second;
    // Four lanes hold the same rows.
    rows_ = (__popc(__ballot_sync(all_lanes, first)) + __popc(__ballot_sync(all_lanes, second))) / 4;
    is_first_ = count_ == 0;
    count_ += rows_;
  }

  /// Merges the moments of all warps, as part `part` of the channels from first_column on, and then those of
  /// all parts (finish_moments). All threads of the block must call this function. `unused`: shared memory
  /// of the block without other use.
  __device__ void finish(const moment_store& store, int part, int tile, int first_column,
                         void* unused) const {
    constexpr int warps = plans::halo_groups * group_threads / warp_threads;
    float* const counts = memory_ + 3 * warps * columns_;
    if (block_thread() % warp_threads == 0) counts[warp_] = static_cast<float>(count_);
    __syncthreads();
    for (int column = block_thread(); column < columns_; column += block_threads()) {
      moment_total all;
      all.start(nullptr);
      for (int warp = 0; warp < warps; ++warp) {
        if (counts[warp] == 0.0F) continue;  // the other numbers have not been written
        const auto number = [&](int which) { return memory_[(which * warps + warp) * columns_ + column]; };
        const double shift = static_cast<double>(number(0));
        if (all.count == 0.0) all.start(&shift);
        all.add_distances(counts[warp], number(0), number(1), number(2));
      }
      store.save(part, first_column + column, all);
    }
    finish_moments(store, part, tile, first_column, columns_, static_cast<double*>(unused));
  }

 private:
  // The numbers of the calling thread's warp: 0 shifts, 1 sums of distances, 2 sums of squares.
  __device__ float* of_warp(int which) const {
    constexpr int warps = plans::halo_groups * group_threads / warp_threads;
    return memory_ + (which * warps + warp_) * columns_;
  }

  float* memory_;
  int columns_, warp_;
  int count_ = 0, rows_ = 0;  // values of a channel so far, and in this block of pixels
  bool inside_[2] = {};       // whether the results of this thread's rows exist
  bool is_first_ = true;      // whether this block of pixels is the warp's first one with values
};

PUFFERFISH_KERNELS_END
