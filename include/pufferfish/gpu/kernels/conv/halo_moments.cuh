// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: moments, or gradient sums, of the channels of a result that warp groups compute, block of pixels
/// by block of pixels.

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

/// Sums of the warps of a thread block in shared memory: three numbers of each warp in each of `columns`
/// channels.
class halo_numbers {
 public:
  /// `memory`: plans::halo_moment_bytes(columns) bytes of shared memory, aligned to 16 bytes. `warp`: number
  /// of the calling thread's warp in the block.
  __device__ halo_numbers(unsigned char* memory, int columns, int warp)
      : memory_(reinterpret_cast<float*>(memory)), columns_(columns), warp_(warp) {}

 protected:
  static constexpr int warps = plans::halo_groups * group_threads / warp_threads;

  // Number `which` of a warp in each channel.
  __device__ float* of(int warp, int which) const { return memory_ + (which * warps + warp) * columns_; }
  // The same for the calling thread's warp.
  __device__ float* of_warp(int which) const { return of(warp_, which); }

  // Adds two numbers of each of `Own` channels of a thread, summed over the rows of the warp, to the numbers
  // 1 and 2 of the warp, or replaces these numbers. channel(at): channel of the thread's number `at`.
  template <int Own, class Channel>
  __device__ void add_numbers(array_of<float, Own>& first, array_of<float, Own>& second, Channel channel,
                              bool replace) const {
    const int lane = block_thread() % warp_threads;
    const int from = add_over_rows<Own>(first, lane);
    add_over_rows<Own>(second, lane);
    if (Own < 8 && lane / 4 % 2 != 0) return;  // two lanes have the same sum
#pragma unroll
    for (int i = 0; i < (Own < 8 ? 1 : Own / 8); ++i) {
      float &sum = of_warp(1)[channel(from + i)], &other = of_warp(2)[channel(from + i)];
      sum = replace ? first[i] : sum + first[i];
      other = replace ? second[i] : other + second[i];
    }
  }

  float* memory_;
  int columns_, warp_;
};

/// Moments of the results of a thread block, which is one part, in `columns` channels. Each warp has sums of
/// its own in shared memory: of the distances from the first value that the warp has in a channel, and of
/// their squares. So a large mean does not cancel digits. A warp adds 16 values at a time.
class halo_moments : halo_numbers {
 public:
  using halo_numbers::halo_numbers;

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
    add_numbers<own>(distances, squares, channel, is_first_);
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
    float* const counts = memory_ + 3 * warps * columns_;
    if (block_thread() % warp_threads == 0) counts[warp_] = static_cast<float>(count_);
    __syncthreads();
    for (int column = block_thread(); column < columns_; column += block_threads()) {
      moment_total all;
      all.start(nullptr);
      for (int warp = 0; warp < warps; ++warp) {
        if (counts[warp] == 0.0F) continue;  // the other numbers have not been written
        const double shift = static_cast<double>(of(warp, 0)[column]);
        if (all.count == 0.0) all.start(&shift);
        all.add_distances(counts[warp], of(warp, 0)[column], of(warp, 1)[column], of(warp, 2)[column]);
      }
      store.save(part, first_column + column, all);
    }
    finish_moments(store, part, tile, first_column, columns_, static_cast<double*>(unused));
  }

 private:
  int count_ = 0, rows_ = 0;  // values of a channel so far, and in this block of pixels
  bool inside_[2] = {};       // whether the results of this thread's rows exist
  bool is_first_ = true;      // whether this block of pixels is the warp's first one with values
};

/// Sums for a batch norm (gradient_sum_input), whose output's gradient a thread block computes, in `columns`
/// channels. Each warp has sums of its own in shared memory, after the means of the channels.
template <class T>
class halo_gradient_sums : halo_numbers {
 public:
  using halo_numbers::halo_numbers;

  /// Sets the sums to 0. `means`: the means of the channels. All lanes of a warp must call this function.
  __device__ void clear(const float* means) const {
    for (int c = block_thread() % warp_threads; c < columns_; c += warp_threads) {
      of_warp(0)[c] = means[c];
      of_warp(1)[c] = of_warp(2)[c] = 0.0F;
    }
    __syncwarp();
  }

  /// Adds the sums of a block of pixels in all channels, rounded to T. x, mask: of the norm, from the first
  /// channel of the block's first result on; the mask may be null. rows: distances from there to the calling
  /// thread's two rows of the sums, which exist if `inside`. All threads of a warp group must call this
  /// function.
  template <int Columns>
  __device__ void add(const group_sums<T, Columns>& sums, const T* x, const std::uint8_t* mask,
                      const int (&rows)[2], const bool (&inside)[2]) const {
    constexpr int piece = 4;  // numbers at a time, since registers are few
    const int q = block_thread() % 4;
    const float* const means = of_warp(0);
#pragma unroll
    for (int start = 0; start < Columns / 4; start += piece) {
      const auto channel = [&](int at) { return (start + at) / 2 * 8 + 2 * q + at % 2; };
      array_of<float, piece> plain, weighted;
#pragma unroll
      for (int at = 0; at < piece; ++at) plain[at] = weighted[at] = 0.0F;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!inside[half]) continue;
#pragma unroll
        for (int at = 0; at < piece; at += 2) {
          const auto pair = *reinterpret_cast<const element_run<T, 2>*>(x + rows[half] + channel(at));
          // The bits of 8 channels are one byte.
          const unsigned bits = mask == nullptr ? 3U : mask[(rows[half] + channel(at)) / 8] >> (2 * q);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const T rounded = static_cast<T>(sums.values[(start + at) * 2 + 2 * half + i]);
            const float g = ((bits >> i) & 1U) != 0 ? static_cast<float>(rounded) : 0.0F;
            plain[at + i] += g;
            weighted[at + i] += g * (static_cast<float>(pair.values[i]) - means[channel(at + i)]);
          }
        }
      }
      add_numbers<piece>(plain, weighted, channel, false);
    }
  }

  /// As halo_moments::finish.
  __device__ void finish(const moment_store& store, int part, int tile, int first_column,
                         void* unused) const {
    __syncthreads();
    for (int column = block_thread(); column < columns_; column += block_threads()) {
      gradient_total all;
      all.start(nullptr);
      for (int warp = 0; warp < warps; ++warp) {
        all.add({static_cast<double>(of(warp, 1)[column]), static_cast<double>(of(warp, 2)[column])});
      }
      store.save(part, first_column + column, all);
    }
    finish_moments<gradient_total>(store, part, tile, first_column, columns_, static_cast<double*>(unused));
  }
};

PUFFERFISH_KERNELS_END
